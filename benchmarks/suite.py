"""Every benchmark that needs no peer, one after the other, and one table of what they measured.

    python -m benchmarks.suite [--only NAME]... [--quick] [--collect] [--record]
                               [--page FILE] [--readme FILE]

Each benchmark is a process of its own that writes its JSON into the folder of results. The table
has a line per figure: what was measured, its ratio to something of the same run (smaller is
better), its target, and the ratio in the committed baseline. What is slower than there by more
than noise is named at the end. Results of `make bench-peers` in the same folder are shown too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from banyan.bench.report import machine, make_console, versions
from benchmarks.figures import Figure, chief, figures_of
from benchmarks.showing import machine_line, markdown, put_into, table

RESULTS = Path("bench-results")
BASELINE = Path(__file__).with_name("baseline.json")
TRACE = Path("../shared/traces/conversation_trace.jsonl")
LAST_LINES = 12
SUMMARY = "bench.json"


@dataclass(frozen=True)
class Part:
    """One benchmark.

    Args:
        name: as in `figures.EXTRACTORS`.
        arguments: after `python`, without where the JSON goes.
        quick: arguments more under `--quick`.
        needs: a file without which it cannot run, or None.
        fine: exit statuses of a run whose results are to be shown.
    """

    name: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...] = ()
    needs: Path | None = None
    fine: tuple[int, ...] = (0,)

    def json_path(self, results: Path) -> Path:
        """Where its results lie."""
        return results / f"{self.name}.json"


_SERVED = ("--compare", "--model", "tiny-linear")
_PREFIXES = (
    *("--groups", "8", "--prompts-per-group", "8", "--shared", "1024", "--question", "128"),
    *("--output", "16", "--rounds", "3", "--device-groups", "2", *_SERVED),
)
_TURNS = ("--clients", "8", "--rounds", "4", *_SERVED)


def all_parts(trace: Path) -> list[Part]:
    """Every benchmark, in the order in which they run.

    Args:
        trace: what is replayed, if it is there.
    """
    served = ("-m", "banyan", "bench")
    return [
        Part("guard", ("-m", "benchmarks.guard"), fine=(0, 1)),
        Part("tree", ("-m", "benchmarks.tree"), ("--quick",)),
        Part("steps", ("-m", "benchmarks.steps"), ("--steps", "100")),
        Part("copies", ("-m", "benchmarks.copies")),
        Part("replay", ("-m", "benchmarks.replay", str(trace)), needs=trace),
        Part("overhead", ("-m", "benchmarks.overhead"), ("--repeats", "5")),
        Part("host-hits", ("-m", "benchmarks.host_hits"), ("--repeats", "5")),
        Part("shared-prefix", (*served, "shared-prefix", *_PREFIXES), ("--rounds", "2")),
        Part("multi-turn", (*served, "multi-turn", *_TURNS), ("--clients", "4")),
    ]


@dataclass(frozen=True)
class Outcome:
    """All that one invocation knows.

    Args:
        skipped, failed: why, by benchmark.
        title: the machine's class, the versions and the load when it was measured.
    """

    figures: list[Figure]
    skipped: dict[str, str]
    failed: dict[str, str]
    title: str


# ---- running -------------------------------------------------------------------------------------


def run(part: Part, results: Path, quick: bool) -> str | None:
    """Run one benchmark; the end of what it printed if it failed, else None.

    With few processors, one thread each is faster than threads that wait for each other.
    """
    path = part.json_path(results)
    path.unlink(missing_ok=True)
    command = [sys.executable, *part.arguments, *(part.quick if quick else ()), "--json", str(path)]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode in part.fine and path.is_file():
        return None
    last = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
    return f"status {done.returncode}: {last}"


def run_all(parts: list[Part], results: Path, quick: bool, console: Console) -> Outcome:
    """Run what can be run here, and take its figures."""
    results.mkdir(parents=True, exist_ok=True)
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    ran = []
    for part in parts:
        if part.needs is not None and not part.needs.is_file():
            skipped[part.name] = f"there is no {part.needs}"
            continue
        began = time.monotonic()
        with console.status(part.name):
            problem = run(part, results, quick)
        console.print(f"{part.name}: {time.monotonic() - began:.0f} s", highlight=False)
        if problem is None:
            ran.append(part)
        else:
            failed[part.name] = problem
    figures, lacking = collect(ran, results)
    return Outcome(figures, lacking | skipped, failed, machine_line())


def show_again(parts: list[Part], results: Path) -> Outcome:
    """What the results that are there say, and where the last run was."""
    figures, skipped = collect(parts, results)
    last = results / SUMMARY
    title = json.loads(last.read_text())["title"] if last.is_file() else machine_line()
    return Outcome(figures, skipped, {}, title)


def collect(parts: list[Part], results: Path) -> tuple[list[Figure], dict[str, str]]:
    """The figures of the results that are there; why others are not, by benchmark."""
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    for name, path in {p.name: p.json_path(results) for p in parts}.items():
        if path.is_file():
            figures += figures_of(name, json.loads(path.read_text()))
        else:
            skipped[name] = f"there is no {path}"
    peers = results / "versus-sglang.json"
    if peers.is_file():
        figures += figures_of("peers", json.loads(peers.read_text()))
    else:
        skipped["peers"] = f"there is no {peers}: see make bench-peers"
    return figures, skipped


# ---- comparing and showing -----------------------------------------------------------------------


def baseline() -> dict[str, float]:
    """The committed ratios, by figure; none where there is no baseline."""
    if not BASELINE.is_file():
        return {}
    ratios: dict[str, float] = json.loads(BASELINE.read_text())["ratios"]
    return ratios


def slower(figures: list[Figure], before: dict[str, float]) -> list[Figure]:
    """What has become slower than the baseline by more than noise, worst first."""
    found = [f for f in figures if f.key in before and f.ratio > before[f.key] * f.noise]
    return sorted(found, key=lambda f: before[f.key] / f.ratio)


def write(outcome: Outcome, path: Path) -> None:
    """All of it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = asdict(outcome) | {"machine": machine(), "versions": versions()}
    path.write_text(json.dumps(found, indent=1) + "\n")


