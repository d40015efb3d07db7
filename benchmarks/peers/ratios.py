"""How much faster one side is than another: arithmetic over medians.

Pure functions of measured rows; knows no system under test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

COUNTED = ("match", "insert", "evict")
"""Kinds of workload that enter the geometric mean: each kind of work once."""


@dataclass(frozen=True)
class Timing:
    """The samples of one side in one row, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    min_us: float
    samples: int


@dataclass(frozen=True)
class Row:
    """One workload in one configuration.

    Args:
        kind: as in `workloads.Workload`.
        sides: by name of the side.
    """

    workload: str
    kind: str
    components: str
    page_size: int
    sides: dict[str, Timing]

    def ratio(self, subject: str, against: str) -> float:
        """How many times faster `subject` is than `against`; below 1 it is slower."""
        return self.sides[against].median_us / self.sides[subject].median_us

    def as_json(self, subject: str) -> dict[str, Any]:
        """Plain data, with the ratios to all other sides."""
        others = [name for name in self.sides if name != subject]
        return asdict(self) | {"ratios": {name: self.ratio(subject, name) for name in others}}


def row_from(fields: dict[str, Any]) -> Row:
    """A row from its plain data, the inverse of `dataclasses.asdict`."""
    sides = {name: Timing(**timing) for name, timing in fields["sides"].items()}
    return Row(**{**fields, "sides": sides})


def timing(samples: Sequence[float]) -> Timing:
    """What is kept of the samples of one row and side."""
    if len(samples) < 2:
        low = high = samples[0]
    else:
        tenths = quantiles(samples, n=10, method="inclusive")
        low, high = tenths[0], tenths[-1]
    return Timing(median(samples), low, high, min(samples), len(samples))


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """The geometric mean, or None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def mean_ratio(rows: Iterable[Row], subject: str, against: str) -> float | None:
    """The geometric mean over the rows that count."""
    return geometric_mean(row.ratio(subject, against) for row in rows if row.kind in COUNTED)


def lost(rows: Iterable[Row], subject: str, against: str) -> list[Row]:
    """The rows in which `subject` is the slower one, worst first."""
    slower = [row for row in rows if row.ratio(subject, against) < 1]
    return sorted(slower, key=lambda row: row.ratio(subject, against))


def summary(rows: Sequence[Row], subject: str, against: str) -> str:
    """One line: the mean over all configurations, and which workloads are lost in how many."""
    mean = mean_ratio(rows, subject, against)
    head = "" if mean is None else f"{mean:.1f} times faster than {against} in the geometric mean; "
    counts = Counter(row.workload for row in lost(rows, subject, against))
    if not counts:
        return f"{head}no row of {len(rows)} is lost"
    names = "; ".join(f"{name} ({count})" for name, count in counts.items())
    return f"{head}{counts.total()} of {len(rows)} rows are lost: {names}"
