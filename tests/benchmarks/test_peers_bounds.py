"""The figures of Banyan alone, taken of small trees."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.peers import bounds
from benchmarks.peers.bounds import Figure, figure_table
from benchmarks.peers.side import CONFIGURATIONS


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FEW", 250), ("MANY", 3_000), ("EVICTIONS", 20), ("TALK", 8_192)):
        monkeypatch.setattr(bounds, name, value)


@pytest.mark.parametrize(("components", "page"), CONFIGURATIONS)
def test_each_figure_is_taken(components: str, page: int) -> None:
    for part in bounds.PARTS:
        figures = list(part(components, page, True))
        assert all(f.value > 0 for f in figures)
        assert {(f.components, f.page_size) for f in figures} == {(components, page)}
        assert any(f.bound is not None for f in figures)


def test_a_token_of_a_long_node_takes_its_key_and_its_slots() -> None:
    (token,) = (f for f in bounds.memory("full", 1, True) if f.name.startswith("a token of"))
    assert token.value == pytest.approx(4 + 4, abs=0.2)


def test_what_misses_its_bound_is_marked() -> None:
    figures = [
        Figure("a", "full", 1, 3.0, "us", bound=2.0),
        Figure("b", "full", 1, 2.0, "us", bound=2.0),
        Figure("c", "full", 1, 9.0, "us"),
    ]
    assert [f.met for f in figures] == [False, True, None]
    out = io.StringIO()
    Console(file=out, width=80).print(figure_table(figures))
    assert "3 >" in out.getvalue() and out.getvalue().count(">") == 1
