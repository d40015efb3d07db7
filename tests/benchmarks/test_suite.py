"""The one command: figures from results, what is called slower, and what becomes of failures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner, Result

from benchmarks import copies, guard, host_hits, steps, suite
from benchmarks.counting import Count
from benchmarks.figures import EXTRACTORS, PEERS_LEAST, PEERS_MEAN, Figure, chief, figures_of
from benchmarks.peers.ratios import Row as PeerRow
from benchmarks.peers.ratios import Timing
from benchmarks.showing import BEGIN, END, put_into
from benchmarks.suite import Part, slower
from benchmarks.yardstick import yardstick_us


def tree_row(operation: str, median: float, budget: float | None) -> dict[str, Any]:
    return {
        "operation": operation,
        "median_us": median,
        "yardstick_us": 10.0,
        "budget_us": budget,
    }


def step_row(median: float, page: int = 1) -> dict[str, Any]:
    row = steps.Row("decode", "full", page, median, 9, 1, 1, 2.0, 100, 256, 0, 0, 0, 10.0)
    return asdict(row) | {"met": row.met}


def copy_row(engine: float, target: float | None) -> dict[str, Any]:
    row = copies.Row("large: of many", "scattered", "to host", 1.0, 10.0, 9.0, engine, target)
    return asdict(row) | {"ratio": row.ratio, "met": row.met}


def peer_row(banyan: float, rust: float, python: float = 9.0) -> dict[str, Any]:
    sides = {"banyan": banyan, "sglang-rust": rust, "sglang-python": python}
    timings = {name: Timing(us, us, us, us, 1) for name, us in sides.items()}
    return PeerRow("match", "match", "full", 1, timings).as_json("banyan")


def hit_row() -> dict[str, Any]:
    row = host_hits.Row("folder/model", 5, 9.0, 2.0, 2.4, 1, 1)
    return asdict(row) | {"ratio": row.ratio, "met": row.met}


SERVED = {"name": "device + host", "against": "host off", "ttft_s": 0.1, "against_ttft_s": 0.4}
COUNTS = {"instructions": 1_030, "c_calls": 10}
DATA: dict[str, tuple[dict[str, Any], list[tuple[str, float, bool | None]]]] = {
    "guard": (
        {"counts": {"a": COUNTS}, "baseline": {"a": COUNTS | {"instructions": 1_000}}}
        | {"findings": []},
        [("instructions of core operations", 1.03, True)],
    ),
    "tree": (
        {
            "rows": [
                tree_row("match", 5.0, 4.0),
                tree_row("match", 20.0, 4.0),
                tree_row("b", 1, None),
            ]
        },
        [("match", 1.0, False), ("b", 0.1, None)],
    ),
    "steps": (
        {"rows": [step_row(1.0), step_row(4.0), step_row(1.0, 64)]},
        [("decode, page 1", 200.0, False), ("decode, page 64", 100.0, True)],
    ),
    "copies": (
        {"rows": [copy_row(8.0, 0.8), copy_row(5.0, 0.8)]},
        [("large pages to host", 2.0, False)],
    ),
    "replay": (
        {"trace": "t.jsonl"}
        | {
            "rows": [
                {"components": "full", "seconds": 21.0, "us_per_request": 500, "yardstick_us": 10.0}
            ]
        },
        [("t, full", 50.0, False)],
    ),
    "overhead": (
        {"rows": [{"model": "m", "bare_total_s": 1.0, "engine_total_s": 1.1}]},
        [("engine, m", 1.1, None)],
    ),
    "host-hits": (
        {"target": 1.15, "rows": [hit_row()]},
        [("TTFT of a host hit, model", 1.2, False)],
    ),
    "shared-prefix": (
        {"benchmark": "shared-prefix", "comparisons": [SERVED]},
        [("TTFT, device + host", 0.25, None)],
    ),
    "multi-turn": (
        {"benchmark": "multi-turn", "comparisons": [SERVED]},
        [("TTFT, device + host", 0.25, None)],
    ),
    "peers": (
        {"rows": [peer_row(1.0, 4.0), peer_row(2.0, 2.0), peer_row(2.0, 0.5)]}
        | {"geometric_mean": {"sglang-rust": 4.0}},
        [("match", 1.0, False), (PEERS_MEAN, 0.25, False), (PEERS_LEAST, 2 / 9, False)],
    ),
}


# ---- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", EXTRACTORS)
def test_figures_are_ratios_and_know_their_targets(benchmark: str) -> None:
    data, expected = DATA[benchmark]
    found = figures_of(benchmark, data)
    assert [f.benchmark for f in found] == [benchmark] * len(expected)
    assert [(f.name, pytest.approx(f.ratio), f.met) for f in found] == expected
    assert all((f.target != "") == (f.met is not None) for f in found)


def test_the_guards_own_results_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BASELINE", tmp_path / "guard.json")
    monkeypatch.setattr(guard, "measure", lambda: {"a": Count(1_000, 100)})
    guard.record({"a": Count(500, 100)})
    app, out = Typer(), tmp_path / "out.json"
    app.command()(guard.main)
    assert CliRunner().invoke(app, ["--json", str(out)]).exit_code == 1
    (figure,) = figures_of("guard", json.loads(out.read_text()))
    assert (figure.ratio, figure.met) == (pytest.approx(2.0), False)


def test_the_same_figure_beside_two_things_is_two_in_the_baseline() -> None:
    rows = [SERVED, SERVED | {"against": "cache off"}]
    found = figures_of("shared-prefix", {"benchmark": "shared-prefix", "comparisons": rows})
    assert len({f.key for f in found}) == 2


def test_the_chief_figures_are_those_felt_those_lost_and_the_worst_of_the_others() -> None:
    every = [f for name in EXTRACTORS for f in figures_of(name, DATA[name][0])]
    names = [f.name for f in chief(every)]
    assert "b" not in names and PEERS_MEAN in names
    assert {"match", "engine, m", "TTFT, device + host"} <= set(names)
    won = {"rows": [peer_row(1.0, 4.0, 11.0)], "geometric_mean": {"sglang-rust": None}}
    assert chief(figures_of("peers", won)) == []
    fine = [Figure("steps", n, "", "y", r, "2 ms", True) for n, r in (("a", 1.0), ("b", 3.0))]
    assert [f.name for f in chief([*fine, Figure("steps", "c", "", "y", 0.5, "2 ms", False)])] == [
        "b",
        "c",
    ]


def test_the_yardstick_is_steady_enough_to_divide_by() -> None:
    first, second = sorted(yardstick_us(300) for _ in range(2))
    assert 0 < second < 5 * first


# ---- comparing -----------------------------------------------------------------------------------


def figure(name: str, ratio: float, noise: float = 1.5) -> Figure:
    return Figure("part", name, "1 s", "something", ratio, noise=noise)


def test_slower_is_what_exceeds_noise_worst_first() -> None:
    found = [figure("a", 1.4), figure("b", 1.6), figure("c", 9.0), figure("d", 3.2), figure("e", 0)]
    before = {f"part: {name}, beside something": 1.0 for name in "abde"}
    assert [f.name for f in slower(found, before)] == ["d", "b"]
    assert slower([figure("a", 1.04, noise=1.03)], before) != []


# ---- the command ---------------------------------------------------------------------------------


def writes(data: dict[str, Any], status: int = 0) -> tuple[str, ...]:
    """Arguments of a Python that writes `data` where `--json` says, speaks, and ends."""
    code = (
        "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text(sys.argv[1]);"
        f"print('last words'); sys.exit({status})"
    )
    return ("-c", code, json.dumps(data))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on given parts; results and baseline lie in a folder of their own."""
    monkeypatch.setattr(suite, "BASELINE", tmp_path / "baseline.json")

    def run(parts: list[Part], *arguments: str) -> Result:
        monkeypatch.setattr(suite, "all_parts", lambda trace: parts)
        monkeypatch.setattr(suite, "make_console", lambda: Console(width=200))
        app = Typer()
        app.command()(suite.main)
        results = str(tmp_path / "results")
        return CliRunner().invoke(app, [*arguments, "--results", results])

    return run


