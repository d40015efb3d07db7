"""Cases C001 to C022: locks, reference counts, tombstones."""

from __future__ import annotations

import pytest

from tests.cases.scene import (
    DEVICE,
    HOST,
    OK,
    A,
    B,
    C,
    demote,
    end,
    evict,
    evict_all,
    forget,
    free,
    held,
    index_of,
    insert,
    match,
    node_at,
    protected,
    start,
)
from tests.support.rig import Rig
from tests.tree.plant import Plant


def test_c001_a_component_skipped_at_acquire_is_not_released_later() -> None:
    rig = Rig("full+window")
    insert(rig, A[0:17])
    assert evict_all(rig, DEVICE, "window") == 4
    first = rig.acquire(A[0:17], device_only=True)
    second = rig.acquire(A[0:17])
    assert (first.boundary, second.host_len) == (0, 16)
    rig.settle()
    assert protected(rig, "window") == 8
    rig.cache.release(first)
    assert protected(rig, "window") == 8, "the second reader's window is still locked"
    assert evict(rig, S=16) is None and evict(rig, S=8) is None
    rig.read(second, A[0:17])
    end(rig, second)


def test_c001_a_lock_that_met_a_tombstone_is_undone_as_it_was_taken() -> None:
    plant = Plant("full+window")
    plant.insert(A[0:16], window_from=16)
    plant.lock("first", A[0:16])
    for node in plant.nodes():
        plant.tree.attach(node, 1, DEVICE, plant.fresh(1, len(node.edge) // 16))
    plant.lock("second", A[0:16])
    plant.unlock("first")
    plant.check()
    assert plant.tree.device.protected == [4, 2]
    plant.unlock("second")
    plant.check()


def test_c001_a_window_on_no_tier_is_not_loaded() -> None:
    rig = Rig("full+window")
    insert(rig, A[0:17])
    demote(rig)
    assert evict_all(rig, HOST, "window") > 0
    lease = rig.acquire(A[0:17])
    assert lease.boundary == 0 and not rig.engine.pending
    end(rig, lease)


def test_c002_making_room_for_a_state_takes_no_other_request_s_window() -> None:
    rig = Rig("full+window+state")
    insert(rig, A[0:65], cuts=[16, 32, 48, 64])
    first = rig.acquire(A[0:65])
    for stream in (B, C):
        insert(rig, stream[0:8])
    second = rig.acquire(A[0:65])
    assert free(rig)[2] == 0 and protected(rig, "state") == 1
    assert rig.compute(second, A[0:65], 65) is OK, "one state went for it"
    rig.cache.release(second)
    assert evict_all(rig, DEVICE, "window") > 0
    assert protected(rig, "window") == 8
    rig.read(first, A[0:65])
    end(rig, first)


@pytest.mark.parametrize("at", range(50, 65))
def test_c004_a_split_inside_a_locked_window_leaves_the_lock_whole(at: int) -> None:
    rig = Rig("full+window", page_size=1, device=[160, 160], host=[])
    insert(rig, A[0:65])
    reader = rig.acquire(A[0:65])
    assert protected(rig, "window") == 7
    tokens = [*A[0:at], *B[0:6]]
    other = start(rig, tokens)
    rig.read(reader, A[0:65])
    rig.cache.release(reader)
    rig.check()
    rig.cache.release(other)
    assert protected(rig, "window") == protected(rig, "full") == 0
    evict_all(rig, DEVICE, "window")
    assert free(rig)[1] == 160
    end(rig)


def test_c005_a_parent_is_demoted_only_when_it_is_on_host_and_its_child_stays() -> None:
    rig = Rig("full+state")
    insert(rig, A[0:33], cuts=[16, 32])
    assert evict(rig, F=16) is not None
    child = node_at(rig, A[0:32])
    assert not child.has(0, DEVICE) and child.has(0, HOST)
    evict_all(rig, DEVICE, "state")
    parent = node_at(rig, A[0:16])
    assert parent.has(0, DEVICE), "evicting states takes no full data"
    assert not rig.cache.tree.host.is_victim(parent, 0), "its child needs it on host"
    evict_all(rig, DEVICE, "full")
    assert parent.has(0, HOST) and match(rig, A[0:33]).boundary == 32
    lease = rig.acquire(A[0:33])
    rig.read(lease, A[0:33])
    end(rig, lease)


def test_c005_a_child_on_host_under_a_parent_that_is_not_cannot_be() -> None:
    """A backup covers the whole path: there is no way to have only the child's data on host."""
    rig = Rig("full+state", write_policy="none")
    insert(rig, A[0:33], cuts=[16, 32])
    assert rig.cache.controller.backup(node_at(rig, A[0:32]))
    (job,) = rig.engine.submitted
    assert [len(block.src) for block in job.blocks] == [8, 1]
    rig.settle()
    assert held(rig, HOST, "full") == [4, 8, 12, 16, 20, 24, 28, 32]
    end(rig)


def test_c007_a_running_request_pins_its_window_and_not_its_leaf() -> None:
    rig = Rig("full+window", device=[32, 18], host=[])
    first = start(rig, A[0:64])
    assert protected(rig, "window") <= 8 + 4
    second = start(rig, B[0:40])
    rig.read(first, A[0:64])
    end(rig, first, second)


def test_c008_a_use_refreshes_the_window_it_reads_and_not_its_ancestors() -> None:
    rig = Rig("full+window", device=[32, 18], host=[])
    insert(rig, A[0:64], cuts=range(8, 64, 8))
    for _ in range(10):
        reader = rig.acquire(A[0:65])
        rig.cache.release(reader)
    insert(rig, B[0:8])
    assert free(rig)[1] == 0
    assert evict(rig, S=8) is not None
    assert rig.hit(B[0:8]) == (8, 8) and rig.hit(A[0:64]) == (64, 64)
    assert not node_at(rig, A[0:8]).has(1, DEVICE), "the oldest ancestor went"
    end(rig)


def test_c010_a_victim_is_taken_outside_live_windows_first() -> None:
    rig = Rig("full+window", host=[])
    insert(rig, A[0:33], cuts=range(4, 33, 4))
    for gone in range(4, 25, 4):
        assert evict(rig, S=4) is not None
        assert rig.hit(A[0:32]) == (32, 32), "the trailing window is whole"
        assert held(rig, DEVICE, "window") == list(range(gone + 4, 33, 4))
    assert evict(rig, S=4) is not None
    assert rig.hit(A[0:32]) == (0, 0) and match(rig, A[0:33]).full_len == 32
    end(rig)


def test_c010_a_hole_in_the_trailing_window_gives_a_shorter_hit() -> None:
    rig = Rig("full+window", host=[])
    insert(rig, A[0:33], cuts=range(4, 33, 4))
    forget(rig, DEVICE, "window", A[0:28])
    assert rig.hit(A[0:32]) == (24, 24)
    end(rig)


def test_c011_boundaries_passed_by_a_prefill_stay_usable() -> None:
    rig = Rig("full+window")
    insert(rig, A[0:64], cuts=[16, 32, 48])
    lease = rig.acquire([*A[0:40], *B[0:8]])
    assert lease.boundary == 40
    end(rig, lease)


def test_c011_under_pressure_a_shorter_hit_says_where_a_checkpoint_is_missing() -> None:
    rig = Rig("full+window", device=[32, 6], host=[])
    insert(rig, A[0:64], cuts=[16, 32, 48])
    tokens = [*A[0:40], *B[0:8]]
    found = match(rig, tokens)
    assert rig.hit(A[0:64]) == (64, 64) and (found.boundary, found.full_len) == (0, 40)
    insert(rig, tokens, cuts=[16, 32, found.full_len])
    assert match(rig, [*A[0:40], *C[0:8]]).boundary == 40, "there is one from now on"
    end(rig)


def test_c013_a_window_tombstone_does_not_veto_the_full_leaf() -> None:
    rig = Rig("full+window", host=[])
    lease = rig.acquire(A[0:26])
    for stop in (8, 16, 24, 25):
        assert rig.compute(lease, A[0:26], stop) is OK
    rig.commit(lease, A[0:26])
    rig.check()
    assert held(rig, DEVICE, "full") == [4, 8, 12, 16, 20, 24]
    assert held(rig, DEVICE, "window") == [20, 24]
    rig.cache.release(lease)
    assert rig.hit(A[0:24]) == (24, 24)
    end(rig)


def test_c014_a_commit_asks_for_nothing_and_so_cannot_be_half_done() -> None:
    rig = Rig("full+window+state", device=[32, 16, 3], host=[])
    insert(rig, B[0:9], cuts=[8])
    reader = rig.acquire(B[0:9])
    lease = rig.acquire(A[0:33])
    assert rig.compute(lease, A[0:33], 16) is OK
    assert rig.compute(lease, A[0:33], 32) is OK
    assert free(rig)[2] == 0 and evict(rig, M=1) is None, "all states are in use or locked"
    rig.commit(lease, A[0:33])
    rig.check()
    assert rig.hit(A[0:32]) == (32, 32)
    rig.read(lease, A[0:33])
    assert rig.cache.allocate(lease, 33) is OK, "the slot of the older snapshot is used again"
    end(rig, lease, reader)


def test_c016_every_length_is_in_tokens_and_every_cut_in_pages() -> None:
    rig = Rig("full+window", host=[])
    lease = rig.acquire(A[0:66])
    for stop in (*range(8, 65, 8), 65):
        assert rig.compute(lease, A[0:66], stop) is OK
    assert lease.pages(1).first_page == 14, "the window of 64 begins at 56"
    rig.commit(lease, A[0:66])
    rig.check()
    for node in rig.cache.tree.nodes():
        assert 0 <= node.start < node.end <= 64 and node.end % 4 == node.start % 4 == 0
    rig.cache.release(lease)
    index = rig.cache.tree.device
    assert [f + e for f, e in zip(free(rig), index.evictable, strict=True)] == [32, 16]
    end(rig)


def test_c017_re_inserting_over_a_tombstone_frees_nobody_s_slot() -> None:
    rig = Rig("full+window", device=[32, 2], host=[])
    insert(rig, A[0:8])
    old = node_at(rig, A[0:8]).parts[DEVICE][1].slots
    assert old is not None
    taken = set(old.tolist())
    second = rig.acquire(B[0:9])
    assert rig.compute(second, B[0:9], 8) is OK, "its window evicts the other"
    assert set(second.pages(1).slots.tolist()) == taken
    third = rig.acquire(A[0:9])
    assert third.boundary == 0 and rig.compute(third, A[0:9], 4) is not OK
    rig.cache.release(third)
    rig.read(second, B[0:9])
    rig.cache.release(second)
    insert(rig, A[0:8])
    assert rig.hit(A[0:8]) == (8, 8)
    end(rig)


def test_c019_a_load_back_goes_to_the_best_boundary_of_all_components() -> None:
    rig = Rig("full+window+state")
    insert(rig, A[0:49], cuts=[24, 32, 40, 48])
    for at in (48, 40, 24):
        forget(rig, HOST, "state", A[0:at])
    for at in (48, 40):
        forget(rig, HOST, "window", A[0:at])
    demote(rig)
    tokens = [*A[0:48], *B[0:4]]
    lease = rig.acquire(tokens)
    assert (lease.device_len, lease.host_len) == (0, 32)
    rig.read(lease, tokens)
    assert rig.compute(lease, tokens, 48) is OK, "16 tokens are computed again"
    end(rig, lease)


def test_c020_the_totals_are_those_of_the_tokens_after_every_step() -> None:
    rig = Rig(page_size=1, host=[])
    index, abc = rig.cache.tree.device, A[0:3]

    def total() -> int:
        rig.check()
        assert index.evictable[0] >= 0 and index.protected[0] >= 0
        return index.evictable[0] + index.protected[0]

    one, other = [*abc, *B[0:4]], [*abc, *C[0:4]]
    insert(rig, one[:6])
    assert total() == 6
    lease = rig.acquire(one)
    assert (total(), index.protected[0]) == (6, 6)
    insert(rig, other[:6])
    assert (total(), index.protected[0]) == (9, 6)
    rig.cache.release(lease)
    assert (total(), index.protected[0]) == (9, 0)
    lease = rig.acquire(one)
    assert (total(), index.protected[0]) == (9, 6)
    assert evict_all(rig, DEVICE, "full") == 3
    assert total() == 6
    end(rig, lease)


def test_c022_decoding_evicts_what_each_component_lacks() -> None:
    rig = Rig("full+window", device=[64, 16], host=[])
    insert(rig, A[0:64], cuts=[16, 32, 48])
    assert free(rig) == [48, 0]
    lease = rig.acquire(B[0:17])
    assert rig.compute(lease, B[0:17], 16) is OK
    assert free(rig) == [44, 0], "full data was not evicted for it"
    assert held(rig, DEVICE, "full").count(64) == 1
    assert rig.cache.tree.device.evictable[index_of(rig, "window")] == 12
    end(rig, lease)
