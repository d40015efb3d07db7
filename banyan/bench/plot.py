"""Draws a benchmark's picture: TTFT and tokens by source, per round and configuration.

Knows only summaries. Draws with matplotlib's file backend; needs no display.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from banyan.bench.report import Report, RoundSummary, Run

_SOURCES = (("computed", "#d55e00"), ("host", "#e9b949"), ("device", "#0072b2"))
_TTFT = "#4d4d4d"
_GAP = 0.8
"""Space between two configurations, in bars."""


@dataclass(frozen=True, slots=True)
class _Bar:
    at: float
    label: str
    row: RoundSummary


def draw(report: Report, path: Path) -> None:
    """Write one PNG: TTFT per round above, prompt tokens by source below, aligned."""
    blocks = list(_blocks(report.runs))
    bars = [bar for _, block in blocks for bar in block]
    figure = Figure(figsize=(max(7.0, 1.6 + 0.75 * len(bars)), 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_ttft(above, bars)
    _draw_tokens(below, bars)
    below.set_xticks([bar.at for bar in bars], [bar.label for bar in bars])
    below.set_xlabel("round")
    for name, block in blocks:
        middle = (block[0].at + block[-1].at) / 2
        above.text(
            middle, 1.02, name, transform=above.get_xaxis_transform(), ha="center", weight="bold"
        )
    figure.suptitle(f"{report.benchmark}, {Path(report.model).name}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _blocks(runs: list[Run]) -> Iterator[tuple[str, list[_Bar]]]:
    at = 0.0
    for run in runs:
        block = []
        for number, row in enumerate(run.summaries, start=1):
            block.append(_Bar(at, str(number), row))
            at += 1
        at += _GAP
        if block:
            yield run.name, block


def _draw_ttft(axes: Any, bars: list[_Bar]) -> None:
    """Bars: median. Ticks: 95th percentile."""
    shown = [b for b in bars if b.row.ttft_p50_s is not None and b.row.ttft_p95_s is not None]
    at = [bar.at for bar in shown]
    median = [1000 * (bar.row.ttft_p50_s or 0) for bar in shown]
    high = [1000 * (bar.row.ttft_p95_s or 0) for bar in shown]
    drawn = axes.bar(at, median, width=0.72, color=_TTFT, label="median")
    axes.vlines(at, median, high, color="#8c8c8c", linewidth=1.2)
    axes.scatter(at, high, marker="_", s=130, color="#8c8c8c", label="95th percentile")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.bar_label(drawn, [f"{v:,.0f}" for v in median], padding=3, fontsize=8, bbox=box)
    axes.set_ylabel("TTFT (ms)")
    axes.set_ylim(0, 1.18 * max([*high, 0.001]))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    _tidy(axes)


def _draw_tokens(axes: Any, bars: list[_Bar]) -> None:
    """Stacked: where each round's prompt tokens came from."""
    at = [bar.at for bar in bars]
    base = [0.0] * len(bars)
    for source, colour in _SOURCES:
        tokens = [getattr(bar.row, source) / 1000 for bar in bars]
        axes.bar(at, tokens, width=0.72, bottom=base, color=colour, label=source)
        base = [a + b for a, b in zip(base, tokens, strict=True)]
    axes.set_ylabel("prompt tokens (thousands)")
    axes.set_ylim(0, 1.18 * max([*base, 0.001]))
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
