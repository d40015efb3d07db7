"""The guard: counts are the same in every run, the baseline holds, a slow-down is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from banyan.tree import Match, Node, Tree
from benchmarks import guard
from benchmarks.counting import Count, count
from benchmarks.guard import RECORD, baseline, compare, measure, record


def run(*arguments: str) -> Result:
    app = Typer()
    app.command()(guard.main)
    return CliRunner().invoke(app, list(arguments))


# ---- counting ------------------------------------------------------------------------------------


def loop(turns: int) -> None:
    for _ in range(turns):
        len("")


def test_instructions_and_calls_grow_with_the_work() -> None:
    ten, twenty, thirty = (count(lambda n=n: loop(n)) for n in (10, 20, 30))
    assert twenty.c_calls - ten.c_calls == 10
    assert 0 < twenty.instructions - ten.instructions == thirty.instructions - twenty.instructions


def test_nothing_is_counted_of_the_counting() -> None:
    assert count(lambda: None).c_calls == 0
    assert count(lambda: None).instructions < 5


def test_an_exception_and_an_earlier_hook_are_left_as_they_were() -> None:
    def fails() -> None:
        raise ValueError

    before = sys.gettrace(), sys.getprofile()
    with pytest.raises(ValueError):
        count(fails)
    assert (sys.gettrace(), sys.getprofile()) == before


def test_counts_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import json; from dataclasses import asdict; from benchmarks.guard import measure;"
        "print(json.dumps({n: asdict(c) for n, c in measure('full+state').items()}))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    first, second = (json.loads(run.communicate()[0]) for run in runs)
    assert first == second
    assert len(first) == len(guard.WORKLOADS)


# ---- the baseline --------------------------------------------------------------------------------


def test_core_operations_do_no_more_than_they_did() -> None:
    recorded = baseline()
    if recorded is None:
        pytest.skip(f"no baseline for Python {guard.python_version()}; record one: {RECORD}")
    findings = compare(measure(), recorded)
    assert not findings, "\n".join(f"{f.workload} {f.text}" for f in findings)


BEFORE = {"a": Count(1_000, 100), "b": Count(1_000, 100)}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Count(1_030, 103), None),
        (Count(970, 97), None),
        (Count(1_031, 100), "does more"),
        (Count(1_000, 104), "does more"),
        (Count(969, 100), RECORD),
        (Count(1_000, 96), RECORD),
    ],
)
def test_a_count_may_differ_by_the_tolerance(now: Count, said: str | None) -> None:
    findings = compare({"a": BEFORE["a"], "b": now}, BEFORE)
    assert [f.workload for f in findings] == (["b"] if said else [])
    assert all(said in f.text for f in findings if said)


def test_a_workload_without_its_counterpart_is_found() -> None:
    findings = compare({"a": BEFORE["a"], "c": Count(1, 1)}, BEFORE)
    assert [f.workload for f in findings] == ["b", "c"]
    assert all(RECORD in f.text for f in findings)


def test_each_version_of_python_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "guard.json"
    assert baseline(path) is None
    record(BEFORE, path)
    assert baseline(path) == BEFORE
    monkeypatch.setattr(guard, "python_version", lambda: "4.0")
    assert baseline(path) is None
    record({"a": Count(1, 1)}, path)
    assert baseline(path) == {"a": Count(1, 1)}
    monkeypatch.undo()
    assert baseline(path) == BEFORE


# ---- a planted slow-down -------------------------------------------------------------------------


@pytest.fixture
def matching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matches are measured, beside a baseline of the tree as it is."""
    monkeypatch.setattr(guard, "WORKLOADS", {"match, 64 nodes": guard.match_path})
    monkeypatch.setattr(guard, "BASELINE", tmp_path / "guard.json")
    assert run("--record").exit_code == 0


def walks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every match go up its path once more."""
    plain = Tree.match

    def slower(tree: Tree, key: bytes, *rest: Any) -> Match:
        found = plain(tree, key, *rest)
        node: Node | None = tree.node_at(found, found.boundary)
        while node is not None:
            node = node.parent
        return found

    monkeypatch.setattr(Tree, "match", slower)


def test_one_more_pass_over_the_path_is_noticed(
    matching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run().exit_code == 0
    walks_again(monkeypatch)
    done = run()
    assert done.exit_code == 1
    assert done.output.count("does more than it did") >= 3


def test_a_gain_asks_to_be_recorded(matching: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as slowed:
        walks_again(slowed)
        assert run("--record").exit_code == 0
    done = run()
    assert done.exit_code == 1
    assert "Record the new baseline" in " ".join(done.output.split())
    assert run("--record").exit_code == 0 and run().exit_code == 0


def test_another_python_is_told_how_to_record(
    matching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "python_version", lambda: "4.0")
    done = run()
    assert done.exit_code == 0 and RECORD in done.output and "4.0" in done.output
