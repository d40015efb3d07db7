"""The figures as a table in the terminal and on a page, and what they were measured with.

Pure but for reading the machine's own description. Knows no benchmark and runs none.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.table import Table

from banyan.bench.report import machine, versions
from benchmarks.figures import Figure

BEGIN, END = "<!-- measured by `make bench-pages` -->", "<!-- end of what was measured -->"
HEADINGS = ("Benchmark", "Figure", "Measured", "Beside", "Ratio", "Target", "Met", "Baseline")


def machine_line() -> str:
    """The class of the machine, the versions and the load, in words."""
    found = machine()
    model = _processor()
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    load = os.getloadavg()[2]
    cores = f"{found['cpus']} {found['arch']} cores" + (f" ({model})" if model else "")
    return f"{cores}, {found['system']}; {names}; load average of 15 minutes {load:.1f}"


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((s.partition(":")[2].strip() for s in lines if s.startswith("model name")), "")


def cells(figure: Figure, before: dict[str, float]) -> tuple[str, ...]:
    """A line of the table, in words."""
    known = before.get(figure.key)
    marks = {True: "yes", False: "NO", None: ""}
    return (
        figure.benchmark,
        figure.name,
        figure.value,
        figure.beside,
        f"{figure.ratio:.3g}",
        figure.target,
        marks[figure.met],
        "" if known is None else f"{known:.3g}",
    )


def table(figures: list[Figure], before: dict[str, float], title: str) -> Table:
    """All figures."""
    shown = Table(title=title, title_justify="left", title_style="bold")
    for heading in HEADINGS:
        right = heading in ("Measured", "Ratio", "Target", "Baseline")
        shown.add_column(heading, justify="right" if right else "left")
    for figure in figures:
        shown.add_row(*cells(figure, before))
    return shown


def markdown(figures: list[Figure], title: str) -> str:
    """The table for a page, without the baseline; what misses its target stands in it too."""
    count = len(HEADINGS) - 1
    lines = [f"| {' | '.join(HEADINGS[:count])} |", "|" + "---|" * count]
    lines += [f"| {' | '.join(cells(figure, {})[:count])} |" for figure in figures]
    return "\n".join([title + ".", "", *lines])


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page.

    Raises:
        ValueError: the page lacks a mark.
    """
    old = page.read_text()
    head, begin, rest = old.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} must have the lines {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
