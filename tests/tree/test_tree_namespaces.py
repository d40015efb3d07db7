"""Namespaces: one root each, nothing shared, empty ones forgotten."""

from __future__ import annotations

from banyan.tree import Tier, encode_namespace
from tests.tree.plant import Plant


def space(name: str) -> bytes:
    return encode_namespace([("salt", name)])


def seq(n: int) -> list[int]:
    return list(range(n))


def test_equal_tokens_in_different_namespaces_are_different_prompts() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(16), states=[16])
    plant.insert(seq(8), states=[8], namespace=space("a"))
    assert plant.match(seq(16)).boundary == 16
    assert plant.match(seq(16), space("a")).boundary == 8
    assert plant.match(seq(16), space("b")).full_len == 0
    plant.check()


def test_a_match_makes_no_root() -> None:
    plant = Plant()
    plant.match(seq(8), space("a"))
    assert plant.tree.roots == {}


def test_eviction_is_fair_across_namespaces() -> None:
    plant = Plant()
    plant.insert(seq(8), namespace=space("a"))
    plant.insert(seq(8), namespace=space("b"))
    plant.use(seq(8), space("a"))
    assert plant.evict(2) is not None
    assert plant.match(seq(8), space("a")).full_len == 8
    assert plant.match(seq(8), space("b")).full_len == 0


def test_empty_roots_are_forgotten_and_the_others_kept() -> None:
    plant = Plant()
    plant.insert(seq(8), namespace=space("kept"))
    for i in range(10_000):
        plant.tree.root(space(str(i)))
    assert len(plant.tree.roots) <= 200
    assert plant.match(seq(8), space("kept")).full_len == 8
    plant.check()


def test_many_live_namespaces_are_all_kept() -> None:
    plant = Plant()
    for i in range(1_000):
        plant.insert(seq(4), namespace=space(str(i)))
    assert all(plant.match(seq(4), space(str(i))).full_len == 4 for i in range(1_000))
    assert plant.evict(1_000) is not None
    for i in range(1_000, 1_300):
        plant.insert(seq(4), namespace=space(str(i)))
    assert len(plant.tree.roots) < 2_300
    plant.check()


def test_a_cut_off_tree_is_not_found_and_its_locks_still_hold() -> None:
    plant = Plant()
    plant.insert(seq(16), namespace=space("a"))
    node = plant.lock("reader", seq(8), space("a"))
    plant.tree.flush()
    plant.insert(seq(8), namespace=space("a"))
    assert plant.match(seq(16), space("a")).full_len == 8
    assert node.has(0, Tier.DEVICE) and plant.node(seq(8), space("a")) is not node
    plant.check()
    plant.unlock("reader")
    plant.tree.purge()
    assert not node.has(0, Tier.DEVICE)
    plant.check()
