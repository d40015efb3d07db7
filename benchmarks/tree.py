"""Times the radix tree's operations, without pools, copies or a model.

    python -m benchmarks.tree [--json FILE] [--quick]

One row per operation, one column per (components, page size): the median in microseconds over many
samples, garbage collection off. Query keys are other objects than the stored ones, so that no
comparison is short-cut by identity.

  match, one edge       a fully cached prompt of n tokens, put in by one insert
  match, 64 nodes       a conversation of 131,072 tokens, put in by 64 inserts of 2,048
  acquire + release     lock, refresh and unlock the boundary at the end of that conversation
  commit 4,096          publish a new suffix of 4,096 tokens below a cached prefix of as many
  evict, per leaf       free 100 leaves of 64 tokens at once, of n leaves that were all used again
                        since they were made: in that order, or in random order (the nodes then
                        lie scattered in memory, and a cache miss costs as much as the work)
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from banyan.bench.report import machine, make_console, versions
from banyan.spec import CacheSpec, Component, Full, Point, Window
from banyan.tree import Offer, Tree
from banyan.tree.keys import encode_tokens
from banyan.tree.node import Node, Tier
from benchmarks.yardstick import yardstick_us

VOCABULARY = 128_000
WINDOW = 512
TURNS, TURN = 64, 2_048
LEAF, BATCH = 64, 100

COMPONENTS = {
    "full": (Component("full", Full()),),
    "full+window": (Component("full", Full()), Component("window", Window(WINDOW))),
    "full+state": (Component("full", Full()), Component("state", Point())),
}
BUDGETS_US = {
    "match, one edge 4,096": 4.0,
    "match, one edge 131,072": 25.0,
    "match, 64 nodes": 70.0,
}

Samples = list[float]
"""Microseconds of one operation each."""


@dataclass(frozen=True)
class Effort:
    """How much is measured: samples per operation, and the tree sizes of the eviction rows."""

    samples: int
    leaves: tuple[int, ...]


class Subject:
    """One tree under test, and how it is filled."""

    def __init__(self, components: str, page_size: int, seed: int = 0) -> None:
        self.spec = CacheSpec(COMPONENTS[components], page_size)
        self.random = np.random.default_rng(seed)
        self.clear()

    def clear(self) -> None:
        """Start over with an empty tree."""
        self.tree = Tree(self.spec)
        self.next_slot = 0

    def tokens(self, count: int) -> bytes:
        """`count` random tokens as key bytes."""
        return encode_tokens(self.random.integers(0, VOCABULARY, count, dtype=np.int32))

    def offer(self, start: int, stop: int) -> tuple[list[Offer | None], dict[int, tuple[int, int]]]:
        """What a request would publish for [start, stop): fresh slots for every component."""
        page = self.spec.page_size
        offers: list[Offer | None] = []
        states: dict[int, tuple[int, int]] = {}
        for index, component in enumerate(self.spec.components):
            if isinstance(component.reach, Point):
                offers.append(None)
                states[index] = (stop, int(self._slots(1)[0]))
                continue
            first = max(start, component.reach.first_needed(stop, page)) // page
            offers.append(Offer(first, self._slots(stop // page - first)))
        return offers, states

    def insert(self, key: bytes, start: Node, stop: int) -> Node:
        """Publish `key[start.end:stop]` below `start`; returns the node that ends at `stop`."""
        offers, states = self.offer(start.end, stop)
        return self.tree.insert(start, key, stop, offers, states).node

    def _slots(self, count: int) -> Any:
        self.next_slot += count
        return np.arange(self.next_slot - count, self.next_slot, dtype=np.int32)


def timed(operation: Callable[[], object], samples: int) -> Samples:
    """Run `operation` `samples` times, a few more first to warm up."""
    for _ in range(min(samples, 20)):
        operation()
    times = []
    for _ in range(samples):
        start = time.perf_counter_ns()
        operation()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


# ---- workloads -----------------------------------------------------------------------------------


def match_one_edge(subject: Subject, tokens: int, effort: Effort) -> Samples:
    subject.clear()
    key = subject.tokens(tokens)
    subject.insert(key, subject.tree.root(b""), tokens)
    query = key + subject.tokens(1)
    assert subject.tree.match(query).boundary == tokens
    return timed(lambda: subject.tree.match(query), effort.samples)


def conversation(subject: Subject) -> tuple[bytes, Node]:
    """A path of `TURNS` inserts; returns a query for all of it, and its last node."""
    subject.clear()
    key, node = b"", subject.tree.root(b"")
    for turn in range(1, TURNS + 1):
        key += subject.tokens(TURN)
        node = subject.insert(key, node, turn * TURN)
    query = key + subject.tokens(1)
    assert subject.tree.match(query).boundary == TURNS * TURN
    return query, node


def match_64_nodes(subject: Subject, effort: Effort) -> Samples:
    query, _ = conversation(subject)
    return timed(lambda: subject.tree.match(query), effort.samples)


def acquire_release(subject: Subject, effort: Effort) -> Samples:
    query, _ = conversation(subject)
    tree = subject.tree
    match = tree.match(query)

    def once() -> None:
        node = tree.node_at(match, match.boundary)
        starts = tree.lock(node)
        tree.use(node)
        tree.unlock(node, starts)

    return timed(once, effort.samples)


def commit_suffix(subject: Subject, tokens: int, effort: Effort) -> Samples:
    subject.clear()
    tree = subject.tree
    prefix = subject.tokens(tokens)
    base = subject.insert(prefix, tree.root(b""), tokens)
    locked = tree.lock(base)
    times = []
    for _ in range(max(20, effort.samples // 10)):
        key = prefix + subject.tokens(tokens)
        offers, states = subject.offer(tokens, 2 * tokens)
        start = time.perf_counter_ns()
        tree.insert(base, key, 2 * tokens, offers, states)
        times.append((time.perf_counter_ns() - start) / 1000)
    tree.unlock(base, locked)
    return times


def evict_leaves(subject: Subject, leaves: int, scattered: bool) -> Samples:
    """Microseconds per leaf; at most half of the leaves go, at least 10 samples are taken."""
    rounds = min(50, leaves // (2 * BATCH))
    times: Samples = []
    for _ in range(math.ceil(10 / rounds)):
        _grow_leaves(subject, leaves, scattered)
        need = [0] * len(subject.spec.components)
        need[0] = BATCH * LEAF // subject.spec.page_size
        for _ in range(rounds):
            start = time.perf_counter_ns()
            freed = subject.tree.evict(Tier.DEVICE, need)
            times.append((time.perf_counter_ns() - start) / 1000 / BATCH)
            assert freed is not None and freed.count(Tier.DEVICE, 0) == need[0]
    return times


def _grow_leaves(subject: Subject, leaves: int, scattered: bool) -> None:
    subject.clear()
    prefix = subject.tokens(4096)
    base = subject.insert(prefix, subject.tree.root(b""), 4096)
    nodes = [
        subject.insert(prefix + subject.tokens(LEAF), base, 4096 + LEAF) for _ in range(leaves)
    ]
    if scattered:
        random.Random(leaves).shuffle(nodes)
    for node in nodes:
        subject.tree.use(node)


def workloads(effort: Effort) -> Iterator[tuple[str, Callable[[Subject], Samples]]]:
    """Every row: its name, and what to run on a subject."""
    for tokens in (4_096, 32_768, 131_072):
        yield f"match, one edge {tokens:,}", lambda s, n=tokens: match_one_edge(s, n, effort)
    yield "match, 64 nodes", lambda s: match_64_nodes(s, effort)
    yield "acquire + release", lambda s: acquire_release(s, effort)
    yield "commit 4,096", lambda s: commit_suffix(s, 4_096, effort)
    for scattered in (False, True):
        for leaves in effort.leaves:
            name = f"evict, per leaf of {leaves:,}" + (" scattered" if scattered else "")
            yield name, lambda s, n=leaves, m=scattered: evict_leaves(s, n, m)


# ---- output --------------------------------------------------------------------------------------


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write medians and percentiles here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, smaller trees.")] = False,
) -> None:
    """Time the radix tree's operations."""
    effort = Effort(200, (1_000, 10_000)) if quick else Effort(2_000, (1_000, 10_000, 100_000))
    configs = [(components, page) for components in COMPONENTS for page in (1, 64)]
    console = make_console()
    rows: list[dict[str, Any]] = []
    for name, run in workloads(effort):
        for components, page in configs:
            with console.status(f"{name}, {components}, page {page}"):
                times = _measure(run, Subject(components, page))
            rows.append(_row(name, components, page, times))
    console.print(_table(rows, configs))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        result = {"versions": versions(), "machine": machine(), "rows": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def _measure(run: Callable[[Subject], Samples], subject: Subject) -> Samples:
    gc.collect()
    gc.disable()
    try:
        return run(subject)
    finally:
        gc.enable()


def _row(name: str, components: str, page: int, times: Samples) -> dict[str, Any]:
    tenths = statistics.quantiles(times, n=10)
    return {
        "operation": name,
        "components": components,
        "page_size": page,
        "median_us": statistics.median(times),
        "p10_us": tenths[0],
        "p90_us": tenths[-1],
        "max_us": max(times),
        "samples": len(times),
        "yardstick_us": yardstick_us(),
        "budget_us": BUDGETS_US.get(name),
    }


def _table(rows: list[dict[str, Any]], configs: list[tuple[str, int]]) -> Table:
    table = Table(title="Median, microseconds", title_justify="left", title_style="bold")
    table.add_column("Operation", no_wrap=True)
    for components, page in configs:
        heading = components.replace("+", "\n+ ")
        table.add_column(f"{heading}\npage {page}", justify="right", vertical="bottom")
    table.add_column("Budget", justify="right")
    for name in dict.fromkeys(row["operation"] for row in rows):
        budget = BUDGETS_US.get(name)
        medians = [row["median_us"] for row in rows if row["operation"] == name]
        cells = [f"[red]{m:.2f}[/]" if budget and m > budget else f"{m:.2f}" for m in medians]
        table.add_row(name, *cells, f"{budget:g}" if budget else "")
    return table


if __name__ == "__main__":
    typer.run(main)
