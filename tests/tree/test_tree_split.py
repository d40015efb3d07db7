"""Splitting a node: data by position, states with the lower half, locks and claims with both."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.tree import Node, Tier
from banyan.tree.node import Claim
from tests.tree.plant import Plant


def seq(n: int) -> list[int]:
    return list(range(1, n + 1))


def planted() -> tuple[Plant, Node]:
    """One node of 6 pages on both tiers, window and state included."""
    plant = Plant("full+window+state", window=100)
    plant.insert(seq(24), states=[24])
    plant.mirror(seq(24))
    (node,) = plant.nodes()
    return plant, node


@pytest.mark.parametrize("at", [4, 8, 12, 16, 20])
def test_pages_divide_by_position_and_the_state_stays_below(at: int) -> None:
    plant, node = planted()
    before = {(t, c): node.parts[t][c].slots.copy() for t in Tier for c in range(3)}  # type: ignore[union-attr]
    upper = plant.tree.split(node, at)
    assert (upper.start, upper.end, node.start, node.end) == (0, at, at, 24)
    for tier in Tier:
        for c in (0, 1):
            parts = [upper.parts[tier][c].slots, node.parts[tier][c].slots]
            assert [len(p) for p in parts] == [at // 4, 6 - at // 4]  # type: ignore[arg-type]
            assert np.array_equal(np.concatenate(parts), before[tier, c])  # type: ignore[arg-type]
        assert upper.parts[tier][2].slots is None
        assert np.array_equal(node.parts[tier][2].slots, before[tier, 2])  # type: ignore[arg-type]
    plant.check()


def test_a_handle_on_a_boundary_survives_every_split() -> None:
    plant, node = planted()
    for at in (12, 4, 20, 16):
        plant.node(seq(at))
    assert node.end == 24
    assert [n.end for n in sorted(plant.nodes(), key=lambda n: n.end)] == [4, 12, 16, 20, 24]
    assert plant.node(seq(24)) is node
    plant.check()


def test_the_halves_share_no_memory_with_the_whole() -> None:
    plant, node = planted()
    whole = node.parts[0][0].slots
    upper = plant.tree.split(node, 8)
    assert whole is not None
    whole[:] = -1
    assert (upper.parts[0][0].slots >= 0).all() and (node.parts[0][0].slots >= 0).all()  # type: ignore[operator]


def test_the_upper_half_inherits_what_policies_order_by() -> None:
    plant, node = planted()
    plant.tree.use(node)
    node.priority = 7
    upper = plant.tree.split(node, 8)
    for field in ("stamp", "hits", "born", "priority"):
        assert getattr(upper, field) == getattr(node, field) != 0


@pytest.mark.parametrize("at", range(4, 24, 4))
def test_locks_of_both_halves_are_those_of_the_whole(at: int) -> None:
    plant, node = planted()
    plant.lock("one", seq(24))
    plant.lock("two", seq(24))
    before = [plant.tree.device.protected[:], plant.tree.device.evictable[:]]
    plant.tree.split(node, at)
    plant.check()
    assert [plant.tree.device.protected, plant.tree.device.evictable] == before
    plant.unlock("one")
    plant.check()
    plant.unlock("two")
    plant.check()
    assert plant.tree.device.protected == [0, 0, 0]


def test_a_claim_divides_with_its_node() -> None:
    class Op:
        def __init__(self) -> None:
            self.claims: list[Claim] = []

    plant, node = planted()
    op = Op()
    src, dst = plant.fresh(0, 6), plant.fresh(0, 6)
    one = np.array([3], np.int32)
    op.claims = [
        Claim(op, node, 0, Tier.DEVICE, src, dst),
        Claim(op, node, 2, Tier.DEVICE, one, one),
    ]
    node.claims = list(op.claims)
    upper = plant.tree.split(node, 8)
    assert len(op.claims) == 3 and len(node.claims) == 2
    (front,) = upper.claims or []
    assert front in op.claims and front.node is upper
    assert np.array_equal(front.src, src[:2]) and np.array_equal(front.dst, dst[:2])
    below = node.claims[0]
    assert np.array_equal(below.src, src[2:]) and np.array_equal(below.dst, dst[2:])
    assert node.claims[1].component == 2 and len(node.claims[1].src) == 1


def test_children_stay_below_the_lower_half() -> None:
    plant = Plant()
    plant.insert(seq(8))
    plant.insert([*seq(8), *[50] * 4], start=8)
    plant.insert([*seq(8), *[60] * 4], start=8)
    node = plant.node(seq(8))
    upper = plant.tree.split(node, 4)
    assert list(upper.children.values()) == [node]
    assert len(node.children) == 2 and all(child.parent is node for child in node.children.values())
    assert (upper.parts[0][0].kids, node.parts[0][0].kids) == (1, 2)
    plant.check()


def test_a_split_half_of_a_node_on_host_only_counts_kids_there() -> None:
    plant, node = planted()
    plant.evict(6, 0, 0)
    upper = plant.tree.split(node, 8)
    assert (upper.parts[0][0].kids, upper.parts[1][0].kids) == (0, 1)
    plant.check()
