"""How fast records move between CPU pools, against a plain torch copy of the same bytes.

    python benchmarks/copies.py [--json FILE] [--threads N]

Each row copies the pages of one job: through the mover on this thread, and through the threaded
engine from `submit` to the polled completion. The plain copy is one contiguous tensor to another,
by torch with `--threads` threads (the engine's worker is one thread). Best of several runs, after
one that is not counted. `small` pages fit the processor's cache, so their plain copy is fast.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.plan import PoolSize, SizePlan
from banyan.spec import Buffer, CacheSpec, Component, Full
from banyan.tiers.moves import StackMover, job_bytes
from banyan.tiers.ops import CopyBlock, CopyJob, CopyKind, OpId, Slots
from banyan.tiers.threaded import ThreadedCopyEngine

PAGES = 64
SPARE = 16


@dataclass(frozen=True)
class Row:
    """One measurement; speeds in GB/s of bytes written."""

    pages: str
    slots: str
    way: str
    megabytes: float
    plain: float
    mover: float
    engine: float

    @property
    def ratio(self) -> float:
        """The mover's speed over the plain copy's."""
        return self.mover / self.plain


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


def best(action: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest run, the first not counted."""
    action()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def plain_seconds(nbytes: int, runs: int) -> float:
    """One contiguous tensor of bytes copied to another."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return best(lambda: target.copy_(source), runs)


def through_engine(engine: ThreadedCopyEngine, job: CopyJob) -> None:
    """Submit, and poll until the completion is there."""
    engine.submit(job)
    while not (done := engine.poll()):
        time.sleep(0)
    assert done[0].ok, done[0].reason


def measure(name: str, spec: CacheSpec, runs: int) -> list[Row]:
    """Both ways, contiguous and scattered slots, for one kind of page."""
    stack = make_stack(spec)
    mover, engine = StackMover(stack), ThreadedCopyEngine(stack, clock=time.perf_counter)
    rng = np.random.default_rng(0)
    total = PAGES + SPARE
    runs_of_slots: dict[str, tuple[Slots, Slots]] = {
        "contiguous": (
            np.arange(3, 3 + PAGES, dtype=np.int32),
            np.arange(7, 7 + PAGES, dtype=np.int32),
        ),
        "scattered": (
            rng.permutation(total)[:PAGES].astype(np.int32),
            rng.permutation(total)[:PAGES].astype(np.int32),
        ),
    }
    rows = []
    for label, (src, dst) in runs_of_slots.items():
        for kind, way in ((CopyKind.BACKUP, "device to host"), (CopyKind.LOAD_BACK, "to device")):
            job = CopyJob(OpId(1), kind, (CopyBlock(0, src, dst),))
            nbytes = job_bytes(stack, job)
            move = mover_call(mover, job)
            plain = plain_seconds(nbytes, runs)
            seconds = best(move, runs)
            engine_s = best(lambda job=job: through_engine(engine, job), runs)  # type: ignore[misc]
            speeds = [nbytes / s / 1e9 for s in (plain, seconds, engine_s)]
            rows.append(Row(name, label, way, nbytes / 1e6, *speeds))
    engine.close()
    return rows


def mover_call(mover: StackMover, job: CopyJob) -> Callable[[], object]:
    """The job on the calling thread."""
    if job.kind is CopyKind.BACKUP:
        return lambda: mover.backup(job)
    return lambda: mover.load_back(job, lambda layer: None)


def table(rows: list[Row], threads: int) -> Table:
    """The rows for a person to read."""
    shown = Table(title=f"{PAGES} pages per job, plain copy with {threads} thread(s); GB/s")
    for column in ("pages", "slots", "way", "MB", "plain", "mover", "engine", "mover / plain"):
        shown.add_column(column, justify="left" if column in ("pages", "slots", "way") else "right")
    for row in rows:
        speeds = [f"{v:.1f}" for v in (row.megabytes, row.plain, row.mover, row.engine)]
        shown.add_row(row.pages, row.slots, row.way, *speeds, f"{100 * row.ratio:.0f} %")
    return shown


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the plain copy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(
        "large: 32 layers, 8 x 128, bf16, 64 tokens", kv_spec(32, 8, 128, "bfloat16", 64), 5
    )
    rows += measure("small: 6 layers, 2 x 32, f32, 16 tokens", kv_spec(6, 2, 32, "float32", 16), 50)
    Console().print(table(rows, options.threads))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps([asdict(r) | {"ratio": r.ratio} for r in rows], indent=1)
        )


if __name__ == "__main__":
    main()
