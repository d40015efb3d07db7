"""Locks: exactly the reach of a boundary, undone exactly, whatever happened in between."""

from __future__ import annotations

import random

import pytest

from banyan.tree import Tier, encode_tokens
from tests.tree.plant import KINDS, Plant


def seq(n: int, stream: int = 1) -> list[int]:
    return [stream * 1_000 + i for i in range(n)]


def test_a_lock_protects_the_reach_and_no_more() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(64), states=[32, 64])
    plant.lock("reader", seq(64))
    assert plant.tree.device.protected == [16, 2, 1]
    assert plant.tree.device.evictable == [0, 14, 1]
    plant.check()
    plant.unlock("reader")
    assert plant.tree.device.protected == [0, 0, 0]
    assert plant.tree.device.evictable == [16, 16, 2]
    plant.check()


def test_a_lock_of_the_root_protects_nothing() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(16), states=[16])
    plant.lock("reader", [])
    assert plant.tree.device.protected == [0, 0, 0]
    plant.unlock("reader")
    plant.check()


def test_a_state_may_be_left_out() -> None:
    plant = Plant("full+state")
    plant.insert(seq(16), states=[16])
    node = plant.node(seq(16))
    plant.held["reader"] = (node, plant.tree.lock(node, states=False))
    assert plant.tree.device.protected == [4, 0]
    plant.check()
    plant.unlock("reader")
    plant.check()


def test_only_the_first_lock_of_a_branch_walks_it() -> None:
    """The walk up ends at the first ancestor that is locked already (INV-17)."""
    plant = Plant()
    for n in range(4, 404, 4):
        plant.insert(seq(n), start=n - 4)
    plant.lock("first", seq(400))
    for name in ("second", "third"):
        plant.lock(name, seq(400))
    plant.lock("other", seq(200))
    counts = [n.parts[0][0].locks for n in sorted(plant.nodes(), key=lambda n: n.end)]
    assert counts[-1] == 3, "three readers of the end"
    assert counts[49] == 2, "one reader of its own, and one locked child"
    assert set(counts) - {counts[-1], counts[49]} == {1}
    for name in list(plant.held):
        plant.unlock(name)
        plant.check()
    assert not any(n.parts[0][0].locks for n in plant.nodes())


def test_a_branch_shares_the_lock_of_its_stem() -> None:
    plant = Plant()
    plant.insert([*seq(8), *seq(8, 2)])
    plant.insert([*seq(8), *seq(8, 3)])
    plant.lock("left", [*seq(8), *seq(8, 2)])
    plant.lock("right", [*seq(8), *seq(8, 3)])
    stem = plant.node(seq(8))
    assert stem.parts[0][0].locks == 2
    plant.unlock("left")
    assert stem.parts[0][0].locks == 1
    assert plant.tree.device.protected == [4]
    plant.check()
    plant.unlock("right")
    plant.check()


def test_a_window_lock_splits_the_leaf_where_the_window_begins() -> None:
    plant = Plant("full+window")
    plant.insert(seq(64), window_from=0)
    assert [n.end for n in plant.nodes()] == [56, 64], "a commit ends an edge there already"
    plant.lock("reader", seq(48))
    assert sorted(n.end for n in plant.nodes()) == [40, 48, 56, 64]
    assert plant.tree.device.protected[1] == 2
    plant.check()


def test_a_window_lock_stops_at_a_tombstone_and_its_release_does_too() -> None:
    plant = Plant("full+window", window=16)
    for n in range(4, 20, 4):
        plant.insert(seq(n), start=n - 4)
    hole = plant.node(seq(8))
    plant.tree.device.remove(hole, 1)
    plant.lock("reader", seq(16))
    assert plant.tree.device.protected[1] == 2
    plant.tree.attach(hole, 1, Tier.DEVICE, plant.fresh(1, 1))
    plant.lock("other", seq(16))
    assert hole.parts[0][1].locks == 1, "taken by the second reader only"
    plant.unlock("reader")
    assert hole.parts[0][1].locks == 1, "and not given back by the first"
    plant.check()
    plant.unlock("other")
    plant.check()


def test_a_window_can_be_let_go_of_from_the_front() -> None:
    plant = Plant("full+window", window=16)
    for n in range(4, 36, 4):
        plant.insert(seq(n), start=n - 4)
    node = plant.lock("reader", seq(32))
    assert plant.tree.device.protected[1] == 4
    starts = plant.held["reader"][1]
    starts[1] = plant.tree.unlock_window(node, 1, starts[1], 24)
    assert plant.tree.device.protected[1] == 2 and starts[1] == 24
    plant.check()
    starts[1] = plant.tree.unlock_window(node, 1, starts[1], 32)
    assert plant.tree.device.protected[1] == 0 and starts[1] == 32
    plant.unlock("reader")
    plant.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_release_undoes_acquire_whatever_happens_in_between(kind: str, seed: int) -> None:
    r = random.Random(seed)
    plant = Plant(kind, page_size=2, window=r.choice((3, 6)))
    for step in range(200):
        tokens = [r.randrange(2) for _ in range(2 * r.randrange(1, 9))]
        match r.randrange(5):
            case 0 | 1:
                states = [len(tokens)] if plant.point else []
                plant.insert(tokens, window_from=2 * r.randrange(4), states=states)
            case 2:
                at = plant.match(tokens).device_boundary
                plant.lock(str(step), tokens[:at])
            case 3 if plant.held:
                plant.unlock(r.choice(list(plant.held)))
            case _:
                need = [r.randrange(1 + n) for n in plant.tree.device.evictable]
                assert plant.evict(*need) is not None
        plant.check()
    for name in list(plant.held):
        plant.unlock(name)
    plant.check()
    assert plant.tree.device.protected == [0] * plant.width
    assert plant.evict(*plant.tree.device.evictable) is not None
    assert not plant.nodes()


def test_locked_data_is_what_a_full_eviction_leaves() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(64), states=[32, 64])
    plant.insert(seq(64, 2), states=[64])
    plant.lock("reader", seq(32))
    assert plant.evict(*plant.tree.device.evictable) is not None
    match = plant.tree.match(encode_tokens(seq(64)))
    assert (match.device_boundary, match.full_len) == (32, 32)
    assert plant.tree.device.evictable == [0, 0, 0]
    assert plant.tree.device.protected == [8, 2, 1]
    plant.check()


def test_host_locks_keep_host_data() -> None:
    plant = Plant()
    plant.insert(seq(16))
    plant.mirror(seq(16))
    node = plant.node(seq(16))
    plant.tree.host.lock_path(node)
    assert plant.evict(1, tier=Tier.HOST) is None
    plant.tree.host.unlock_path(node)
    assert plant.evict(4, tier=Tier.HOST) is not None
    plant.check()
