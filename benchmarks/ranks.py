"""What it costs ranks to talk: a report to rank 0 and its answer, beside gloo's own all-reduce.

    python -m benchmarks.ranks --ranks 2 4 16

Every number of ranks is a set of processes on this machine, one thread each. Both ways are timed in
turn in the same processes; the figures are medians over `--calls` on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from banyan.engine.fabric import Place, TorchFabric, join, open_store
from banyan.ranks import REPORT_WORDS

_WARM_UP = 10


def report_and_answer(fabric: TorchFabric) -> None:
    """What a step costs while transfers are open: a report of each rank, one frame to all."""
    reports = fabric.collect(np.zeros(REPORT_WORDS, np.int64))
    fabric.broadcast(None if reports is None else np.stack(reports).min(axis=0).tobytes())


def frame(fabric: TorchFabric) -> None:
    """What a step costs else: one frame to all."""
    fabric.broadcast(b"step" if fabric.rank == 0 else None)


def all_reduce(fabric: TorchFabric) -> None:
    """The collective made for it."""
    dist.all_reduce(torch.zeros(REPORT_WORDS, dtype=torch.int64), op=dist.ReduceOp.MIN)


WAYS: dict[str, Callable[[TorchFabric], None]] = {
    "report and answer": report_and_answer,
    "frame": frame,
    "all-reduce": all_reduce,
}


def measure(fabric: TorchFabric, calls: int) -> dict[str, float]:
    """Median seconds of each way on this rank."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for at in range(_WARM_UP + calls):
        for name, way in WAYS.items():
            began = time.perf_counter()
            way(fabric)
            if at >= _WARM_UP:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def run(ranks: int, calls: int) -> dict[str, float]:
    """Start `ranks - 1` processes, be rank 0 of them, and measure."""
    program = [sys.executable, "-m", "benchmarks.ranks", "--calls", str(calls), "--be"]
    code = f"from benchmarks.ranks import lead; lead({ranks}, {calls})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1", "BANYAN_PROGRAM": json.dumps(program)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def lead(ranks: int, calls: int) -> None:
    """Rank 0 of a set, in a process of its own: prints JSON."""
    store, address = open_store(ranks)
    program = json.loads(os.environ["BANYAN_PROGRAM"])
    others = [subprocess.Popen([*program, f"{rank}/{ranks}@{address}"]) for rank in range(1, ranks)]
    fabric = join(Place(0, ranks, 0, address), store)
    print(json.dumps(measure(fabric, calls)))
    fabric.close()
    for other in others:
        other.wait()


def be(place: str, calls: int) -> None:
    """Another rank of a set: `rank/ranks@address`."""
    number, _, address = place.partition("@")
    rank, _, ranks = number.partition("/")
    fabric = join(Place(int(rank), int(ranks), int(rank), address))
    measure(fabric, calls)
    fabric.close()


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be(options.be, options.calls)
        return
    table = Table(
        title=f"Ranks talking, {os.cpu_count()} cores; median ms of {options.calls} calls"
    )
    table.add_column("Ranks", justify="right")
    for name in WAYS:
        table.add_column(name, justify="right")
    results: dict[int, dict[str, float]] = {}
    for ranks in options.ranks:
        results[ranks] = run(ranks, options.calls)
        table.add_row(str(ranks), *(f"{1000 * s:.2f}" for s in results[ranks].values()))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
