"""The benchmark of scheduler steps at a small size: what it says of a step is so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import steps
from benchmarks.byteless import COMPONENTS, NullCopyEngine, NullModel
from benchmarks.steps import SCENARIOS, Row, Scenario, Subject, measure

RUNNING = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PROMPT": 72, "SHARED": 64, "STEMS_HELD": 10, "GROUPS": 24, "TIMES": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(steps, name, value)


def smaller(name: str) -> Scenario:
    """A scenario of that name whose prompts have 72 tokens."""
    scenario = next(s for s in SCENARIOS if s.name == name)
    output = scenario.output and 12
    shared = min(scenario.shared, 64)
    return replace(
        scenario, chunk=32, output=output, shared=shared, waiting=min(scenario.waiting, 20)
    )


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("name", [s.name for s in SCENARIOS])
def test_each_kind_of_step_is_what_it_says(components: str, name: str) -> None:
    row = measure(smaller(name), components, 4, running=RUNNING, steps=60)
    assert 0 < row.median_ms <= row.p99_ms
    assert (row.transfers > 0) == name.endswith("transfers")
    if name.startswith("decode"):
        assert (row.running, row.started, row.host_tokens) == (RUNNING, 0, 0)
    else:
        assert row.started > 0.1 and 2 < row.running <= RUNNING


def test_what_only_the_host_has_is_loaded_back() -> None:
    row = measure(smaller("turnover, shared + transfers"), "full", 4, running=RUNNING, steps=200)
    assert row.host_tokens > 0


def test_requests_wait_at_each_step() -> None:
    subject = Subject(smaller("turnover, new"), "full", 4, RUNNING, 10)
    subject.settle()
    for _ in subject.sample(10):
        subject.top_up()
        assert len(subject.roster.waiting) == 20


def test_a_copy_ends_after_as_many_polls_as_it_was_told() -> None:
    engine = NullCopyEngine(3)
    job = type("Job", (), {"op_id": 5})()
    engine.submit(job)
    assert [[d.op_id for d in engine.poll()] for _ in range(5)] == [[], [], [5], [], []]


def test_the_null_model_answers_every_row() -> None:
    model = NullModel()
    assert len(model.sample(model.forward([]), [None] * 3)) == 3


def test_targets_depend_on_whether_requests_wait() -> None:
    assert {s.waiting: s.target_ms for s in SCENARIOS} == {0: 2.0, 2_000: 10.0}
    slow = Row("x", "full", 1, 3.0, 4.0, 3.0, 4.0, 2.0, 1, 1, 0, 0, 0)
    assert not slow.met and replace(slow, target_ms=10.0).met


def test_rows_can_be_chosen_by_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    def noted(scenario: Scenario, components: str, page: int, steps: int) -> Row:
        asked.append((scenario.name, components, page))
        return Row(scenario.name, components, page, 1.0, 1.0, 1.0, 1.0, 2.0, steps, 1, 0, 0, 0)

    monkeypatch.setattr(steps, "measure", noted)
    app = Typer()
    app.command()(steps.main)
    done = CliRunner().invoke(app, ["--only", "decode", "--only", "page 1"])
    assert done.exit_code == 0, done.output
    assert asked == [(n, c, 1) for n in ("decode", "decode + transfers") for c in COMPONENTS]
