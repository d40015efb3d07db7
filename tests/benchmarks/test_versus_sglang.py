"""The comparison with SGLang where there is no SGLang: its arithmetic, its output, its refusal."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner, Result

from benchmarks import versus_sglang
from benchmarks.peers import ratios, tables
from benchmarks.peers.plan import Plan, plan_from
from benchmarks.peers.ratios import Row, Timing, geometric_mean, lost, mean_ratio, summary
from benchmarks.peers.tables import ratio_table

OTHERS = versus_sglang.AGAINST


def row(workload: str, banyan: float, *others: float, kind: str = "match", page: int = 1) -> Row:
    sides = {"banyan": banyan, **dict(zip(OTHERS, others, strict=True))}
    timings = {name: Timing(us, us, us, us, 1) for name, us in sides.items()}
    return Row(workload, kind, "full", page, timings)


ROWS = [
    row("a", 1.0, 8.0, 16.0),
    row("b", 2.0, 4.0, 20.0, kind="evict"),
    row("c", 4.0, 2.0, 40.0, kind="lock"),
]


def run(*arguments: str) -> Result:
    app = Typer()
    app.command()(versus_sglang.main)
    return CliRunner().invoke(app, list(arguments))


def interpreter(folder: Path, said: list[dict[str, Any]], status: int = 0) -> str:
    """An executable that answers like a Python in which the measuring process says `said`."""
    (folder / "said").write_text("".join(json.dumps(line) + "\n" for line in said))
    script = folder / "python"
    script.write_text(f'#!/bin/sh\ncat "{folder}/said"\nexit {status}\n')
    script.chmod(0o755)
    return str(script)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_a_ratio_says_how_many_times_faster_the_subject_is() -> None:
    assert [r.ratio("banyan", "sglang-rust") for r in ROWS] == [8.0, 2.0, 0.5]
    assert ROWS[0].as_json("banyan")["ratios"] == {"sglang-rust": 8.0, "sglang-python": 16.0}


def test_the_geometric_mean_is_over_the_rows_that_count() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None
    assert mean_ratio(ROWS, "banyan", "sglang-rust") == pytest.approx(4.0)
    assert mean_ratio(ROWS[2:], "banyan", "sglang-rust") is None


def test_lost_rows_are_named() -> None:
    assert lost(ROWS, "banyan", "sglang-rust") == [ROWS[2]]
    assert "1 of 3 rows are lost: c (1)" in summary(ROWS, "banyan", "sglang-rust")
    assert "no row of 3 is lost" in summary(ROWS, "banyan", "sglang-python")


def test_a_timing_keeps_median_and_tenths() -> None:
    timing = ratios.timing([float(us) for us in range(1, 12)])
    assert (timing.median_us, timing.p10_us, timing.p90_us) == (6.0, 2.0, 10.0)
    assert (timing.min_us, timing.samples) == (1.0, 11)
    assert ratios.timing([3.0]) == Timing(3.0, 3.0, 3.0, 3.0, 1)


def test_what_one_process_says_the_other_understands() -> None:
    assert ratios.row_from(json.loads(json.dumps(asdict(ROWS[0])))) == ROWS[0]
    plan = Plan((("full", 64),), ("evict",), quick=True)
    assert plan_from(json.dumps(asdict(plan))) == plan
    assert plan.rows == len(plan.workloads) == 1


def test_the_saved_rows_become_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps({"rows": [r.as_json("banyan") for r in ROWS]}))
    tables.main(str(saved))
    assert capsys.readouterr().out == (
        "|  | full, page 1 |\n| --- | --- |\n| a | 1 (8, 16) |\n| b | 2 (2, 10) |\n"
        "| c | 4 (0.5, 10) |\n| geometric mean | 4.0, 12.6 |\n"
    )


def test_a_lost_cell_is_marked() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(ratio_table(ROWS, "banyan", "sglang-rust"))
    lines = {
        line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if "│" in line
    }
    assert "0.50 <" in lines["c"] and "<" not in lines["a"]
    assert "4.0" in lines["geometric mean"]


# ---- the command ---------------------------------------------------------------------------------


def test_an_unknown_kind_of_row_is_refused() -> None:
    result = run("--only", "matches")
    assert result.exit_code == 2
    assert "no such kind: matches" in result.output


def test_without_that_python_it_says_what_to_install() -> None:
    result = run("--sglang-python", "/nowhere/python")
    assert result.exit_code == 2
    assert "pip install sglang==0.5.23" in result.output
    assert "/nowhere/python" in result.output


@pytest.mark.skipif(bool(importlib.util.find_spec("sglang")), reason="this Python has SGLang")
def test_without_sglang_it_says_what_to_install() -> None:
    result = run("--sglang-python", sys.executable)
    assert result.exit_code == 2
    assert "No module named 'sglang'" in result.output
    assert "--sglang-python" in result.output


def test_rows_become_tables_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configurations = (("full", 1), ("full", 64))
    monkeypatch.setattr(versus_sglang, "CONFIGURATIONS", configurations)
    rows = [row("evict", 2.0, 1.0, 6.0, kind="evict", page=page) for page in (1, 64)]
    python = interpreter(
        tmp_path,
        [{"versions": {"sglang": "0"}, "rows": 2}, *[{"row": asdict(r)} for r in rows]],
    )
    out = tmp_path / "deep" / "out.json"
    result = run("--sglang-python", python, "--only", "evict", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "2 of 2 rows are lost: evict (2)" in " ".join(result.output.split())
    saved = json.loads(out.read_text())
    assert saved["versions"]["sglang"] == "0"
    assert saved["geometric_mean"] == {"sglang-rust": 0.5, "sglang-python": pytest.approx(3.0)}
    assert [r["ratios"]["sglang-rust"] for r in saved["rows"]] == [0.5, 0.5]


def test_a_process_that_dies_is_an_error(tmp_path: Path) -> None:
    python = interpreter(tmp_path, [{"versions": {}, "rows": 6}], status=7)
    result = run("--sglang-python", python, "--only", "evict")
    assert isinstance(result.exception, RuntimeError)
    assert "status 7" in str(result.exception)