def record(figures: list[Figure]) -> None:
    """Make the ratios the baseline; those of figures that were not measured now stay."""
    ratios = baseline() | {f.key: round(f.ratio, 4) for f in figures}
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "ratios": ratios}
    BASELINE.write_text(json.dumps(found, indent=1) + "\n")


def say(outcome: Outcome, before: dict[str, float], console: Console) -> None:
    """The table, and what a person should look at."""
    console.print(table(outcome.figures, before, outcome.title))
    for name, reason in outcome.skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False, markup=False)
    for name, reason in outcome.failed.items():
        console.print(f"FAILED {name}: {reason}", highlight=False, markup=False)
    for figure in slower(outcome.figures, before):
        change = figure.ratio / before[figure.key]
        console.print(f"slower: {figure.key}, {change:.2f} times the baseline", highlight=False)
    missed = sum(f.met is False for f in outcome.figures)
    console.print(f"{missed} of {len(outcome.figures)} figures miss their target", highlight=False)


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this benchmark; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, smaller sizes.")] = False,
    collecting: Annotated[
        bool, typer.Option("--collect", help="Run nothing: show the results that are there.")
    ] = False,
    recording: Annotated[
        bool, typer.Option("--record", help="Make these ratios the baseline.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Put the table between the marks of this page.")
    ] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Put the chief figures between the marks of this page.")
    ] = None,
    trace: Annotated[Path, typer.Option(help="Trace to replay, where it is there.")] = TRACE,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run the benchmarks and print one table."""
    known = all_parts(trace)
    if unknown := set(only or ()) - {part.name for part in known}:
        names = ", ".join(part.name for part in known)
        raise typer.BadParameter(f"no such benchmark: {', '.join(sorted(unknown))}; of {names}")
    if quick and recording:
        raise typer.BadParameter("a baseline is recorded at full size, without --quick")
    console = make_console()
    parts = [part for part in known if not only or part.name in only]
    if collecting:
        outcome = show_again(parts, results)
    else:
        outcome = run_all(parts, results, quick, console)
    say(outcome, {} if quick else baseline(), console)
    write(outcome, results / SUMMARY)
    if recording:
        record(outcome.figures)
    if page is not None:
        put_into(page, markdown(outcome.figures, outcome.title))
    if readme is not None:
        put_into(readme, markdown(chief(outcome.figures), outcome.title))
    raise typer.Exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    typer.run(main)
