"""Cases C023 to C041: leaks, double frees and aliasing."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.errors import PoolError
from banyan.pools.allocator import SlotAllocator
from tests.cases.scene import (
    DEVICE,
    FULL,
    HOST,
    OK,
    A,
    B,
    C,
    Stream,
    capacity,
    demote,
    end,
    evict,
    evict_all,
    free,
    held,
    insert,
    match,
    node_at,
    start,
)
from tests.support.rig import Rig


def test_c023_a_failed_admission_takes_no_state_slot() -> None:
    rig = Rig("full+state", device=[12, 2], host=[])
    first = start(rig, A[0:40])
    rig.check()
    before = free(rig)
    assert before[1] == 1
    for attempt in range(20):
        second = rig.acquire(A[0:17] if attempt % 2 else B[0:17])
        assert free(rig) == before, "neither a match nor a lease takes a state"
        if attempt % 4 < 2:  # the pages of A are there, so only a state is asked for
            assert rig.cache.allocate(second, 16) is (OK if attempt % 2 else FULL)
        rig.cache.release(second)
        assert free(rig) == before
        rig.check()
    end(rig, first)


def test_c026_a_flush_leaves_no_queue_and_no_counter() -> None:
    rig = Rig("full+window+state", host=[24, 16, 8])
    insert(rig, A[0:33], cuts=[16, 32])
    demote(rig)
    loading = rig.acquire(A[0:33])
    insert(rig, B[0:33], cuts=[16, 32], settle=False)
    assert len(rig.engine.pending) >= 2
    rig.engine.start(rig.engine.pending[0])
    rig.cache.flush()
    rig.check()
    rig.cache.release(loading)
    rig.engine.finish_all("reverse")
    rig.cache.poll()
    rig.check()
    assert free(rig, HOST) == capacity(rig, HOST) and free(rig) == capacity(rig)
    for pool in rig.stack.host_slots:
        slots = pool.allocate(pool.capacity)
        assert slots is not None and len(set(slots.tolist())) == pool.capacity
        pool.free(slots)
    stats = rig.cache.stats()
    assert stats["operations"] == stats["leases"] == 0
    insert(rig, A[0:33], cuts=[16, 32])
    demote(rig)
    assert rig.hit(A[0:32]) == (0, 32), "the tiers work as before"
    end(rig)


def test_c028_a_look_up_pins_nothing() -> None:
    rig = Rig("full+window+state")
    for number in range(12):
        tokens = Stream(10 + number)[0:33]
        insert(rig, tokens, cuts=[16, 32])
        for _ in range(5):
            assert match(rig, tokens).boundary == 32
        lease = rig.acquire(tokens)
        assert lease.ticket is None, "nothing to load"
        rig.cache.release(lease)
        assert not any(rig.cache.tree.device.protected) and not any(rig.cache.tree.host.protected)
    for tier in (DEVICE, HOST):
        for name in ("full", "window", "state"):
            evict_all(rig, tier, name)
    assert free(rig) == capacity(rig) and free(rig, HOST) == capacity(rig, HOST)


def test_c029_what_was_pinned_over_a_flush_comes_back_when_it_is_let_go() -> None:
    rig = Rig(device=[64], host=[16])
    insert(rig, A[0:33])
    insert(rig, B[0:33])
    assert free(rig, HOST) == [0]
    demote(rig)
    half = rig.acquire(A[0:33])
    rig.engine.hold = True
    insert(rig, C[0:17], settle=False)
    rig.check()
    rig.cache.flush()
    assert free(rig, HOST) != capacity(rig, HOST)
    rig.cache.release(half)
    rig.settle()
    slots = rig.stack.host_slots[0].allocate(16)
    assert slots is not None and len(slots) == 16
    rig.stack.host_slots[0].free(slots)
    rig.check()


def test_c031_a_load_that_is_called_off_gives_both_tiers_back() -> None:
    rig = Rig("full+window+state")
    insert(rig, A[0:33], cuts=[16, 32])
    demote(rig)
    before = (free(rig), free(rig, HOST), list(rig.cache.tree.host.evictable))
    lease = rig.acquire(A[0:33])
    assert lease.host_len == 32 and free(rig) != before[0]
    rig.cache.release(lease)
    rig.cache.poll()
    rig.check()
    assert (free(rig), free(rig, HOST), list(rig.cache.tree.host.evictable)) == before
    insert(rig, [*A[0:33], *B[0:16]], cuts=[32, 48])
    demote(rig)
    assert rig.hit([*A[0:33], *B[0:15]]) == (0, 48)
    end(rig)


def test_c032_evicting_one_leaf_of_host_evicts_one_leaf() -> None:
    rig = Rig(device=[32], host=[16])
    for number in range(8):
        insert(rig, Stream(10 + number)[0:8])
    demote(rig)
    assert free(rig, HOST) == [0]
    freed = evict(rig, HOST, F=8)
    assert freed is not None and freed.count(HOST, 0) == 2 and free(rig, HOST) == [2]
    hits = [rig.hit(Stream(10 + number)[0:8])[1] for number in range(8)]
    assert hits == [0] + [8] * 7
    end(rig)


def test_c034_slots_handed_out_are_the_caller_s_own() -> None:
    pool = SlotAllocator(32)
    x, y = pool.allocate(8), pool.allocate(8)
    assert x is not None and y is not None
    kept = x.copy()
    pool.free(y)
    z = pool.allocate(16)
    assert np.array_equal(x, kept) and z is not None
    assert not any(np.shares_memory(x, other) for other in (y, z, pool._stack))
    x[:] = -1
    assert pool.free_count == 8 and not pool.is_free()[kept].any()
    pool.free(kept[:1])
    with pytest.raises(PoolError, match="double free"):
        pool.free(kept[:1])


def test_c035_duplicates_are_freed_after_the_table_names_the_tree_s_slots() -> None:
    rig = Rig("full+window+state")
    first, second = start(rig, A[0:16], commit=False), start(rig, A[0:16], commit=False)
    rig.commit(first, A[0:16])
    rig.commit(second, A[0:16])
    rig.check()
    tree = [
        slot for node in rig.cache.tree.nodes() for slot in node.parts[DEVICE][0].slots.tolist()
    ]  # type: ignore[union-attr]
    assert sorted(second.pages(0).slots.tolist()) == sorted(tree)
    other = start(rig, B[0:16])
    tokens = A[0:16]
    for i in range(4):
        tokens.append(900 + i)
        assert rig.compute(second, tokens, len(tokens)) is OK
        rig.check()
    rig.read(second, tokens)
    end(rig, first, second, other)


def test_c038_a_checkpoint_of_a_running_request_is_not_evictable() -> None:
    rig = Rig("full+window+state", host=[])
    lease = rig.acquire(A[0:65])
    for stop in (16, 32, 48, 64):
        assert rig.compute(lease, A[0:65], stop) is OK
        rig.commit(lease, A[0:65])
        other = rig.acquire(B[0:33])
        rig.cache.allocate(other, 32)
        evict_all(rig, DEVICE, "full")
        rig.cache.release(other)
        rig.read(lease, A[0:65])
        assert held(rig, DEVICE, "full") == list(range(4, stop + 1, 4))
    end(rig, lease)


def test_c040_a_large_eviction_respects_every_reader() -> None:
    rig = Rig(device=[32], host=[64])
    for number in range(16):
        insert(rig, Stream(10 + number)[0:8])
    readers = [rig.acquire(Stream(10 + number)[0:9]) for number in range(8)]
    assert evict(rig, F=16 * 8) is None, "not so much is there to evict"
    assert evict(rig, F=8 * 8) is not None
    for number, reader in enumerate(readers):
        rig.read(reader, Stream(10 + number)[0:9])
    assert [rig.hit(Stream(10 + number)[0:8])[0] for number in range(16)] == [8] * 8 + [0] * 8
    end(rig, *readers)


def test_c041_what_a_commit_heals_is_not_freed_as_a_duplicate() -> None:
    rig = Rig("full+window", host=[])
    insert(rig, A[0:16])
    evict_all(rig, DEVICE, "window")
    lease = rig.acquire(A[0:17])
    assert lease.boundary == 0 and rig.compute(lease, A[0:17], 16) is OK
    mine = lease.pages(1).slots.tolist()
    before = free(rig)
    rig.commit(lease, A[0:17])
    assert free(rig) == before, "the pages were the tree's own, so there is no duplicate"
    nodes = sorted(rig.cache.tree.nodes(), key=lambda n: n.end)
    assert [s for n in nodes for s in n.parts[DEVICE][1].slots.tolist()] == mine  # type: ignore[union-attr]
    assert not rig.stack.device_slots[1].is_free()[mine].any()
    rig.read(lease, A[0:17])
    assert node_at(rig, A[0:16]).has(1, DEVICE)
    end(rig, lease)
