"""Eviction: the exact shortfall or nothing, leaves first, tombstones, demotion, both tiers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from banyan.tree import Node, Tier
from tests.tree.plant import KINDS, Plant, count


def seq(n: int, stream: int = 1) -> list[int]:
    return [stream * 1_000 + i for i in range(n)]


# ---- how much ------------------------------------------------------------------------------------


@pytest.mark.parametrize("need", range(1, 17))
def test_the_last_victim_is_cut_to_size(need: int) -> None:
    plant = Plant()
    plant.insert(seq(24))
    plant.insert(seq(40, 2))
    assert count(plant.evict(need)) == [need]
    assert plant.tree.device.evictable == [16 - need]
    plant.check()


def test_nothing_goes_when_the_need_cannot_be_met() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(32), states=[32])
    before = plant.nodes()
    assert plant.evict(9) is None
    assert plant.evict(8, 9) is None
    assert plant.evict(1, 1, 2) is None
    assert plant.nodes() == before and plant.tree.device.evictable == [8, 8, 1]
    plant.check()


def test_what_is_locked_does_not_count_as_evictable() -> None:
    plant = Plant("full+window")
    plant.insert(seq(32))
    plant.lock("reader", seq(16))
    assert plant.evict(5) is None
    assert plant.evict(0, 7) is None
    assert count(plant.evict(4, 6)) == [4, 6]
    plant.check()


def test_full_pages_that_go_bring_their_windows_and_states() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(16), states=[16])
    assert count(plant.evict(1, 1, 1)) == [1, 1, 1]
    assert plant.tree.device.evictable == [3, 3, 0]
    plant.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_shortfall_of_every_component(kind: str, seed: int) -> None:
    r = random.Random(seed)
    plant = Plant(kind, page_size=2, window=5)
    for _ in range(120):
        tokens = [r.randrange(2) for _ in range(2 * r.randrange(1, 9))]
        states = [len(tokens)] if plant.point else []
        plant.tree.use(plant.insert(tokens, window_from=2 * r.randrange(3), states=states).node)
        before = plant.tree.device.evictable[:]
        need = [r.randrange(1 + n // 2) for n in before]
        got = count(plant.evict(*need))
        assert got[0] == need[0]
        assert all(g >= n for g, n in zip(got, need, strict=True))
        assert plant.tree.device.evictable == [b - g for b, g in zip(before, got, strict=True)]
        plant.check()


# ---- what goes -----------------------------------------------------------------------------------


def test_leaves_go_first_and_their_parent_follows() -> None:
    plant = Plant()
    plant.insert(seq(8))
    plant.insert([*seq(8), *seq(8, 2)], start=8)
    plant.insert([*seq(8), *seq(8, 3)], start=8)
    plant.use(seq(8))
    ends = []
    while plant.nodes():
        order = plant.victims()
        assert all(not n.children for n in order)
        ends.append(order[0].end)
        plant.evict(2)
        plant.check()
    assert ends == [16, 16, 8]


def test_a_parent_inherits_the_later_use_of_its_leaf() -> None:
    """A use of a leaf was a use of its path: the stem of a hot branch outlives a cold prompt."""
    plant = Plant()
    plant.insert(seq(8))
    leaf = [*seq(8), *seq(8, 2)]
    plant.insert(leaf, start=8)
    plant.insert(seq(8, 9))
    plant.use(leaf)
    plant.lock("reader", seq(8, 9))
    assert plant.evict(2) is not None
    assert plant.match(leaf).full_len == 8, "the leaf went, its stem is as late as it was"
    plant.unlock("reader")
    assert plant.evict(2) is not None
    assert (plant.match(leaf).full_len, plant.match(seq(8, 9)).full_len) == (8, 0)
    plant.check()


def test_windows_and_states_go_from_inner_nodes_and_leave_a_tombstone() -> None:
    plant = Plant("full+window+state")
    for n in (8, 16, 24):
        plant.insert(seq(n), start=n - 8, states=[n])
    freed = plant.evict(0, 6, 2)
    assert count(freed) == [0, 6, 2] and freed is not None and freed.tombstones > 0
    assert plant.tree.device.evictable == [6, 0, 1]
    tombstones = [n for n in plant.nodes() if not n.has(1, Tier.DEVICE)]
    assert len(tombstones) == 3
    for node in tombstones:
        assert node.parts[0][1].locks == 0 and not plant.tree.device.is_victim(node, 1)
    plant.check()


def test_a_window_is_cut_from_the_front() -> None:
    plant = Plant("full+window", window=17)
    plant.insert(seq(16))
    assert count(plant.evict(0, 1)) == [0, 1]
    top, rest = sorted(plant.nodes(), key=lambda n: n.end)
    assert (top.end, top.has(1, Tier.DEVICE), rest.has(1, Tier.DEVICE)) == (4, False, True)
    plant.check()


def test_the_window_that_was_not_used_goes_first() -> None:
    plant = Plant("full+window")
    for n in range(8, 72, 8):
        plant.insert(seq(n), start=n - 8)
    plant.tree.use(plant.insert(seq(8, 2)).node)
    for _ in range(10):
        plant.use(seq(64))
    assert plant.evict(0, 14) is not None
    assert plant.match(seq(64)).device_boundary == 64
    assert plant.match(seq(8, 2)).device_boundary == 8
    plant.check()


# ---- tiers ---------------------------------------------------------------------------------------


def test_a_leaf_with_a_host_copy_is_demoted_and_one_without_is_dropped() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(8), states=[8])
    plant.mirror(seq(8))
    plant.insert(seq(8, 2), states=[8])
    freed = plant.evict(4)
    assert freed is not None and (freed.demoted, freed.dropped) == (2, 2)
    (left,) = plant.nodes()
    assert [left.has(c, Tier.DEVICE) for c in range(3)] == [False] * 3
    assert [left.has(c, Tier.HOST) for c in range(3)] == [True] * 3
    assert count(freed) == [4, 4, 2]
    plant.check()


def test_host_copies_of_data_on_device_go_first() -> None:
    plant = Plant()
    for stream in (1, 2, 3):
        plant.insert(seq(8, stream))
        plant.mirror(seq(8, stream))
    plant.lock("reader", seq(8, 3))
    plant.use(seq(8, 2))
    plant.use(seq(8, 1))
    plant.lock("other", seq(8, 1))
    assert plant.evict(2) is not None  # demotes stream 2
    plant.unlock("reader")
    plant.unlock("other")
    gone = []
    for _ in range(3):
        order = plant.victims(0, Tier.HOST)
        assert plant.evict(2, tier=Tier.HOST) is not None
        gone.append(next(n for n in order if not n.has(0, Tier.HOST)).edge[0:4])
        plant.check()
    on_device = {np.int32(1_000).tobytes(), np.int32(3_000).tobytes()}
    assert set(gone[:2]) == on_device and gone[2] == np.int32(2_000).tobytes()


def test_a_demotion_sends_the_host_copy_to_the_back_and_a_load_back_to_the_front() -> None:
    plant = Plant()
    plant.insert(seq(8, 1))
    plant.mirror(seq(8, 1))
    plant.insert(seq(8, 2))
    plant.mirror(seq(8, 2))
    plant.use(seq(8, 2))
    plant.lock("keep", seq(8, 2))
    plant.evict(2)
    plant.unlock("keep")
    first, second = plant.victims(0, Tier.HOST)
    assert (first.has(0, Tier.DEVICE), second.has(0, Tier.DEVICE)) == (True, False)
    plant.tree.attach(second, 0, Tier.DEVICE, plant.fresh(0, 2))
    assert plant.victims(0, Tier.HOST) == [second, first]
    plant.check()
    assert plant.evict(2, tier=Tier.HOST) is not None
    assert not second.has(0, Tier.HOST) and first.has(0, Tier.HOST)


def test_host_data_of_a_node_on_device_goes_without_it() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(8), states=[8])
    plant.mirror(seq(8))
    freed = plant.evict(2, tier=Tier.HOST)
    assert count(freed, Tier.HOST) == [2, 0, 0] and freed is not None and not freed.dropped
    (node,) = plant.nodes()
    assert node.has(0, Tier.DEVICE) and node.has(1, Tier.HOST)
    plant.check()
    assert plant.evict(2) is not None
    assert not plant.nodes(), "without Full data on any tier it does not exist"
    plant.check()


def test_host_only_data_goes_leaf_first_and_takes_its_node() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(8), states=[8])
    plant.insert(seq(16), start=8, states=[16])
    plant.mirror(seq(16))
    plant.evict(4)
    freed = plant.evict(2, tier=Tier.HOST)
    assert count(freed, Tier.HOST) == [2, 2, 1] and freed is not None and freed.dropped == 2
    assert plant.match(seq(16)).boundary == 8
    plant.check()


@pytest.mark.parametrize("kind", ["full", "full+window", "full+window+state"])
def test_a_node_demoted_page_by_page_is_one_node_again(kind: str) -> None:
    plant = Plant(kind, window=300)
    states = [256] if plant.point else []
    plant.insert(seq(256), states=states)
    plant.mirror(seq(256))
    slots = [n.parts[Tier.HOST][0].slots for n in plant.nodes()]
    for left in range(63, -1, -1):
        assert count(plant.evict(1))[0] == 1
        assert len(plant.nodes()) <= 2 and plant.tree.device.evictable[0] == left
        assert plant.match(seq(256)).boundary == 256
        plant.check()
    (node,) = plant.nodes()
    assert np.array_equal(node.parts[Tier.HOST][0].slots, slots[0])  # type: ignore[arg-type]


def test_nodes_are_joined_only_where_nothing_tells_them_apart() -> None:
    plant = Plant("full+state")
    plant.insert(seq(32), states=[16, 32])
    plant.mirror(seq(32))
    plant.evict(8)
    assert sorted(n.end for n in plant.nodes()) == [16, 32], "there is a state between them"
    plant = Plant()
    plant.insert(seq(16))
    plant.insert([*seq(16), *seq(8, 2)], start=16)
    plant.insert([*seq(16), *seq(8, 3)], start=16)
    plant.mirror([*seq(16), *seq(8, 2)])
    plant.mirror([*seq(16), *seq(8, 3)])
    plant.evict(8)
    assert sorted(n.end for n in plant.nodes()) == [16, 24, 24], "two go on from there"
    plant = Plant()
    plant.insert(seq(32))
    plant.mirror(seq(32))
    locked = plant.node(seq(16))
    plant.tree.host.lock_path(locked)
    plant.evict(8)
    assert sorted(n.end for n in plant.nodes()) == [16, 32], "somebody holds the first"
    plant.tree.host.unlock_path(locked)
    plant.check()


# ---- sparing victims -----------------------------------------------------------------------------


def test_a_spared_victim_stays_and_counts_as_coming() -> None:
    plant = Plant()
    for stream in (1, 2, 3):
        plant.insert(seq(8, stream))
    spared: list[Node] = []

    def spare(node: Node, component: int) -> bool:
        if len(spared) == 1:
            return False
        spared.append(node)
        plant.tree.device.lock_path(node)
        return True

    freed = plant.tree.evict(Tier.DEVICE, [4], spare)
    assert count(freed) == [2]
    assert plant.match(seq(8, 1)).full_len == 8
    assert plant.match(seq(8, 2)).full_len == 0
    assert plant.match(seq(8, 3)).full_len == 8
    plant.tree.device.unlock_path(spared[0])
    plant.check()
    assert plant.victims()[0] is spared[0]


# ---- flush ---------------------------------------------------------------------------------------


def test_a_flush_frees_what_is_unlocked_and_cuts_off_the_rest() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(32), states=[16, 32])
    plant.mirror(seq(32))
    plant.insert(seq(8, 2))
    plant.lock("reader", seq(16))
    freed = plant.tree.flush()
    assert count(freed) == [8 - 4 + 2, 8 - 2 + 2, 1] and count(freed, Tier.HOST) == [8, 8, 2]
    assert plant.match(seq(32)).full_len == 0 and not plant.tree.roots
    assert plant.tree.device.protected == [4, 2, 1]
    plant.check()
    plant.insert(seq(32))
    assert plant.match(seq(32)).full_len == 32
    assert count(plant.tree.purge()) == [0, 0, 0]
    plant.check()
    plant.unlock("reader")
    assert count(plant.tree.purge()) == [4, 2, 1]
    assert not plant.tree.detached
    plant.check()


def test_after_a_flush_every_structure_is_that_of_a_new_tree() -> None:
    plant, new = Plant("full+window+state"), Plant("full+window+state")
    for stream in range(5):
        plant.insert(seq(24, stream), states=[24])
        plant.mirror(seq(24, stream))
    plant.tree.flush()
    assert not plant.nodes() and plant.tree.roots == new.tree.roots == {}
    assert not plant.tree.detached
    for index, fresh in zip(plant.tree.index, new.tree.index, strict=True):
        assert index.evictable == fresh.evictable and index.protected == fresh.protected
        assert all(index.pop(c) is None for c in range(3))
