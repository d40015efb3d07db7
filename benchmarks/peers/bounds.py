"""What Banyan's bookkeeping costs at size, against fixed bounds; needs no other system.

    python -m benchmarks.peers.bounds [--json FILE] [--quick]

A row per figure, a column per configuration; what misses its bound is marked. Garbage collection is
off while a time is taken.

  evict      64 tokens at once: the median at 100,000 leaves over that at 1,000, after all of them
             were used again, in order or in random order (scattered in memory)
  extend 1M  a conversation of 1,048,576 tokens gets 2,048 more: its match, and its commit with the
             move of the lease; beside them the making of its key, and of slots
  a node of, a token of
             bytes by tracemalloc, from two trees whose nodes are of unequal length
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from banyan.bench.report import machine, make_console, versions
from banyan.cache import AllocateOutcome, PrefixCache
from banyan.lease import Lease
from banyan.pools.assembler import assemble
from banyan.pools.plan import PoolSize, SizePlan
from banyan.spec import CacheSpec
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tiers.ops import CopyDone, CopyJob, CopyTicket, OpId
from banyan.tree import Node, Tier, encode_tokens
from benchmarks.peers.banyan_side import COMPONENTS, BanyanSide
from benchmarks.peers.side import CONFIGURATIONS
from benchmarks.peers.workloads import LEAF, OWN, Prompts, put

TALK, CHUNK = 1 << 20, 2_048
FEW, MANY = 1_000, 100_000
EVICTIONS = 200

TIMES, EXTEND_US, NODE_BYTES, BYTES_A_TOKEN = 2.0, 1_000.0, 2_500.0, 12.0
"""The bounds, the last one at page 64."""


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Args:
        bound: what it should not exceed, or None.
    """

    name: str
    components: str
    page_size: int
    value: float
    unit: str
    bound: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.bound is None else self.value <= self.bound


# ---- eviction ------------------------------------------------------------------------------------


def grown(components: str, page_size: int, leaves: int, scattered: bool) -> BanyanSide:
    """A tree of `leaves` leaves on one stem, all used again: as they came, or in random order."""
    side = BanyanSide(components, page_size)
    prompts = Prompts()
    stem = prompts.draw(OWN)
    put(side, stem)
    nodes: list[Node] = []
    for i in range(leaves):
        prompt = stem + prompts.branch(LEAF, i)
        put(side, prompt, OWN)
        nodes.append(side.node_of(side.query(prompt)))
    if scattered:
        random.Random(leaves).shuffle(nodes)
    for node in nodes:
        side.tree.use(node)
    return side


def eviction_us(components: str, page_size: int, leaves: int, scattered: bool) -> float:
    """Median microseconds of freeing one leaf's tokens."""
    side = grown(components, page_size, leaves, scattered)
    need = [0] * side.tree.width
    need[0] = LEAF // page_size
    times = []
    with collecting_off():
        for _ in range(EVICTIONS):
            start = time.perf_counter_ns()
            freed = side.tree.evict(Tier.DEVICE, need)
            times.append((time.perf_counter_ns() - start) / 1000)
            assert freed is not None
    side.check()
    return statistics.median(times)


def eviction(components: str, page_size: int, quick: bool) -> Iterator[Figure]:
    """Figures of both orders of use."""
    many = MANY // 10 if quick else MANY
    for order, scattered in (("in order", False), ("scattered", True)):
        few_us = eviction_us(components, page_size, FEW, scattered)
        many_us = eviction_us(components, page_size, many, scattered)
        name = f"evict, {order}"
        here = (components, page_size)
        yield Figure(f"{name}, {FEW:,} leaves", *here, few_us, "us")
        yield Figure(f"{name}, {many:,} leaves", *here, many_us, "us")
        yield Figure(f"{name}, ratio", *here, many_us / few_us, "", TIMES)


# ---- a long conversation -------------------------------------------------------------------------


class NoCopies:
    """A `CopyEngine` for a cache that has no host tier."""

    def submit(self, job: CopyJob) -> CopyTicket:
        raise AssertionError(f"{job.op_id}: there is no host to copy to or from")

    def poll(self) -> list[CopyDone]:
        return []

    def cancel(self, op_id: OpId) -> bool:
        return False

    def close(self) -> None:
        pass


