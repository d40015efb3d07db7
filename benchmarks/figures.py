"""Takes the few figures that count out of each benchmark's JSON, as ratios.

A ratio says how long something took beside something else of the same run: smaller is better, and
two runs, or two machines, can be compared by it. Pure functions of the JSON; knows no benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.ratios import COUNTED, geometric_mean

NOISE = 1.35
"""How much a ratio of times may grow from run to run on a machine that does other work too."""

PEERS_MEAN = "geometric mean of match + slots, insert, evict"
PEERS_LEAST = "the least of match + slots, insert, evict"
FELT = ("overhead", "shared-prefix", "multi-turn")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Args:
        benchmark: the part of `make bench` that it comes from.
        value: as measured, for a person.
        beside: what the ratio is taken to.
        target: for a person; empty without one.
        met: whether the target is reached, in every configuration; None without one.
        noise: by which factor the ratio may grow without being called slower.
    """

    benchmark: str
    name: str
    value: str
    beside: str
    ratio: float
    target: str = ""
    met: bool | None = None
    noise: float = NOISE

    @property
    def key(self) -> str:
        """Its name in the baseline."""
        return f"{self.benchmark}: {self.name}, beside {self.beside}"


def chief(figures: Iterable[Figure]) -> list[Figure]:
    """Those of a short table: all that a user feels and all that misses its target; of several that
    meet one target, the worst; and of what is measured beside a peer, what misses, and the mean."""
    found = list(figures)
    worst: dict[tuple[str, str], float] = {}
    for figure in found:
        key = (figure.benchmark, figure.target)
        worst[key] = max(worst.get(key, 0.0), figure.ratio)
    return [f for f in found if _is_chief(f, worst[f.benchmark, f.target])]


def _is_chief(figure: Figure, worst: float) -> bool:
    if figure.met is False or figure.name == PEERS_MEAN or figure.benchmark in FELT:
        return True
    return figure.met is True and figure.ratio == worst and figure.benchmark != "peers"


def figures_of(benchmark: str, data: dict[str, Any]) -> list[Figure]:
    """The figures of one benchmark's JSON."""
    return EXTRACTORS[benchmark](data)


def _grouped(rows: Rows, *fields: str) -> dict[tuple[Hashable, ...], Rows]:
    groups: dict[tuple[Hashable, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[f] for f in fields), []).append(row)
    return groups


def _mean(ratios: Iterable[float]) -> float:
    mean = geometric_mean(ratios)
    assert mean is not None
    return mean


def _span(values: Iterable[float], unit: str) -> str:
    """From the least to the most of several configurations, or the one value they share."""
    found = sorted(values)
    low, high = (f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in (found[0], found[-1]))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


# ---- one function for each benchmark -------------------------------------------------------------


def _guard(data: dict[str, Any]) -> list[Figure]:
    counts, before = data["counts"], data["baseline"]
    known = [name for name in counts if name in before]
    if not known:
        return []
    total = sum(found["instructions"] for found in counts.values())
    ratio = _mean(counts[n]["instructions"] / before[n]["instructions"] for n in known)
    met, value = not data["findings"], f"{total:,}"
    name = "instructions of core operations"
    return [Figure("guard", name, value, "baseline", ratio, "within 3 %", met, noise=1.03)]


def _tree(data: dict[str, Any]) -> list[Figure]:
    figures = []
    for (name,), rows in _grouped(data["rows"], "operation").items():
        budget = rows[0]["budget_us"]
        figures.append(
            Figure(
                "tree",
                str(name),
                _span((r["median_us"] for r in rows), "µs"),
                "yardstick",
                _mean(r["median_us"] / r["yardstick_us"] for r in rows),
                "" if budget is None else f"≤ {budget:g} µs",
                None if budget is None else all(r["median_us"] <= budget for r in rows),
            )
        )
    return figures


def _steps(data: dict[str, Any]) -> list[Figure]:
    return [
        Figure(
            "steps",
            f"{name}, page {page}",
            _span((r["median_ms"] for r in rows), "ms"),
            "yardstick",
            _mean(1000 * r["median_ms"] / r["yardstick_us"] for r in rows),
            f"≤ {rows[0]['target_ms']:g} ms",
            all(r["met"] for r in rows),
        )
        for (name, page), rows in _grouped(data["rows"], "scenario", "page_size").items()
    ]


