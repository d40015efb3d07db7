"""Times Banyan's tree beside SGLang's, its Rust core and its Python core, in one run.

    python -m benchmarks.versus_sglang [--sglang-python PATH] [--json FILE] [--quick]

SGLang is looked for in this Python, or in the one that `--sglang-python` names, whose environment
(`PYTHONPATH` too) is passed on; of Banyan's dependencies numpy and msgspec are needed there.
All sides are measured in that one process, on the same prompts, and take turns; a row's figure is
the median of its samples. It was written for SGLang 0.5.23 on a CPU; `benchmarks/peers` says what
stands in for a GPU server, and where the two systems differ. The exit status is 2 where SGLang
cannot be imported.

The geometric mean is over `match + slots`, `insert` and `evict`: each kind of work once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from banyan.bench.report import machine, make_console, versions
from benchmarks.peers.plan import KINDS, Plan
from benchmarks.peers.ratios import Row, mean_ratio, row_from, summary
from benchmarks.peers.side import CONFIGURATIONS
from benchmarks.peers.tables import median_table, ratio_table

SUBJECT = "banyan"
AGAINST = ("sglang-rust", "sglang-python")
ROOT = Path(__file__).resolve().parent.parent

KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""The measuring process keeps what it frees, on all sides, as a server's heap does after a while:
else the rows that insert show what the kernel takes to give memory anew, several times the work."""

_LABEL = "{task.description}"

HOW_TO_GET_IT = """\
SGLang could not be imported by {python}:
  {problem}

What is needed: SGLang 0.5.23 in an environment of its own, with Python 3.11 or newer on Linux.
  On a machine with a GPU:    pip install sglang==0.5.23
  On one without, its wheel without what it depends on, unpacked:
    pip download --no-deps --only-binary :all: sglang==0.5.23
    python -m zipfile -e sglang-0.5.23-*.whl FOLDER
  with torch 2.11 to 2.14, transformers 5.19.0, and those of its requirements that an import of
  sglang.srt.mem_cache.unified_radix_cache asks for; no GPU package.
Then: PYTHONPATH=FOLDER python -m benchmarks.versus_sglang --sglang-python PATH-TO-ITS-PYTHON
"""


class Absent(Exception):
    """There is no SGLang to measure; the message says why."""


def read(lines: Iterable[str]) -> Iterator[dict[str, str] | Row]:
    """What the measuring process says: first the versions, then rows.

    Raises:
        Absent: it has no SGLang.
    """
    for line in lines:
        said = json.loads(line)
        if "missing" in said:
            raise Absent(said["missing"])
        if "versions" in said:
            yield said["versions"]
        else:
            yield row_from(said["row"])


def measure(python: str, plan: Plan, console: Console) -> tuple[dict[str, str], list[Row]]:
    """Run the measuring process to its end; the versions it found, and all rows.

    Raises:
        Absent: `python` cannot be run, or has no SGLang.
        RuntimeError: the process failed otherwise; its own words are on standard error.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [python, "-m", "benchmarks.peers.measure", json.dumps(asdict(plan))]
    environment = os.environ | KEPT_HEAP | {"PYTHONPATH": path}
    try:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    except OSError as error:
        raise Absent(str(error)) from error
    with worker:
        assert worker.stdout is not None
        try:
            found, rows = follow(worker.stdout, plan.rows, console)
        except BaseException:
            worker.kill()
            raise
    if worker.returncode or len(rows) != plan.rows:
        raise RuntimeError(f"the measuring process ended with status {worker.returncode}")
    return found, rows


def follow(lines: Iterable[str], total: int, console: Console) -> tuple[dict[str, str], list[Row]]:
    """Show the progress of a measuring process; the versions it found, and its rows."""
    found: dict[str, str] = {}
    rows: list[Row] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn(_LABEL))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting SGLang", total=total)
        for said in read(lines):
            if isinstance(said, Row):
                rows.append(said)
                done = f"{said.workload}: {said.components}, page {said.page_size}"
                progress.update(task, advance=1, description=done)
            else:
                found = said
    return found, rows


def main(
    sglang_python: Annotated[
        str, typer.Option(metavar="PATH", help="The Python that has SGLang; else this one.")
    ] = sys.executable,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every row, percentiles and ratios here.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help=f"Only these: {', '.join(KINDS)}.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, smaller trees.")] = False,
) -> None:
    """Compare Banyan's tree with SGLang's."""
    if unknown := set(only or ()) - set(KINDS):
        raise typer.BadParameter(f"no such kind: {', '.join(sorted(unknown))}")
    console = make_console()
    plan = Plan(CONFIGURATIONS, tuple(only or ()), quick)
    try:
        found, rows = measure(sglang_python, plan, console)
    except Absent as absent:
        text = HOW_TO_GET_IT.format(python=sglang_python, problem=absent)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    for side in (SUBJECT, *AGAINST):
        console.print(median_table(rows, side))
    for other in AGAINST:
        console.print(ratio_table(rows, SUBJECT, other))
        console.print(summary(rows, SUBJECT, other), highlight=False)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "versions": versions() | found,
            "machine": machine(),
            "quick": quick,
            "geometric_mean": {other: mean_ratio(rows, SUBJECT, other) for other in AGAINST},
            "rows": [row.as_json(SUBJECT) for row in rows],
        }
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