HITS = Part("host-hits", writes(DATA["host-hits"][0]))
TREE = Part("tree", writes(DATA["tree"][0]))
COPIES = Part("copies", writes(DATA["copies"][0]))


def test_one_table_of_all_that_ran(bench: Any, tmp_path: Path) -> None:
    lacking = Part("replay", writes({}), needs=tmp_path / "no-trace")
    done = bench([HITS, COPIES, lacking])
    assert done.exit_code == 0, done.output
    assert "TTFT of a host hit, model" in done.output and "large pages to host" in done.output
    assert "skipped replay: there is no" in done.output
    assert "2 of 2 figures miss their target" in done.output
    written = json.loads((tmp_path / "results" / "bench.json").read_text())
    assert [f["ratio"] for f in written["figures"]] == [pytest.approx(1.2), pytest.approx(2.0)]


def test_a_benchmark_that_fails_is_named_and_the_others_are_shown(bench: Any) -> None:
    done = bench([Part("copies", writes(DATA["copies"][0], 3)), HITS])
    assert done.exit_code == 1
    assert "FAILED copies: status 3: last words" in done.output
    assert "TTFT of a host hit, model" in done.output


def test_a_run_may_end_with_findings(bench: Any) -> None:
    part = Part("guard", writes(DATA["guard"][0], 1), fine=(0, 1))
    assert bench([part]).exit_code == 0


def test_a_recorded_baseline_is_compared_with(bench: Any) -> None:
    assert bench([HITS, COPIES], "--record").exit_code == 0
    assert "slower" not in bench([HITS, COPIES]).output
    worse = {"target": 1.15, "rows": [hit_row() | {"ratio": 2.4}]}
    done = bench([replace(HITS, arguments=writes(worse))])
    assert (
        "slower: host-hits: TTFT of a host hit, model, beside device hit, 2.00 times" in done.output
    )


def test_a_partial_recording_keeps_the_rest(bench: Any) -> None:
    bench([HITS, COPIES], "--record")
    before = suite.baseline()
    bench([HITS, COPIES], "--only", "copies", "--record")
    assert suite.baseline() == before and len(before) == 2


def test_results_can_be_shown_again_without_running(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "machine_line", lambda: "where it was measured")
    bench([HITS])
    monkeypatch.setattr(suite, "machine_line", lambda: "elsewhere")
    done = bench([replace(HITS, arguments=("-c", "raise SystemExit(1)"))], "--collect")
    assert done.exit_code == 0 and "TTFT of a host hit, model" in done.output
    assert "where it was measured" in done.output and "elsewhere" not in done.output


def test_what_cannot_be_asked_is_refused(bench: Any) -> None:
    assert bench([HITS], "--only", "nothing").exit_code == 2
    assert bench([HITS], "--quick", "--record").exit_code == 2


def test_the_table_goes_between_the_marks_of_a_page(bench: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert bench([HITS], "--page", str(page)).exit_code == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| host-hits | TTFT of a host hit, model |" in text and "| NO |" in text
    assert bench([TREE], "--readme", str(page)).exit_code == 0
    assert "| tree | match |" in page.read_text() and "| tree | b |" not in page.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must have"):
        put_into(page, "x")


def test_every_benchmark_has_an_extractor_and_a_module() -> None:
    names = {part.name for part in suite.all_parts(Path("trace"))}
    assert names | {"peers"} == set(EXTRACTORS)
