"""Operations from submission to application: splits, time-outs, flushes, late completions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from banyan.cache import AllocateOutcome
from banyan.errors import CopyError
from banyan.lease import Lease
from banyan.tree import Tier, encode_tokens
from tests.support.rig import KINDS, Rig


def seq(n: int, stream: int = 1) -> list[int]:
    """n tokens of a stream."""
    return [stream * 1_000 + i for i in range(n)]


def free(rig: Rig) -> list[list[int]]:
    """Free slots by tier and component."""
    return [[pool.free_count for pool in pools] for pools in rig.cache.controller.allocators]


def all_free(rig: Rig) -> bool:
    """Whether every slot of both tiers is free."""
    pools = [pool for pools in rig.cache.controller.allocators for pool in pools]
    return all(pool.free_count == pool.capacity for pool in pools)


def loading(rig: Rig, tokens: list[int]) -> Lease:
    """A lease on tokens whose load-back runs."""
    rig.run(tokens)
    rig.evict_device()
    lease = rig.acquire(tokens)
    assert lease.loading is not None and lease.boundary == (len(tokens) - 1) // 4 * 4
    return lease


# ---- splits under an operation -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(4, 32, 4))
def test_a_split_under_a_backup_makes_both_halves_carry_it(kind: str, at: int) -> None:
    rig = Rig(kind)
    rig.run(seq(33), chunk=33, settle=False)
    other = rig.acquire([*seq(at), *seq(5, 2)])
    rig.check()
    rig.settle()
    rig.check()
    rig.cache.release(other)
    rig.evict_device()
    assert rig.hit(seq(32)) == (0, 32)
    lease = rig.acquire(seq(33))
    rig.read(lease, seq(33))
    rig.cache.release(lease)
    rig.settle()
    rig.check()


@pytest.mark.parametrize("kind", ["full", "full+window"])
@pytest.mark.parametrize("at", range(4, 32, 4))
def test_a_split_under_a_load_back_too(kind: str, at: int) -> None:
    rig = Rig(kind)
    lease = loading(rig, seq(33))
    tokens = [*seq(at), *seq(9, 2)]
    other = rig.acquire(tokens)
    assert rig.compute(other, tokens, len(tokens)) is AllocateOutcome.OK
    rig.commit(other, tokens)
    rig.check()
    rig.settle()
    rig.check()
    rig.read(lease, seq(33))
    assert rig.hit(seq(32)) == (32, 32)
    assert rig.hit(tokens[: at + 8]) == (at + 8, at + 8)
    for one in (lease, other):
        rig.cache.release(one)
    rig.settle()
    rig.check()


# ---- somebody else is faster ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_back_of_what_was_recomputed_meanwhile_gives_its_slots_back(kind: str) -> None:
    rig = Rig(kind)
    lease = loading(rig, seq(33))
    other = rig.run(seq(33), settle=False)
    assert other.boundary == 0, "it could not wait, and computed all of it"
    assert rig.hit(seq(32)) == (32, 32)
    rig.check()
    rig.settle()
    rig.check()
    overwrite_free_slots(rig)
    rig.read(lease, seq(33))
    assert rig.compute(lease, [*seq(33), 5], 34) is AllocateOutcome.OK
    rig.cache.release(lease)
    rig.settle()
    rig.evict_device()
    rig.cache.flush()
    assert all_free(rig)


def overwrite_free_slots(rig: Rig) -> None:
    """What somebody would do who was given them."""
    for pool, allocator in zip(rig.stack.device, rig.stack.device_slots, strict=True):
        slots = allocator.allocate(allocator.free_count)
        assert slots is not None and len(slots)
        pool.write_records(slots, np.full((len(slots), pool.record_bytes), 255, np.uint8))
        allocator.free(slots)


def test_a_commit_waits_for_the_load_back_that_it_builds_on() -> None:
    """Its bytes are there and were read, but an earlier load-back is applied first."""
    rig = Rig("full+window+state")
    for stream in (1, 2):
        rig.run(seq(17, stream))
    rig.evict_device()
    first, second = rig.acquire(seq(17)), rig.acquire(seq(25, 2))
    rig.engine.start(rig.engine.pending[0])
    assert rig.compute(second, seq(25, 2), 24) is AllocateOutcome.OK
    rig.commit(second, seq(25, 2))
    assert second.loading is not None and rig.cache.stats()["counts"]["commits_deferred"] == 1
    assert rig.hit(seq(24, 2)) == (0, 16)
    rig.check()
    rig.settle()
    assert second.loading is None
    rig.commit(second, seq(25, 2))
    assert rig.hit(seq(24, 2)) == (24, 24)
    for lease, stream in ((first, 1), (second, 2)):
        rig.read(lease, seq(25, stream))
        rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_a_backup_of_what_was_backed_up_meanwhile_gives_its_slots_back() -> None:
    rig = Rig("full+state")
    rig.run(seq(17), settle=False)
    (op,) = rig.engine.pending
    rig.engine.finish(op)
    node = next(n for n in rig.cache.tree.nodes() if n.end == 16)
    slots = rig.stack.host_slots[0].allocate(4)
    assert slots is not None
    rig.cache.tree.attach(node, 0, Tier.HOST, slots)
    rig.cache.poll()
    rig.check()
    assert node.parts[Tier.HOST][0].slots is slots and node.has(1, Tier.HOST)


# ---- time-outs -----------------------------------------------------------------------------------


def test_an_overdue_load_back_is_cancelled_and_its_request_recomputes() -> None:
    rig = Rig("full+window+state")
    lease = loading(rig, seq(33))
    before = free(rig)
    rig.now += 31
    rig.cache.poll()
    assert lease.broken and rig.cache.stats()["misses"] == {"timeout": 1, "load_failed": 1}
    with pytest.raises(CopyError):
        rig.compute(lease, seq(33), 33)
    rig.cache.release(lease)
    rig.cache.poll()
    assert not rig.cache.controller.operations, "it had not started"
    assert free(rig)[0] == [b + n for b, n in zip(before[0], [8, 2, 1], strict=True)]
    rig.check()
    assert rig.run(seq(33)).host_len == 32
    rig.check()


def test_a_copy_that_never_ends_keeps_its_slots_and_stops_nobody() -> None:
    rig = Rig("full+window+state")
    lease = loading(rig, seq(33))
    rig.engine.start(rig.engine.pending[0])
    rig.engine.hold = True
    rig.now += 31
    rig.cache.poll()
    assert lease.broken
    rig.cache.release(lease)
    for _ in range(3):
        rig.cache.poll()
    (op,) = rig.cache.controller.operations.values()
    assert op.abandoned
    rig.check()
    again = rig.run(seq(33), settle=False)
    assert again.boundary == 0 and again.length == 33, "it recomputes at once"
    assert rig.hit(seq(32))[0] == 32
    rig.check()


def test_bytes_that_come_late_are_good_bytes() -> None:
    """Given up is the waiting, not the data: sources and targets were pinned all the time."""
    rig = Rig("full+window+state")
    lease = loading(rig, seq(33))
    (op,) = rig.engine.pending
    rig.engine.start(op)
    rig.now += 31
    rig.cache.poll()
    rig.cache.release(lease)
    rig.engine.finish(op)
    rig.cache.poll()
    rig.check()
    assert rig.hit(seq(32)) == (32, 32)
    late = rig.acquire(seq(33))
    rig.read(late, seq(33))
    rig.cache.release(late)
    rig.check()


def test_what_follows_an_overdue_operation_is_applied() -> None:
    rig = Rig()
    rig.run(seq(9), settle=False)
    rig.engine.start(rig.engine.pending[0])
    rig.now += 20
    rig.run(seq(9, 2), settle=False)
    first, second = rig.engine.pending
    rig.engine.finish(second)
    rig.cache.poll()
    assert len(rig.cache.controller.operations) == 2, "it waits for its turn"
    rig.now += 11
    rig.cache.poll()
    rig.cache.poll()
    assert list(rig.cache.controller.operations) == [first], "only the one given up is passed over"
    assert rig.cache.match(encode_tokens(seq(9, 2))).boundary == 8
    rig.engine.finish(first)
    rig.cache.poll()
    assert not rig.cache.controller.operations
    rig.check()


def test_each_time_out_is_counted_once() -> None:
    rig = Rig()
    rig.run(seq(9), settle=False)
    rig.engine.start(rig.engine.pending[0])
    for _ in range(5):
        rig.now += 31
        rig.cache.poll()
    assert rig.cache.stats()["misses"] == {"timeout": 1}


# ---- flush and generations -----------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backup_of_an_old_generation_only_gives_back_its_slots(kind: str, started: bool) -> None:
    rig = Rig(kind)
    rig.run(seq(33), settle=False)
    for op in rig.engine.pending if started else ():
        rig.engine.start(op)
    rig.cache.flush()
    rig.check()
    assert rig.hit(seq(32)) == (0, 0)
    rig.settle()
    rig.check()
    assert rig.hit(seq(32)) == (0, 0) and all_free(rig)
    assert not rig.cache.tree.detached


@pytest.mark.parametrize("started", [False, True])
def test_a_flush_under_a_load_back_leaves_its_request_whole_or_broken(started: bool) -> None:
    rig = Rig("full+window+state")
    lease = loading(rig, seq(33))
    (op,) = rig.engine.pending
    if started:
        rig.engine.start(op)
    rig.cache.flush()
    rig.check()
    assert rig.hit(seq(32)) == (0, 0)
    if started:
        rig.engine.finish(op)
    rig.cache.poll()
    rig.check()
    assert lease.broken is not started
    if started:
        assert rig.compute(lease, seq(33), 33) is AllocateOutcome.OK, "it reads what it has"
        rig.commit(lease, seq(33))
    assert rig.hit(seq(32)) == (0, 0), "and publishes nothing more"
    rig.cache.release(lease)
    rig.check()
    assert all_free(rig)


def test_a_running_request_survives_a_flush_and_publishes_nothing_more() -> None:
    rig = Rig("full+window+state")
    lease = rig.acquire(seq(65))
    rig.compute(lease, seq(65), 16)
    rig.commit(lease, seq(65))
    rig.settle()
    rig.cache.flush()
    for stop in (32, 48, 64):
        assert rig.compute(lease, seq(65), stop) is AllocateOutcome.OK
        rig.commit(lease, seq(65))
        rig.check()
    assert rig.hit(seq(64)) == (0, 0)
    new = rig.run(seq(17))
    assert new.boundary == 0 and rig.hit(seq(16)) == (16, 16)
    rig.cache.release(lease)
    rig.check()
    assert rig.hit(seq(16)) == (16, 16)


def test_what_a_flush_left_behind_is_dropped_and_not_saved() -> None:
    """A request of before the flush lets go of its window: nobody can ask for that any more."""
    rig = Rig("full+window", device=[32, 6], host=[32, 32], write_policy="write_back")
    lease = rig.acquire(seq(40))
    rig.compute(lease, seq(40), 16)
    rig.commit(lease, seq(40))
    rig.cache.flush()
    for stop in (20, 24, 28, 32):
        assert rig.compute(lease, seq(40), stop) is AllocateOutcome.OK
    other = rig.acquire(seq(17, 2))
    assert rig.compute(other, seq(17, 2), 12) is AllocateOutcome.OK
    assert not rig.engine.submitted
    rig.check()
    for one in (lease, other):
        rig.cache.release(one)
    rig.check()


def test_a_flush_twice_and_at_idle_is_harmless() -> None:
    rig = Rig("full+window+state")
    rig.cache.flush()
    rig.run(seq(33))
    rig.cache.flush()
    rig.cache.flush()
    rig.check()
    assert all_free(rig)
    assert rig.run(seq(33)).boundary == 0
    assert rig.run(seq(33)).boundary == 32


def test_cleaning_ahead_skips_what_a_flush_cut_off() -> None:
    rig = Rig(device=[16], host=[32], write_policy="write_back")
    lease = rig.acquire(seq(61))
    rig.compute(lease, seq(61), 60)
    rig.commit(lease, seq(61))
    rig.cache.flush()
    rig.cache.release(lease)
    rig.cache.poll()
    assert not rig.engine.submitted and all_free(rig)


def test_closing_ends_what_runs() -> None:
    rig = Rig()
    rig.run(seq(33), settle=False)
    rig.cache.close()
    assert rig.engine.closed and not rig.engine.pending
    rig.cache.poll()
    rig.check()
    assert not rig.cache.controller.operations


# ---- any order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["fifo", "reverse", "random"])
def test_the_order_of_completion_makes_no_difference(kind: str, order: str) -> None:
    rig = Rig(kind)
    for stream in (1, 2, 3):
        rig.run([*seq(8), *seq(9, 10 + stream)], settle=False)
    rig.engine.finish_all(random.Random(5) if order == "random" else order)
    rig.cache.poll()
    rig.check()
    assert not rig.cache.controller.operations
    rig.evict_device()
    for stream in (1, 2, 3):
        tokens = [*seq(8), *seq(9, 10 + stream)]
        lease = rig.acquire(tokens)
        assert lease.boundary == 16
        rig.read(lease, tokens)
        rig.cache.release(lease)
        rig.settle()
    rig.check()
