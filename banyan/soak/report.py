"""What the terminal shows of a soak: a table of rounds, the balance sheet, the differences.

Owns the tables. Pure functions of the report.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from banyan.bench.report import ms
from banyan.soak.results import (
    PUBLISHED_DURATION_PERCENT,
    PUBLISHED_TTFT_PERCENT,
    Change,
    Line,
    Round,
    SoakReport,
)

_MIB = 1 << 20


def show(console: Console, report: SoakReport) -> None:
    """Print everything."""
    console.print(round_table(report.rounds, emulated=_emulated(report)))
    console.print(work_table(report.rounds))
    if _emulated(report) and report.changes:
        console.print(change_table(report.changes))
    if report.balance:
        console.print(balance_table(report.balance))
    for text in report.differences:
        console.print(f"[red]difference:[/] {text}", soft_wrap=True)
    if report.different > len(report.differences):
        console.print(f"[red]and {report.different - len(report.differences)} more[/]")
    if not report.different:
        console.print("[green]No difference.[/]")


def round_table(rounds: Sequence[Round], *, emulated: bool) -> Table:
    """What a client sees, and where prompt tokens came from; a row per round."""
    table = _table(
        "Rounds" + (" (forward passes emulated)" if emulated else ""),
        ("Round", "Requests", "Duration", "TTFT p50", "TTFT p99", "Computed", "Device", "Host"),
    )
    for number, row in enumerate(rounds, start=1):
        aborted = f" ({row.aborted} aborted)" if row.aborted else ""
        table.add_row(
            str(number),
            f"{row.requests:,}{aborted}",
            f"{row.duration_s:.2f} s",
            ms(row.ttft_p50_s),
            ms(row.ttft_p99_s),
            *(f"{n:,}" for n in (row.computed, row.device, row.host)),
        )
    return table


def work_table(rounds: Sequence[Round]) -> Table:
    """What the engine did for it: steps, copies, digests, memory; a row per round."""
    names = ("Round", "Steps", "Retracted", "Backups", "Load-backs", "Failed", "SHA-256", "Differ")
    table = _table("Engine, all ranks", (*names, "Memory", "Growth"))
    for number, row in enumerate(rounds, start=1):
        growth = row.memory_bytes / rounds[0].memory_bytes - 1 if rounds[0].memory_bytes else 0
        numbers = (number, row.steps, row.retractions, row.backups, row.load_backs, row.failed)
        table.add_row(
            *(f"{n:,}" for n in (*numbers, row.verified, row.mismatched)),
            f"{row.memory_bytes / _MIB:,.0f} MiB",
            "" if number == 1 else f"{100 * growth:+.2f} %",
        )
    return table


def change_table(changes: Sequence[Change]) -> Table:
    """Later rounds against the first, beside the published figures."""
    names = ("Round", "TTFT p50", "published", "Duration", "published")
    table = _table("Against round 1 (emulated)", names)
    for row in changes:
        table.add_row(
            str(row.round),
            f"{row.ttft_percent:+.1f} %",
            f"{PUBLISHED_TTFT_PERCENT:+.1f} %",
            f"{row.duration_percent:+.1f} %",
            f"{PUBLISHED_DURATION_PERCENT:+.1f} %",
        )
    return table


def balance_table(lines: Sequence[Line]) -> Table:
    """The balance sheet."""
    table = Table(title="Balance", title_justify="left", title_style="bold")
    table.add_column("What")
    table.add_column("Found")
    table.add_column("")
    for line in lines:
        table.add_row(line.what, line.found, "[green]ok[/]" if line.fine else "[red]differs[/]")
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _emulated(report: SoakReport) -> bool:
    return bool(report.options.get("emulated"))