def _copies(data: dict[str, Any]) -> list[Figure]:
    figures = []
    for (pages, way), rows in _grouped(data["rows"], "pages", "way").items():
        target = rows[0]["target"]
        figures.append(
            Figure(
                "copies",
                f"{str(pages).partition(':')[0]} pages {way}",
                _span((r["engine"] for r in rows), "GB/s"),
                "plain copy",
                max(1 / r["ratio"] for r in rows),
                "" if target is None else f"ratio ≤ {1 / target:g}",
                None if target is None else all(r["met"] for r in rows),
            )
        )
    return figures


REPLAY_S = 20.0
"""The target: seconds for the conversation trace."""


def _replay(data: dict[str, Any]) -> list[Figure]:
    return [
        Figure(
            "replay",
            f"{data['trace'].partition('.')[0]}, {row['components']}",
            f"{row['seconds']:.1f} s",
            "yardstick",
            row["us_per_request"] / row["yardstick_us"],
            f"≤ {REPLAY_S:g} s",
            row["seconds"] <= REPLAY_S,
        )
        for row in data["rows"]
    ]


def _overhead(data: dict[str, Any]) -> list[Figure]:
    figures = []
    for row in data["rows"]:
        bare, engine = row["bare_total_s"], row["engine_total_s"]
        value = f"{1000 * engine:,.0f} ms"
        name = f"engine, {_short(row['model'])}"
        figures.append(Figure("overhead", name, value, "transformers", engine / bare))
    return figures


def _host_hits(data: dict[str, Any]) -> list[Figure]:
    return [
        Figure(
            "host-hits",
            f"TTFT of a host hit, {_short(row['model'])}",
            f"{1000 * row['host_s']:.3g} ms",
            "device hit",
            row["ratio"],
            f"ratio ≤ {data['target']:g}",
            row["met"],
        )
        for row in data["rows"]
    ]


def _served(data: dict[str, Any]) -> list[Figure]:
    return [
        Figure(
            data["benchmark"],
            f"TTFT, {row['name']}",
            f"{1000 * row['ttft_s']:.3g} ms",
            row["against"],
            row["ttft_s"] / row["against_ttft_s"],
        )
        for row in data["comparisons"]
    ]


TIMES_FASTER = {"match": 3, "insert": 3, "evict": 3, "lock": 1, "lock below": 5}
"""The targets beside the peer, by kind of workload: in every configuration."""

MEAN_FASTER = 6
PYTHON_FASTER = 10


def _peers(data: dict[str, Any]) -> list[Figure]:
    """Beside the faster of the peer's cores; of the other one the row where it comes nearest."""
    other = "sglang-rust"
    beside = "SGLang, Rust core"
    figures = []
    for (kind, name), rows in _grouped(data["rows"], "kind", "workload").items():
        times = [r["ratios"][other] for r in rows]
        least = TIMES_FASTER.get(str(kind))
        figures.append(
            Figure(
                "peers",
                str(name),
                _span((r["sides"]["banyan"]["median_us"] for r in rows), "µs"),
                beside,
                _mean(1 / t for t in times),
                "" if least is None else f"{least} times, each",
                None if least is None else min(times) >= least,
            )
        )
    mean = data["geometric_mean"][other]
    if mean is not None:
        value, target = f"{mean:.1f} times faster", f"{MEAN_FASTER} times"
        fine = mean >= MEAN_FASTER
        figures.append(Figure("peers", PEERS_MEAN, value, beside, 1 / mean, target, fine))
    counted = [r["ratios"] for r in data["rows"] if r["kind"] in COUNTED]
    beside_python = [r["sglang-python"] for r in counted if "sglang-python" in r]
    if beside_python:
        least = min(beside_python)
        value, target = f"{least:.1f} times faster", f"{PYTHON_FASTER} times, each"
        fine, beside = least >= PYTHON_FASTER, "SGLang, Python core"
        figures.append(Figure("peers", PEERS_LEAST, value, beside, 1 / least, target, fine))
    return figures


def _short(model: str) -> str:
    """A model's name without the folder it lies in."""
    return model.rpartition("/")[2]


EXTRACTORS: dict[str, Callable[[dict[str, Any]], list[Figure]]] = {
    "guard": _guard,
    "tree": _tree,
    "steps": _steps,
    "copies": _copies,
    "replay": _replay,
    "overhead": _overhead,
    "host-hits": _host_hits,
    "shared-prefix": _served,
    "multi-turn": _served,
    "peers": _peers,
}
