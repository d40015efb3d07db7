"""Runs a benchmark from start to picture: servers, rounds, tables, files.

Owns the order of things and what is printed. Used by the command line and by the demo.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from banyan.bench import target
from banyan.bench.client import Sample
from banyan.bench.drive import Pace, play
from banyan.bench.report import (
    Comparison,
    Report,
    Run,
    compare,
    comparison_table,
    failed_requests,
    first_error,
    machine,
    ms,
    round_table,
    summarize,
    versions,
    write_json,
)
from banyan.bench.target import Configuration
from banyan.bench.work import TokenSource, Workload


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A workload and how to play it.

    Args:
        name: of the benchmark, such as `shared-prefix`.
        model: what to serve; a server gives it a name of its own, which requests then use.
    """

    name: str
    model: str
    workload: Workload
    source: TokenSource
    pace: Pace
    console: Console

    def start_and_drive(self, configuration: Configuration) -> Run:
        """Play the workload on a fresh server of this configuration, and print its table."""
        with target.started(self.console, self.model, configuration) as url:
            return self.drive(url, configuration.name, configuration.arguments())

    def quietly(self, url: str) -> None:
        """Play one round on the server at `url` and show nothing."""
        one = dataclasses.replace(self.workload, rounds=1)  # type: ignore[type-var]
        name = target.served_model(url)
        play(one, self.source, url, name, self.pace, lambda turn, sample: None)

    def drive(self, url: str, name: str, serve_args: list[str] | None = None) -> Run:
        """Play the workload on the server at `url`, and print its table."""
        served = target.served_model(url)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            total = self.workload.rounds * self.workload.requests
            task = progress.add_task(name, total=total, last="")

            def on_sample(turn: int, sample: Sample) -> None:
                last = "failed" if sample.error else f"TTFT {ms(sample.ttft_s)}"
                where = f"{name}, round {turn + 1} of {self.workload.rounds}"
                progress.update(task, advance=1, description=where, last=last)

            rounds = play(self.workload, self.source, url, served, self.pace, on_sample)
        run = Run(
            name=name,
            serve_args=serve_args or [],
            summaries=[summarize(result) for result in rounds],
            rounds=rounds,
            cache_stats=target.cache_stats(url),
        )
        self.console.print(round_table(name, run.summaries))
        return run

    def report(self, runs: list[Run]) -> Report:
        """Everything measured, with the comparisons against the run without a host tier."""
        return Report(
            benchmark=self.name,
            model=self.model,
            workload=_fields(self.workload),
            pace=_fields(self.pace),
            versions=versions(),
            machine=machine(),
            runs=runs,
            comparisons=comparisons(runs),
        )


def comparisons(runs: list[Run]) -> list[Comparison]:
    """The first run against each other one."""
    pairs = [compare(runs[0], other) for other in runs[1:]]
    return [pair for pair in pairs if pair is not None]


def finish(report: Report, console: Console, json: Path | None, png: Path | None) -> int:
    """Print the comparisons, write the files; returns 1 when a request failed, else 0."""
    if report.comparisons:
        console.print(comparison_table(report.comparisons))
    if json is not None:
        write_json(report, json)
        console.print(f"Samples: {json}")
    if png is not None:
        from banyan.bench.plot import draw

        draw(report, png)
        console.print(f"Picture: {png}")
    failed = failed_requests(report.runs)
    if failed:
        console.print(f"[red]{failed} request(s) failed, the first with:[/] ", end="")
        console.print(first_error(report.runs), markup=False)
    return 1 if failed else 0


def _fields(record: Any) -> dict[str, Any]:
    return dataclasses.asdict(record)
