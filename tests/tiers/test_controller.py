"""The controller: what is copied when, how it is pinned, and what becomes visible."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.cache import AllocateOutcome
from banyan.errors import CopyError
from banyan.tiers.controller import Shortage
from banyan.tiers.ops import CopyKind
from banyan.tree import Tier, encode_tokens
from tests.support.rig import KINDS, Rig


def seq(n: int, stream: int = 1) -> list[int]:
    """n tokens of a stream."""
    return [stream * 1_000 + i for i in range(n)]


def kinds_of(rig: Rig) -> list[str]:
    """The kinds of all jobs submitted so far."""
    return [job.kind.value for job in rig.engine.submitted]


def copied(rig: Rig, index: int = -1) -> list[int]:
    """Slots that a job copies, by component."""
    counts = [0] * len(rig.spec.components)
    for block in rig.engine.submitted[index].blocks:
        counts[block.component] += len(block.src)
    return counts


def evict_all(rig: Rig) -> None:
    """Evict all of the device, waiting for what is backed up first."""
    while True:
        index, pools = rig.cache.tree.device, rig.stack.device_slots
        asked = [pool.free_count + index.evictable[c] for c, pool in enumerate(pools)]
        got = rig.cache.controller.reserve(Tier.DEVICE, asked)
        if isinstance(got, list):
            return rig.cache.controller.free(Tier.DEVICE, got)
        rig.check()
        rig.settle()


# ---- write policies ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_write_through_copies_each_commit_once(kind: str) -> None:
    rig = Rig(kind)
    rig.run(seq(33), chunk=16)
    names = [c.name for c in rig.spec.components]
    total = np.sum([copied(rig, i) for i in range(len(rig.engine.submitted))], axis=0).tolist()
    assert total[0] == 8, "every whole page, once"
    if "window" in names:
        assert total[names.index("window")] >= 2
    assert rig.hit(seq(32)) == (32, 32)
    rig.evict_device()
    assert rig.hit(seq(32)) == (0, 32)
    before = len(rig.engine.submitted)
    rig.run(seq(33))
    assert kinds_of(rig)[before:] == ["load_back"], "nothing new, nothing backed up again"
    rig.check()


def test_selective_copies_on_the_second_use() -> None:
    rig = Rig("full+window+state", write_policy="write_through_selective")
    rig.run(seq(33), chunk=33)
    assert kinds_of(rig) == []
    rig.run(seq(33))
    assert kinds_of(rig) == ["backup"]
    rig.evict_device()
    assert rig.hit(seq(32)) == (0, 32)
    rig.check()


def test_selective_copies_the_shared_part_only() -> None:
    rig = Rig(write_policy="write_through_selective")
    rig.run(seq(33), chunk=33)
    rig.run([*seq(16), *seq(16, 2)])
    assert copied(rig) == [4]
    rig.evict_device()
    assert rig.hit(seq(32)) == (0, 16)


def test_write_back_copies_what_is_about_to_go() -> None:
    rig = Rig("full+window+state", device=[32, 20, 8], write_policy="write_back")
    rig.run(seq(65), chunk=16)
    assert kinds_of(rig) == [], "there is room"
    controller = rig.cache.controller
    free = [pool.free_count for pool in rig.stack.device_slots]
    assert controller.reserve(Tier.DEVICE, [free[0] + 1, 0, 0]) is Shortage.PENDING
    assert kinds_of(rig) == ["backup"] and rig.hit(seq(64)) == (64, 64)
    rig.check()
    rig.settle()
    got = controller.reserve(Tier.DEVICE, [free[0] + 1, 0, 0])
    assert isinstance(got, list)
    controller.free(Tier.DEVICE, got)
    assert rig.hit(seq(64)) == (48, 64), "on device the next state is that of 48"
    rig.check()


def test_write_back_cleans_ahead_of_need() -> None:
    rig = Rig(device=[16], host=[32], write_policy="write_back")
    rig.run(seq(33))
    assert kinds_of(rig) == []
    rig.run(seq(25, 2), settle=False)
    rig.cache.poll()
    assert rig.cache.stats()["tiers"]["device"]["full"]["free"] >= 1
    rig.run(seq(8, 3), settle=False)
    rig.cache.poll()
    assert "backup" in kinds_of(rig), "less than a tenth is free"
    rig.settle()
    lease = rig.acquire(seq(20, 4))
    assert rig.compute(lease, seq(20, 4), 16) is AllocateOutcome.OK, "and room is there at once"
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_write_back_drops_and_counts_what_finds_no_room_on_host() -> None:
    rig = Rig(device=[8], host=[2], write_policy="write_back")
    rig.run(seq(17))
    rig.run(seq(33, 2), chunk=4)
    stats = rig.cache.stats()
    assert stats["counts"]["lost_unsaved"] > 0 and stats["misses"]["host_full"] > 0
    assert stats["counts"]["dropped_pages"] > 0
    rig.check()


def test_write_back_keeps_nothing_dirty_that_a_demotion_would_lose() -> None:
    """A window or state that host lacks is backed up before its page is demoted."""
    rig = Rig("full+window+state", write_policy="write_back")
    rig.run(seq(33), chunk=16)
    evict_all(rig)
    assert rig.hit(seq(32)) == (0, 32)
    assert rig.cache.stats()["counts"]["lost_unsaved"] == 0
    rig.check()


def test_without_a_host_tier_nothing_is_copied() -> None:
    rig = Rig(host=[])
    rig.run(seq(33))
    rig.evict_device()
    assert rig.hit(seq(32)) == (0, 0) and kinds_of(rig) == []
    assert rig.cache.stats()["tiers"]["host"]["full"]["capacity"] == 0
    rig.check()


def test_the_none_policy_copies_nothing() -> None:
    rig = Rig(write_policy="none")
    rig.run(seq(33))
    rig.run(seq(33))
    assert kinds_of(rig) == []


# ---- what a backup covers ------------------------------------------------------------------------


def test_a_backup_copies_what_host_lacks_and_no_more() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(17), chunk=16)
    assert copied(rig) == [4, 4, 1] or copied(rig) == [4, 2, 1]
    rig.run(seq(33), chunk=16)
    assert copied(rig)[0] == 4 and copied(rig)[2] == 1
    rig.check()


def test_two_running_backups_do_not_copy_the_same_data() -> None:
    rig = Rig()
    lease = rig.acquire(seq(40))
    for stop in (16, 32):
        rig.compute(lease, seq(40), stop)
        rig.commit(lease, seq(40))
    assert [copied(rig, i) for i in range(2)] == [[4], [4]]
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_a_failed_backup_takes_its_descendants_with_it_and_both_are_retried() -> None:
    rig = Rig()
    lease = rig.acquire(seq(40))
    for stop in (16, 32):
        rig.compute(lease, seq(40), stop)
        rig.commit(lease, seq(40))
    first, second = rig.engine.pending
    rig.engine.finish(first, ok=False)
    rig.engine.finish(second)
    rig.cache.poll()
    rig.check()
    assert not any(node.has(0, Tier.HOST) for node in rig.cache.tree.nodes())
    assert rig.cache.stats()["copies"]["backup"]["reasons"] == {"copy_error": 1}
    rig.compute(lease, seq(40), 36)
    rig.commit(lease, seq(40))
    assert copied(rig) == [9], "the next commit covers the whole path"
    rig.cache.release(lease)
    rig.settle()
    rig.evict_device()
    assert rig.hit(seq(36)) == (0, 36)
    rig.check()


# ---- visibility and order ------------------------------------------------------------------------


def test_nothing_shows_before_its_completion_is_polled() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(17), settle=False)
    (op,) = rig.engine.pending
    assert not any(node.has(0, Tier.HOST) for node in rig.cache.tree.nodes())
    rig.engine.finish(op)
    assert not any(node.has(0, Tier.HOST) for node in rig.cache.tree.nodes())
    rig.cache.poll()
    assert all(node.has(0, Tier.HOST) for node in rig.cache.tree.nodes())
    rig.check()


def test_completions_of_a_kind_are_applied_in_the_order_of_submission() -> None:
    rig = Rig()
    for stream in (1, 2, 3):
        rig.run(seq(9, stream), settle=False)
    first, second, third = rig.engine.pending
    rig.engine.finish(third)
    rig.engine.finish(second)
    rig.cache.poll()
    assert len(rig.cache.controller.operations) == 3
    assert rig.cache.tree.host.evictable == [0] and rig.cache.tree.host.protected == [0]
    rig.engine.finish(first)
    rig.cache.poll()
    assert not rig.cache.controller.operations
    rig.check()


def test_a_load_back_does_not_wait_for_a_backup_submitted_before() -> None:
    rig = Rig()
    rig.run(seq(17))
    rig.evict_device()
    rig.run(seq(17, 2), settle=False)
    lease = rig.acquire(seq(17))
    backup, load = rig.engine.pending
    rig.engine.finish(load)
    rig.cache.poll()
    assert lease.loading is None and lease.ticket is None
    assert rig.cache.match(encode_tokens(seq(17))).device_boundary == 16
    rig.engine.finish(backup)
    rig.cache.release(lease)
    rig.settle()
    rig.check()


# ---- load-back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_back_brings_the_reach_and_no_more(kind: str) -> None:
    rig = Rig(kind)
    rig.run(seq(65), chunk=16)
    rig.evict_device()
    lease = rig.acquire(seq(65))
    assert (lease.device_len, lease.host_len, lease.boundary) == (0, 64, 64)
    names = [c.name for c in rig.spec.components]
    wanted = [{"full": 16, "window": 2, "state": 1}[name] for name in names]
    assert copied(rig) == wanted
    rig.read(lease, seq(65))
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_a_load_back_below_the_threshold_is_not_started() -> None:
    rig = Rig(threshold=20)
    rig.run(seq(17))
    rig.evict_device()
    lease = rig.acquire(seq(17))
    assert lease.boundary == 0 and kinds_of(rig).count("load_back") == 0
    assert rig.cache.stats()["misses"] == {"below_threshold": 1}
    rig.cache.release(lease)
    rig.run(seq(33))
    rig.evict_device()
    lease = rig.acquire(seq(33))
    assert lease.boundary == 32
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_a_load_back_that_finds_no_slots_is_a_miss() -> None:
    rig = Rig(device=[8], host=[32])
    rig.run(seq(29))
    rig.evict_device()
    other = rig.acquire(seq(24, 2))
    rig.compute(other, seq(24, 2), 24)
    before = [pool.free_count for pool in rig.stack.host_slots]
    lease = rig.acquire(seq(29))
    assert lease.boundary == 0 and rig.cache.stats()["misses"] == {"device_full": 1}
    assert [pool.free_count for pool in rig.stack.host_slots] == before
    rig.check()
    rig.cache.release(lease)
    rig.cache.release(other)
    rig.settle()
    rig.check()


def test_a_second_request_does_not_start_a_load_back_that_runs() -> None:
    rig = Rig()
    rig.run(seq(33))
    rig.evict_device()
    first = rig.acquire(seq(33))
    assert rig.cache.match(encode_tokens(seq(33))).loading
    second = rig.acquire(seq(33))
    assert second.boundary == 0 and kinds_of(rig).count("load_back") == 1
    assert rig.cache.stats()["misses"] == {"loading": 1}
    rig.settle()
    third = rig.acquire(seq(33))
    assert (third.device_len, third.host_len) == (32, 0)
    for lease in (first, second, third):
        rig.read(lease, seq(33))
        rig.cache.release(lease)
    rig.check()


def test_a_failed_load_back_breaks_its_lease_and_nothing_else() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(33))
    rig.evict_device()
    free = [pool.free_count for pool in rig.stack.device_slots]
    lease = rig.acquire(seq(33))
    (op,) = rig.engine.pending
    rig.engine.finish(op, ok=False, reason="lost")
    with pytest.raises(CopyError):
        rig.read(lease, seq(33))
    rig.cache.poll()
    assert lease.broken and [pool.free_count for pool in rig.stack.device_slots] == free
    rig.check()
    with pytest.raises(CopyError):
        rig.cache.allocate(lease, 33)
    rig.cache.release(lease)
    rig.check()
    again = rig.run(seq(33))
    assert again.host_len == 32, "the host copy is still good"
    stats = rig.cache.stats()
    assert stats["misses"] == {"load_failed": 1}
    assert stats["copies"]["load_back"]["reasons"] == {"lost": 1}


def test_a_checksum_that_differs_is_a_miss() -> None:
    rig = Rig("full+window+state", verify=True)
    rig.run(seq(33))
    rig.evict_device()
    rig.stack.host[2].data[:, 0] ^= 1
    lease = rig.acquire(seq(33))
    with pytest.raises(CopyError):
        rig.read(lease, seq(33))
    rig.cache.poll()
    assert lease.broken
    rig.cache.release(lease)
    stats = rig.cache.stats()["copies"]["load_back"]
    assert stats["mismatched"] == 1 and stats["reasons"] == {"checksum": 1}
    assert stats["verified"] > 1
    rig.check()


def test_released_while_loading_the_transfer_is_cancelled_or_kept() -> None:
    for started in (False, True):
        rig = Rig("full+window+state")
        rig.run(seq(33))
        rig.evict_device()
        lease = rig.acquire(seq(33))
        (op,) = rig.engine.pending
        if started:
            rig.engine.start(op)
        rig.cache.release(lease)
        rig.check()
        rig.settle()
        rig.check()
        assert rig.hit(seq(32)) == ((32 if started else 0), 32)
        assert not any(rig.cache.tree.host.protected)


# ---- what pays -----------------------------------------------------------------------------------


def weighing(copy_seconds: float, prefill_seconds: float) -> Rig:
    """A rig that has measured one load-back of 32 tokens and one prefill of 32 tokens."""
    rig = Rig()
    rig.cache.controller.options = type(rig.cache.options)(weigh_cost=True)
    rig.run(seq(33))
    rig.evict_device()
    lease = rig.acquire(seq(33))
    assert lease.host_len == 32, "without a measurement it is tried"
    rig.settle()
    rig.cache.release(lease)
    rig.cache.controller.totals[CopyKind.LOAD_BACK].seconds = copy_seconds
    rig.cache.note_prefill(32, prefill_seconds)
    rig.evict_device()
    return rig


def test_recomputing_is_preferred_where_it_is_faster() -> None:
    rig = weighing(copy_seconds=1.0, prefill_seconds=0.5)
    lease = rig.acquire(seq(33))
    assert lease.boundary == 0
    assert rig.cache.stats()["misses"] == {"cheaper_to_compute": 1}
    rig.cache.release(lease)


def test_loading_is_preferred_where_it_is_faster() -> None:
    rig = weighing(copy_seconds=0.5, prefill_seconds=1.0)
    lease = rig.acquire(seq(33))
    assert lease.host_len == 32
    rig.cache.release(lease)
    rig.settle()
    rig.check()


# ---- host eviction -------------------------------------------------------------------------------


def test_write_back_evicts_the_host_copies_of_data_on_device_first() -> None:
    rig = Rig(device=[8], host=[8], write_policy="write_back")
    for stream in (1, 2):
        rig.run(seq(16, stream))
        evict_all(rig)
    reader = rig.acquire(seq(17, 1))
    rig.settle()
    assert rig.hit(seq(16, 1)) == (16, 16) and rig.hit(seq(16, 2)) == (0, 16)
    rig.run(seq(16, 3))
    evict_all(rig)
    assert rig.hit(seq(16, 2)) == (0, 16), "the only copy stays, although it was used before"
    assert rig.hit(seq(16, 3)) == (0, 16)
    assert not reader.node.has(0, Tier.HOST), "its data is on device too"
    rig.cache.release(reader)
    rig.check()


def test_write_through_evicts_host_copies_by_last_use() -> None:
    """What leaves the device next has its only other copy there: that is not the first to go."""
    rig = Rig(device=[16], host=[8])
    for stream in (1, 2, 3):
        rig.run(seq(16, stream))
    assert [rig.hit(seq(16, stream))[0] for stream in (1, 2, 3)] == [16] * 3
    rig.evict_device()
    assert [rig.hit(seq(16, stream))[1] for stream in (1, 2, 3)] == [0, 16, 16]
    rig.check()


def test_host_full_of_locked_data_is_a_counted_miss() -> None:
    rig = Rig(device=[16], host=[4])
    rig.run(seq(17))
    rig.evict_device()
    rig.engine.hold = True
    lease = rig.acquire(seq(17))
    rig.run(seq(17, 2), settle=False)
    misses = rig.cache.stats()["misses"]
    assert misses["host_pending"] > 0, "the load-back that locks the host is still running"
    rig.check()
    rig.cache.release(lease)
    rig.engine.hold = False
    rig.settle()
    rig.check()


# ---- pending and full ----------------------------------------------------------------------------


def test_pending_while_a_transfer_runs_and_full_when_none_does() -> None:
    rig = Rig(device=[8], host=[16])
    lease = rig.acquire(seq(33))
    assert rig.compute(lease, seq(33), 32) is AllocateOutcome.OK
    other = rig.acquire(seq(9, 2))
    assert rig.cache.allocate(other, 8) is AllocateOutcome.FULL
    rig.commit(lease, seq(33))
    rig.cache.release(lease)
    assert rig.cache.allocate(other, 8) is AllocateOutcome.PENDING, "its backup keeps it there"
    rig.check()
    rig.settle()
    assert rig.cache.allocate(other, 8) is AllocateOutcome.OK
    rig.cache.release(other)
    rig.check()


def test_full_when_only_transfers_that_were_given_up_run() -> None:
    rig = Rig(device=[8], host=[16])
    rig.run(seq(33), settle=False)
    for op in rig.engine.pending:
        rig.engine.start(op)
    rig.now += 40
    rig.cache.poll()
    other = rig.acquire(seq(9, 2))
    assert rig.cache.allocate(other, 8) is AllocateOutcome.FULL
    assert rig.cache.stats()["misses"]["timeout"] > 0
    rig.cache.release(other)
    rig.settle()
    rig.check()
