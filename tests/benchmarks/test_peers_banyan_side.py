"""Banyan as it is measured beside others: what it answers is what the reference answers."""

from __future__ import annotations

import ast
import random
from array import array
from pathlib import Path

import numpy as np
import pytest

from banyan.spec import Component, Full, Window
from banyan.tree.keys import TOKEN_BYTES
from benchmarks.peers import banyan_side, sglang_plugin, workloads
from benchmarks.peers.banyan_side import BanyanSide
from benchmarks.peers.side import Side
from tests.support.reference import Reference, survey

HARNESS = Path(__file__).resolve().parents[3] / "shared" / "peers" / "sglang_tree.py"
CONFIGURATIONS = [(kind, page) for kind in banyan_side.COMPONENTS for page in (1, 4)]
STEPS = 150


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that prompts of a few tokens go beyond them."""
    parts = (Component("full", Full()), Component("window", Window(10)))
    monkeypatch.setitem(banyan_side.COMPONENTS, "full+window", parts)


class Walk:
    """Random calls on one side, each compared with the reference."""

    def __init__(self, kind: str, page: int, seed: int) -> None:
        self.side = BanyanSide(kind, page)
        self.page = page
        self.reference = Reference(self.side.spec)
        self.random = random.Random(seed)
        self.known: list[array[int]] = [array("q")]

    def answer(self, query: bytes) -> tuple[int, int]:
        """(device boundary, device `Full` length) of a query, by brute force."""
        self.reference.held = survey(self.side.tree)
        device, _, _, full = self.reference.answer(query, b"")
        return device, full

    def prompt(self) -> array[int]:
        """A prompt of whole pages that goes on from a part of a known one."""
        base = self.random.choice(self.known)
        base = base[: self.random.randrange(len(base) + 1)]
        new = [self.random.randrange(2) for _ in range(self.random.randrange(1, 5 * self.page + 9))]
        tokens = base + array("q", new)
        return tokens[: len(tokens) // self.page * self.page]

    def insert(self) -> None:
        tokens = self.prompt()
        if not tokens:
            return
        boundary, full = self.answer(self.side.query(tokens))
        had = self.side.insert(self.side.insertion(tokens, boundary))
        assert had == full
        self.known.append(tokens)
        assert self.answer(self.side.query(tokens))[0] == len(tokens)

    def match(self) -> None:
        query = self.side.query(self.prompt())
        boundary, _ = self.answer(query)
        assert self.side.match(query) == boundary
        slots = self.side.match_slots(query)
        held = self.reference.held[0][0]
        ends = range(self.page, boundary + 1, self.page)
        assert slots.dtype == np.int32
        assert slots.tolist() == [held[b"", query[: end * TOKEN_BYTES]] for end in ends]

    def hold(self) -> None:
        query = self.side.query(self.random.choice(self.known))
        assert self.side.hold(query) == self.answer(query)[0]
        node = self.side.node_of(query)
        self.side.lock_unlock(node)
        if len(self.side.held) < 3:
            self.side.lock(node)
        else:
            self.side.release()

    def evict(self) -> None:
        wanted = self.random.randrange(1, 40)
        before = len(survey(self.side.tree)[0][0])
        freed = self.side.evict(wanted)
        assert freed in (0, -(-wanted // self.page) * self.page)
        assert before - len(survey(self.side.tree)[0][0]) == freed // self.page


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("kind", "page"), CONFIGURATIONS)
def test_the_side_answers_as_the_reference(kind: str, page: int) -> None:
    walk = Walk(kind, page, seed=page)
    calls = [walk.insert, walk.insert, walk.match, walk.match, walk.hold, walk.evict]
    for _ in range(STEPS):
        walk.random.choice(calls)()
        walk.side.check()
    walk.side.release()
    walk.side.check()


def test_a_wrong_tree_fails_the_check() -> None:
    side = BanyanSide("full", 1)
    workloads.put(side, array("q", range(8)))
    side.tree.device.held[0] += 1
    with pytest.raises(AssertionError, match="INV-01"):
        side.check()


# ---- the plug-in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("components", sglang_plugin.COMPONENTS)
def test_the_plugins_agree(components: str, page: int) -> None:
    tokens = workloads.Prompts().draw(2_048)
    factories = (
        sglang_plugin.banyan,
        sglang_plugin.banyan_holding,
        sglang_plugin.banyan_from_tokens,
    )
    for factory in factories:
        plugin = factory(components, page, 1 << 16)
        plugin.reset()
        assert plugin.insert(plugin.prep_insert(tokens[:1_024], 0)) == 0
        assert plugin.insert(plugin.prep_insert(tokens, 1_024)) == 1_024
        query = plugin.prep(tokens)
        assert plugin.match(query) == plugin.match_indices(query) == 2_048
        assert plugin.node_count(query) == (4 if components == "full+swa" else 2)
        plugin.lock_unlock(plugin.node_of(query))
        assert plugin.evict(512) == 512
        plugin.check()


@pytest.mark.skipif(not HARNESS.exists(), reason="the harness lies beside this repository")
def test_the_plugin_has_all_that_the_harness_calls() -> None:
    module = ast.parse(HARNESS.read_text())
    called: set[str] = set()
    for part in module.body:
        if isinstance(part, ast.FunctionDef) and part.name != "selfcheck":
            called |= {
                node.attr
                for node in ast.walk(part)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "tree"
            }
    called -= {"has_native", "match_native"}
    assert {"prep_insert", "match_indices", "name"} <= called
    plugin = sglang_plugin.banyan("full", 1, 1)
    assert not {name for name in called if not hasattr(plugin, name)}


# ---- the workloads -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "page"), [("full", 64), ("full+window", 64), ("full+state", 1)])
def test_every_workload_runs_on_every_side(kind: str, page: int) -> None:
    effort = workloads.Effort(rounds=2, calls=2, branches=4, leaves=20)
    sides = [BanyanSide(kind, page, "one"), BanyanSide(kind, page, "two")]
    for workload in workloads.workloads(effort):
        samples = workloads.run(workload, sides, effort)
        assert set(samples) == {"one", "two"}, workload.name
        assert len(samples["one"]) == len(samples["two"]) >= 2, workload.name
        assert min(samples["one"]) > 0
        assert not any(side.tree.roots for side in sides), "nothing is left to the next one"


def test_the_sides_take_turns() -> None:
    order: list[str] = []

    def prepare(side: Side, effort: workloads.Effort) -> workloads.Block:
        def block() -> list[float]:
            order.append(side.name)
            return [1.0]

        return block

    sides = [BanyanSide("full", 1, name) for name in "abc"]
    workload = workloads.Workload("turns", "match", prepare)
    workloads.run(workload, sides, workloads.Effort(rounds=3))
    assert "".join(order) == "abc" + "bca" + "cab"
