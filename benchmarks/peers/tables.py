"""Measured rows as tables: a row per workload, a column per configuration.

    python -m benchmarks.peers.tables FILE.json

prints what `benchmarks/versus_sglang.py --json` wrote, as the table of `docs/benchmarks.md`. Knows
no system under test.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.peers.ratios import Row, mean_ratio, row_from


def median_table(rows: Sequence[Row], side: str) -> Table:
    """The medians of one side."""
    table, columns = _frame(rows, f"{side}: median, microseconds")
    for workload, by_column in _by_workload(rows).items():
        cells = [_us(by_column[c].sides[side].median_us) for c in columns]
        table.add_row(workload, *cells)
    return table


def ratio_table(rows: Sequence[Row], subject: str, against: str) -> Table:
    """How many times faster `subject` is; what it loses in red and with a mark."""
    table, columns = _frame(rows, f"{subject} against {against}: times faster")
    for workload, by_column in _by_workload(rows).items():
        cells = [_times(by_column[c].ratio(subject, against)) for c in columns]
        table.add_row(workload, *cells)
    table.add_section()
    means = []
    for column in columns:
        mean = mean_ratio((r for r in rows if _column(r) == column), subject, against)
        means.append("-" if mean is None else _times(mean))
    table.add_row("geometric mean", *means, style="bold")
    return table


def markdown_table(rows: Sequence[Row], subject: str, others: Sequence[str]) -> str:
    """Cells of `microseconds of the subject (ratio to each other side)`, as Markdown."""
    columns = list(dict.fromkeys(_column(row) for row in rows))
    head = [""] + [f"{components}, page {page}" for components, page in columns]
    lines = [head, ["---"] * len(head)]
    for workload, by_column in _by_workload(rows).items():
        cells = [_with_ratios(by_column[c], subject, others) for c in columns]
        lines.append([workload, *cells])
    means = []
    for column in columns:
        of_column = [row for row in rows if _column(row) == column]
        found = [mean_ratio(of_column, subject, other) for other in others]
        means.append(", ".join("-" if mean is None else f"{mean:.1f}" for mean in found))
    lines.append(["geometric mean", *means])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _with_ratios(row: Row, subject: str, others: Sequence[str]) -> str:
    ratios = ", ".join(f"{row.ratio(subject, other):.2g}" for other in others)
    return f"{_us(row.sides[subject].median_us)} ({ratios})"


def _column(row: Row) -> tuple[str, int]:
    return row.components, row.page_size


def _by_workload(rows: Sequence[Row]) -> dict[str, dict[tuple[str, int], Row]]:
    found: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        found.setdefault(row.workload, {})[_column(row)] = row
    return found


def _frame(rows: Sequence[Row], title: str) -> tuple[Table, list[tuple[str, int]]]:
    columns = list(dict.fromkeys(_column(row) for row in rows))
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("Workload", no_wrap=True, vertical="bottom")
    for components, page in columns:
        heading = components.replace("+", "\n+ ")
        table.add_column(f"{heading}\npage {page}", justify="right", vertical="bottom")
    return table, columns


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(ratio: float) -> str:
    text = f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"
    return text if ratio >= 1 else f"[red]{text} <[/]"


def main(path: str) -> None:
    """Print the file's rows as Markdown."""
    saved = json.loads(Path(path).read_text())
    subject, *others = saved["rows"][0]["sides"]
    for row in saved["rows"]:
        del row["ratios"]
    print(markdown_table([row_from(row) for row in saved["rows"]], subject, others), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
