"""Turns samples into a row per round, comparisons, tables and JSON.

Owns the result records that are written as JSON. Knows no HTTP. Pure functions of the samples.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from banyan.bench.client import Sample
from banyan.bench.drive import RoundResult


class RoundSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One round in numbers; times in seconds, None where no request succeeded.

    Args:
        computed, device, host: prompt tokens by source, summed over the round's requests.
        hit_rate: (device + host) / all prompt tokens.
    """

    requests: int
    failed: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    duration_s: float
    computed: int
    device: int
    host: int
    hit_rate: float | None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A workload played once against one server.

    Args:
        name: the configuration, such as `device + host`.
        serve_args: the server's options when the benchmark started it.
        cache_stats: the server's `/v1/cache/stats` after the last round.
    """

    name: str
    serve_args: list[str]
    summaries: list[RoundSummary]
    rounds: list[RoundResult]
    cache_stats: dict[str, Any]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Median TTFT of the rounds from the second on, of one configuration against another.

    Args:
        change_percent: negative is faster.
    """

    name: str
    against: str
    ttft_s: float
    against_ttft_s: float
    change_percent: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one invocation measured, as written to JSON."""

    benchmark: str
    model: str
    workload: dict[str, Any]
    pace: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    runs: list[Run]
    comparisons: list[Comparison]


def summarize(result: RoundResult) -> RoundSummary:
    """One row from a round's samples; failed requests count only as failed."""
    good = [s for s in result.samples if s.error is None]
    ttft = [s.ttft_s for s in good if s.ttft_s is not None]
    computed, device, host = (
        sum(getattr(s, source) for s in good) for source in ("computed", "device", "host")
    )
    total = computed + device + host
    return RoundSummary(
        requests=len(result.samples),
        failed=len(result.samples) - len(good),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
        itl_p50_s=percentile([gap for s in good for gap in s.itl_s], 50),
        duration_s=result.duration_s,
        computed=computed,
        device=device,
        host=host,
        hit_rate=(device + host) / total if total else None,
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Linear-interpolated percentile, or None of nothing."""
    found = list(values)
    return float(np.percentile(found, percent)) if found else None


def later_ttft(run: Run) -> float | None:
    """Median TTFT in seconds over the samples of all rounds but the first."""
    later: list[Sample] = [s for r in run.rounds[1:] for s in r.samples if s.error is None]
    return percentile((s.ttft_s for s in later if s.ttft_s is not None), 50)


def compare(run: Run, against: Run) -> Comparison | None:
    """`run` against `against` over the rounds from the second on; None without such samples."""
    mine, theirs = later_ttft(run), later_ttft(against)
    if mine is None or not theirs:
        return None
    return Comparison(
        name=run.name,
        against=against.name,
        ttft_s=mine,
        against_ttft_s=theirs,
        change_percent=100 * (mine / theirs - 1),
    )


def failed_requests(runs: Iterable[Run]) -> int:
    """Requests of all rounds that failed."""
    return sum(summary.failed for run in runs for summary in run.summaries)


def first_error(runs: Iterable[Run]) -> str | None:
    """Why the first failed request failed, or None."""
    samples = (s for run in runs for result in run.rounds for s in result.samples)
    return next((s.error for s in samples if s.error is not None), None)


# ---- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    style: str = ""


_COLUMNS = (
    _Column("Round"),
    _Column("Requests"),
    _Column("TTFT p50", "bold"),
    _Column("TTFT p95"),
    _Column("ITL p50"),
    _Column("Duration"),
    _Column("Computed"),
    _Column("Device"),
    _Column("Host"),
    _Column("Hit rate", "bold"),
)


def round_table(name: str, summaries: list[RoundSummary]) -> Table:
    """A row per round; tokens by source are prompt tokens."""
    table = Table(title=name, title_justify="left", title_style="bold")
    for column in _COLUMNS:
        table.add_column(column.title, justify="right", style=column.style)
    for number, row in enumerate(summaries, start=1):
        failed = f" ({row.failed} failed)" if row.failed else ""
        table.add_row(
            str(number),
            f"{row.requests}{failed}",
            ms(row.ttft_p50_s),
            ms(row.ttft_p95_s),
            ms(row.itl_p50_s),
            f"{row.duration_s:.2f} s",
            f"{row.computed:,}",
            f"{row.device:,}",
            f"{row.host:,}",
            "-" if row.hit_rate is None else f"{row.hit_rate:.1%}",
        )
    return table


def comparison_table(comparisons: list[Comparison]) -> Table:
    """A row per pair of configurations."""
    title = "Median TTFT of the rounds from the second on"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("Configuration")
    table.add_column("TTFT p50", justify="right")
    table.add_column("Against")
    table.add_column("TTFT p50", justify="right")
    table.add_column("Change", justify="right", style="bold")
    for row in comparisons:
        change = f"{row.change_percent:+.1f} %"
        table.add_row(row.name, ms(row.ttft_s), row.against, ms(row.against_ttft_s), change)
    return table


def make_console() -> Console:
    """A console on standard output, wide enough for the tables where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def ms(seconds: float | None) -> str:
    """Seconds as milliseconds, three digits, or `-`."""
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


# ---- JSON ----------------------------------------------------------------------------------------

_PACKAGES = ("banyan-cache", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; a package that is absent is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The machine the benchmark ran on, as far as the numbers depend on it."""
    return {"cpus": os.cpu_count(), "arch": platform.machine(), "system": platform.system()}


def write_json(report: Report, path: Path) -> None:
    """Write `report`, samples included, creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