def byteless_cache(components: str, page_size: int, tokens: int) -> PrefixCache:
    """A cache with slots for `tokens` tokens, no host, and no bytes behind its slots."""
    spec = CacheSpec(COMPONENTS[components], page_size)
    sizes = tuple(
        PoolSize(c.name, tokens // page_size if c.reach.page_shaped else tokens // CHUNK, 0)
        for c in spec.components
    )
    reaches = tuple(c.reach for c in spec.components)
    stack = assemble(spec, SizePlan(sizes, (), reaches, page_size, spec.components[0].name))
    return PrefixCache(stack, NoCopies(), TierOptions(write_policy=WritePolicy.NONE))


def extension(components: str, page_size: int, quick: bool) -> Iterator[Figure]:
    """A conversation of `TALK` tokens goes on chunk by chunk on one lease."""
    samples = 5 if quick else 40
    cache = byteless_cache(components, page_size, TALK + (samples + 2) * CHUNK)
    tokens = np.random.default_rng(0).integers(0, 128_000, TALK + samples * CHUNK, dtype=np.int32)
    key = encode_tokens(tokens[:TALK])
    lease = cache.acquire(cache.match(key))
    for stop in range(CHUNK, TALK + 1, CHUNK):
        _compute(cache, lease, stop)
        cache.commit(lease, key)
    parts: dict[str, list[float]] = {"key": [], "slots": [], "match": [], "commit": []}
    with collecting_off():
        for stop in range(TALK + CHUNK, len(tokens) + 1, CHUNK):
            chunk = tokens[stop - CHUNK : stop]
            marks = [time.perf_counter_ns()]
            key += encode_tokens(chunk)
            marks.append(time.perf_counter_ns())
            _compute(cache, lease, stop)
            marks.append(time.perf_counter_ns())
            match = cache.match(key)
            marks.append(time.perf_counter_ns())
            cache.commit(lease, key)
            marks.append(time.perf_counter_ns())
            assert match.boundary == stop - CHUNK == lease.node.start or components != "full"
            for name, begin, end in zip(parts, marks, marks[1:], strict=False):
                parts[name].append((end - begin) / 1000)
    cache.release(lease)
    cache.check()
    us = {name: statistics.median(times) for name, times in parts.items()}
    here, name = (components, page_size), "extend 1M"
    for part, value in us.items():
        yield Figure(f"{name}: {part}", *here, value, "us")
    yield Figure(f"{name}: match and commit", *here, us["match"] + us["commit"], "us", EXTEND_US)


def _compute(cache: PrefixCache, lease: Lease, stop: int) -> None:
    assert cache.allocate(lease, stop) is AllocateOutcome.OK
    cache.advance(lease, stop)


# ---- memory --------------------------------------------------------------------------------------


def traced_bytes(components: str, page_size: int, nodes: int, tokens: int) -> tuple[int, int]:
    """Bytes of a tree of `nodes` prompts of `tokens` each that share nothing; and its nodes."""
    gc.collect()
    prompts = Prompts()
    side = BanyanSide(components, page_size)
    tracemalloc.start()
    try:
        for i in range(nodes):
            put(side, prompts.branch(tokens, i))
        gc.collect()
        return tracemalloc.get_traced_memory()[0], sum(1 for _ in side.tree.nodes())
    finally:
        tracemalloc.stop()


def memory(components: str, page_size: int, quick: bool) -> Iterator[Figure]:
    """Bytes of a node of 64 tokens with them, and the share of a node and of a token alone."""
    prompts, long = (500, 16_384) if quick else (5_000, 32_768)
    small, small_nodes = traced_bytes(components, page_size, prompts, LEAF)
    large, large_nodes = traced_bytes(components, page_size, prompts // 100, long)
    small_tokens, large_tokens = prompts * LEAF, prompts // 100 * long
    per_token = (large - small * large_nodes / small_nodes) / (
        large_tokens - small_tokens * large_nodes / small_nodes
    )
    here = (components, page_size)
    per_node = small / small_nodes
    yield Figure(f"a node of {LEAF} tokens", *here, per_node, "bytes", NODE_BYTES)
    bound = BYTES_A_TOKEN if page_size == 64 else None
    yield Figure("a token of a long node", *here, per_token, "bytes", bound)
    yield Figure(f"a token, nodes of {long:,}", *here, large / large_tokens, "bytes")


# ---- all of it -----------------------------------------------------------------------------------


@contextmanager
def collecting_off() -> Iterator[None]:
    """Garbage collection off, after one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


PARTS: tuple[Callable[[str, int, bool], Iterator[Figure]], ...] = (eviction, extension, memory)


def figure_table(figures: list[Figure]) -> Table:
    """A row per figure, a column per configuration; what misses its bound in red and marked."""
    table = Table(title="Banyan alone", title_justify="left", title_style="bold")
    table.add_column("Figure", no_wrap=True, vertical="bottom")
    columns = list(dict.fromkeys((f.components, f.page_size) for f in figures))
    for components, page in columns:
        heading = components.replace("+", "\n+ ")
        table.add_column(f"{heading}\npage {page}", justify="right", vertical="bottom")
    table.add_column("Bound", justify="right", vertical="bottom")
    for name in dict.fromkeys(f.name for f in figures):
        row = {(f.components, f.page_size): f for f in figures if f.name == name}
        bound = next((f"{f.bound:g}" for f in row.values() if f.bound is not None), "")
        unit = next(f.unit for f in row.values())
        cells = [_cell(row[c]) for c in columns]
        table.add_row(f"{name}, {unit}" if unit else name, *cells, bound)
    return table


def _cell(figure: Figure) -> str:
    text = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
    return f"[red]{text} >[/]" if figure.met is False else text


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, smaller trees.")] = False,
) -> None:
    """Measure Banyan's bookkeeping at size."""
    console = make_console()
    figures: list[Figure] = []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(PARTS) * len(CONFIGURATIONS))
        for part in PARTS:
            for components, page in CONFIGURATIONS:
                label = f"{part.__name__}: {components}, page {page}"
                progress.update(task, description=label)
                figures += part(components, page, quick)
                progress.advance(task)
    console.print(figure_table(figures))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(f) | {"met": f.met} for f in figures]
        result = {"versions": versions(), "machine": machine(), "quick": quick, "figures": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
