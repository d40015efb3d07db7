"""How fast records move between CPU pools, against a plain torch copy of the same bytes.

    python -m benchmarks.copies [--json FILE] [--threads N]

Each row copies the pages of one job in three ways that take turns: one contiguous tensor to another
by torch, with `--threads` threads; through the mover, on this thread; and through the threaded
engine, from `submit` until a reader of the last layer goes on. Medians, after one turn that is not
counted. The target is for `large` pages, whose bytes no processor cache holds; `small` ones fit,
so their plain copy is faster than memory.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table

from banyan.bench.report import machine, make_console, versions
from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.plan import PoolSize, SizePlan
from banyan.spec import Buffer, CacheSpec, Component, Full
from banyan.tiers.moves import StackMover, job_bytes, job_layers
from banyan.tiers.ops import CopyBlock, CopyJob, CopyKind, OpId, Slots
from banyan.tiers.threaded import ThreadedCopyEngine

PAGES = 64
SPARE = 16
LARGE, SMALL = "large: 32 layers, 8 x 128, bf16, page 64", "small: 6 layers, 2 x 32, f32, page 16"
TARGET = 0.8
"""Part of the plain copy's speed that the engine should reach with large pages."""


@dataclass(frozen=True)
class Row:
    """One measurement; speeds in GB/s of bytes written.

    Args:
        target: what `ratio` should not be below, or None.
    """

    pages: str
    slots: str
    way: str
    megabytes: float
    plain: float
    mover: float
    engine: float
    target: float | None = None

    @property
    def ratio(self) -> float:
        """The engine's speed over the plain copy's."""
        return self.engine / self.plain

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.ratio >= self.target


def kv_spec(layers: int, heads: int, width: int, dtype: str, page_size: int) -> CacheSpec:
    """Full attention with K and V in every layer."""
    buffers = tuple(
        Buffer(name, layer, (heads, width), dtype) for layer in range(layers) for name in "kv"
    )
    return CacheSpec((Component("full", Full(), buffers),), page_size)


def make_stack(spec: CacheSpec) -> PoolStack:
    """Pools with a few more slots than a job moves, every byte touched once."""
    part = spec.components[0]
    size = PoolSize(part.name, PAGES + SPARE, part.record_bytes(spec.page_size))
    plan = SizePlan((size,), (size,), (part.reach,), spec.page_size, part.name, part.name)
    stack = assemble(spec, plan)
    for buffer in stack.device[0].buffers.values():
        buffer.fill_(1)
    stack.host[0].data.fill_(2)
    return stack


def taking_turns(ways: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of each way, the first turn not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, turns):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn >= 0:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def plain_call(nbytes: int) -> Callable[[], object]:
    """One contiguous tensor of bytes copied to another."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


def engine_call(engine: ThreadedCopyEngine, job: CopyJob, last_layer: int) -> Callable[[], object]:
    """Submit, wait as a reader does, and take the completion."""

    def call() -> None:
        engine.submit(job).wait_layer(last_layer)
        (done,) = engine.poll()
        assert done.ok, done.reason

    return call


def pairings(pages: int, total: int) -> dict[str, tuple[Slots, Slots]]:
    """Source and destination slots: a run on both sides, or in random order on both."""
    rng = np.random.default_rng(0)
    first, second = (rng.permutation(total)[:pages].astype(np.int32) for _ in range(2))
    run = np.arange(pages, dtype=np.int32)
    return {"contiguous": (run + 3, run + 7), "scattered": (first, second)}


def measure(name: str, spec: CacheSpec, turns: int, target: float | None = None) -> list[Row]:
    """Both ways, contiguous and scattered slots, for one kind of page."""
    stack = make_stack(spec)
    mover, engine = StackMover(stack), ThreadedCopyEngine(stack, clock=time.perf_counter)
    rows = []
    for label, (src, dst) in pairings(PAGES, PAGES + SPARE).items():
        for kind, way in ((CopyKind.BACKUP, "to host"), (CopyKind.LOAD_BACK, "to device")):
            job = CopyJob(OpId(1), kind, (CopyBlock(0, src, dst),))
            nbytes = job_bytes(stack, job)
            ways = {
                "plain": plain_call(nbytes),
                "mover": mover_call(mover, job),
                "engine": engine_call(engine, job, job_layers(stack, job)[-1]),
            }
            speeds = {n: nbytes / s / 1e9 for n, s in taking_turns(ways, turns).items()}
            rows.append(Row(name, label, way, nbytes / 1e6, **speeds, target=target))
    engine.close()
    return rows


def mover_call(mover: StackMover, job: CopyJob) -> Callable[[], object]:
    """The job on the calling thread."""
    if job.kind is CopyKind.BACKUP:
        return lambda: mover.backup(job)
    return lambda: mover.load_back(job, lambda layer: None)


def table(rows: list[Row], threads: int) -> Table:
    """The rows for a person to read."""
    title = f"{PAGES} pages per job, plain copy with {threads} thread(s); GB/s"
    shown = Table(title=title, title_justify="left", title_style="bold")
    for column in ("pages", "slots", "way", "MB", "plain", "mover", "engine", "engine / plain"):
        shown.add_column(column, justify="left" if column in ("pages", "slots", "way") else "right")
    for row in rows:
        speeds = [f"{v:.1f}" for v in (row.megabytes, row.plain, row.mover, row.engine)]
        ratio = f"{100 * row.ratio:.0f} %" + (" <" if row.met is False else "")
        shown.add_row(row.pages, row.slots, row.way, *speeds, ratio)
    return shown


def main(
    threads: Annotated[int, typer.Option(help="Threads of torch's plain copy.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time copies between the tiers beside a plain copy."""
    torch.set_num_threads(threads)
    console = make_console()
    with console.status("Copying"):
        rows = measure(LARGE, kv_spec(32, 8, 128, "bfloat16", 64), 9, TARGET)
        rows += measure(SMALL, kv_spec(6, 2, 32, "float32", 16), 99)
    console.print(table(rows, threads))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        found = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        used = machine() | {"threads": threads}
        result = {"versions": versions(), "machine": used, "rows": found}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
