"""Cases C050 to C073: lifetime of backups and load-backs, and output after a restore."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.cache import PrefixCache
from banyan.errors import CopyError, PoolError
from banyan.pools.assembler import assemble
from banyan.pools.plan import SizePlan
from banyan.spec import CacheSpec
from banyan.tiers.controller import TierOptions
from banyan.tree import encode_tokens
from tests.cases.scene import (
    DEVICE,
    FULL,
    HOST,
    OK,
    PENDING,
    A,
    B,
    C,
    Stream,
    demote,
    end,
    evict,
    forget,
    free,
    held,
    insert,
    match,
    start,
)
from tests.support.manual_engine import ManualCopyEngine
from tests.support.rig import Rig
from tests.support.stacks import fill_device, hybrid_spec, indexed_spec, plan_of, stack_of


def demote_all(rig: Rig) -> None:
    """Evict the whole device under write-back, waiting for each backup."""
    for _ in range(10):
        pools, index = rig.stack.device_slots, rig.cache.tree.device
        asked = [pool.free_count + index.evictable[c] for c, pool in enumerate(pools)]
        got = rig.cache.controller.reserve(DEVICE, asked)
        if isinstance(got, list):
            return rig.cache.controller.free(DEVICE, got)
        rig.settle()
        rig.check()
    raise AssertionError("the device was not emptied")


# ---- lifetime ------------------------------------------------------------------------------------


def test_c050_the_source_of_a_load_back_stays_on_host() -> None:
    rig = Rig(device=[32], host=[8])
    insert(rig, A[0:16])
    demote(rig)
    insert(rig, C[0:16])
    demote(rig)
    reader = rig.acquire(A[0:17])
    assert reader.host_len == 16
    freed = evict(rig, HOST, F=16)
    assert freed is not None and rig.hit(C[0:16]) == (0, 0), "the other went"
    assert evict(rig, HOST, F=4) is None
    insert(rig, B[0:16], settle=False)
    assert len(rig.engine.pending) == 2
    rig.engine.finish_all("reverse")
    rig.cache.poll()
    rig.check()
    rig.read(reader, A[0:17])
    assert rig.hit(A[0:16]) == (16, 16)
    end(rig, reader)


def test_c052_a_victim_that_finds_no_host_memory_is_lost_and_counted() -> None:
    rig = Rig(device=[12], host=[4], write_policy="write_back")
    insert(rig, A[0:16])
    demote_all(rig)
    reader = rig.acquire(A[0:17])
    assert reader.host_len == 16 and free(rig, HOST) == [0]
    insert(rig, B[0:16], settle=False)
    other = rig.acquire(C[0:29])
    rig.check()
    outcome = rig.cache.allocate(other, 28)
    rig.check()
    assert outcome in (OK, FULL, PENDING)
    assert rig.cache.stats()["counts"]["lost_unsaved"] >= 1
    assert all(n.has(0, DEVICE) or n.has(0, HOST) for n in rig.cache.tree.nodes())
    end(rig, reader, other)


def test_c052_nothing_is_demoted_on_the_strength_of_a_backup_that_was_refused() -> None:
    rig = Rig("full+window+state", device=[12, 12, 4], host=[2, 2, 1], write_policy="write_back")
    insert(rig, A[0:33], cuts=[16, 32])
    for stream in (B, C):
        lease = rig.acquire(stream[0:33])
        for stop in (16, 32):
            while rig.compute(lease, stream[0:33], stop) is PENDING:
                rig.settle()
            rig.check()
        rig.cache.release(lease)
        rig.settle()
    counts = rig.cache.stats()["counts"]
    assert counts["dropped_pages"] > 0 and counts["lost_unsaved"] > 0
    assert all(n.has(0, DEVICE) or n.has(0, HOST) for n in rig.cache.tree.nodes())
    end(rig)


def test_c053_write_back_saves_the_window_with_the_pages() -> None:
    rig = Rig("full+window", write_policy="write_back", host=[64, 32])
    lease = rig.acquire(A[0:34])
    for stop in (8, 16, 24, 32, 33):
        assert rig.compute(lease, A[0:34], stop) is OK
    rig.commit(lease, A[0:34])
    rig.cache.release(lease)
    assert held(rig, DEVICE, "window") == [28, 32]
    demote_all(rig)
    assert held(rig, HOST, "window") == [28, 32]
    reader = rig.acquire(A[0:33])
    assert reader.host_len == 32
    rig.read(reader, A[0:33])
    end(rig, reader)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_c055_a_demoted_node_keeps_its_state_on_host(write_policy: str) -> None:
    rig = Rig("full+state", device=[40, 6], host=[160, 16], write_policy=write_policy)
    suffixes = [Stream(10 + i)[0:40] for i in range(9)]

    def play() -> list[tuple[int, int]]:
        hits = []
        for suffix in suffixes:
            tokens = [*A[0:48], *suffix, 1]
            lease = start(rig, tokens, cuts=[48, 88])
            hits.append((lease.device_len, lease.host_len))
            rig.cache.release(lease)
            rig.settle()
        return hits

    assert all(device == 48 for device, _ in play()[1:]), "the shared prefix"
    hits = play()
    assert sum(host for _, host in hits) > 0
    assert sum(device + host == 88 for device, host in hits) >= 5, hits
    for node in rig.cache.tree.nodes():
        if node.end == 88 and not node.has(0, DEVICE):
            assert node.has(1, HOST)
    end(rig)


def test_c056_a_state_that_comes_after_the_backup_of_its_pages_is_backed_up_too() -> None:
    rig = Rig("full+state")
    insert(rig, A[0:34])
    assert held(rig, HOST, "full")[-1] == 32 and held(rig, HOST, "state") == []
    insert(rig, A[0:33], cuts=[32])
    (block,) = rig.engine.submitted[-1].blocks
    assert (block.component, len(block.src)) == (1, 1), "only the state was missing"
    demote(rig)
    reader = rig.acquire(A[0:33])
    assert reader.host_len == 32
    rig.read(reader, A[0:33])
    end(rig, reader)


def test_c058_host_copies_of_what_is_on_device_make_room() -> None:
    rig = Rig(device=[32], host=[16])
    for number in range(3):
        insert(rig, Stream(10 + number)[0:40])
    assert free(rig) == [2] and free(rig, HOST)[0] <= 6
    got = rig.cache.controller.reserve(HOST, [16])
    assert isinstance(got, list), "all of host is mirrors"
    rig.cache.controller.free(HOST, got)
    assert [rig.hit(Stream(10 + n)[0:40])[0] for n in range(3)] == [40] * 3
    end(rig)


def test_c059_the_shortfall_is_evicted_and_not_the_whole_request() -> None:
    rig = Rig(device=[32], host=[24])
    for number in range(4):
        insert(rig, Stream(10 + number)[0:16])
    demote(rig)
    assert free(rig, HOST) == [8]
    controller = rig.cache.controller
    got = controller.reserve(HOST, [8])
    assert isinstance(got, list) and len(held(rig, HOST, "full")) == 16
    controller.free(HOST, got)
    got = controller.reserve(HOST, [12])
    assert isinstance(got, list) and len(held(rig, HOST, "full")) == 12, "16 tokens, not 48"
    controller.free(HOST, got)
    end(rig)


# ---- nothing forgotten ---------------------------------------------------------------------------


def round_trip(spec: CacheSpec) -> None:
    """Device to host to device, overwritten in between; every buffer compared by name."""
    stack = stack_of(spec, device=16, host=16)
    engine = ManualCopyEngine(stack)
    cache = PrefixCache(stack, engine, TierOptions(weigh_cost=False, verify=True))
    key = encode_tokens(A[0:33])

    def settle() -> None:
        while cache.controller.operations:
            engine.finish_all()
            cache.poll()

    lease = cache.acquire(cache.match(key))
    cache.allocate(lease, 32)
    fill_device(stack, seed=3)
    cache.advance(lease, 32)
    cache.commit(lease, key)

    def reach() -> dict[tuple[int, str], np.ndarray]:
        """Every buffer's bytes of the boundary's reach, by (layer, name)."""
        out = {}
        for pool, table, part in zip(stack.device, lease.tables, spec.components, strict=True):
            at = part.reach.first_needed(32, spec.page_size) // spec.page_size
            slots = table.slots[at - table.first_page :] if part.reach.page_shaped else [table.read]  # type: ignore[union-attr]
            for where, buffer in pool.buffers.items():
                out[where] = buffer[np.array(slots, np.int64)].float().numpy().copy()
        return out

    want = reach()
    cache.release(lease)
    settle()
    cache.controller.free(DEVICE, cache.controller.reserve(DEVICE, [16] * len(spec.components)))  # type: ignore[arg-type]
    fill_device(stack, seed=4)
    lease = cache.acquire(cache.match(key))
    assert lease.host_len == 32
    settle()
    got = reach()
    assert got.keys() == {(b.layer, b.name) for c in spec.components for b in c.buffers}
    for where, values in want.items():
        assert np.array_equal(got[where], values, equal_nan=True), where
    cache.release(lease)
    cache.check()
    assert cache.stats()["copies"]["load_back"]["mismatched"] == 0


def test_c064_index_and_draft_buffers_travel_with_their_slots() -> None:
    round_trip(indexed_spec())


def test_c064_a_tier_that_lacks_a_component_is_refused_at_start() -> None:
    spec = hybrid_spec()
    whole = plan_of(spec, device=4, host=4)
    part = SizePlan(whole.device, whole.host[:2], whole.reaches, spec.page_size, "full")
    with pytest.raises(PoolError, match="host plan"):
        assemble(spec, part)


def test_c065_every_tensor_of_a_state_is_in_its_record() -> None:
    spec = hybrid_spec()
    names = {buffer.name for buffer in spec.components[2].buffers}
    assert names == {"conv", "recurrent", "extra"}
    round_trip(spec)


def test_c067_a_device_slot_is_not_used_again_while_it_is_read() -> None:
    rig = Rig("full+window+state", device=[8, 8, 2])
    lease = start(rig, A[0:16], cuts=[16])
    rig.cache.release(lease)
    (op,) = rig.engine.pending
    rig.engine.start(op)
    reading = {c: set(b.src.tolist()) for c, b in enumerate(rig.engine.submitted[0].blocks)}
    other = rig.acquire(B[0:33])
    assert rig.cache.allocate(other, 32) is PENDING
    assert rig.cache.allocate(other, 16) is OK
    assert not reading[0] & set(other.pages(0).slots.tolist())
    rig.write(other, B[0:33], 0, 16)
    rig.engine.finish(op)
    rig.cache.poll()
    rig.cache.release(other)
    demote(rig)
    reader = rig.acquire(A[0:17])
    assert reader.host_len == 16
    rig.read(reader, A[0:17])
    end(rig, reader)


def test_c070_a_request_preempted_while_its_pages_are_saved() -> None:
    rig = Rig("full+window+state", device=[13, 12, 4])
    lease = start(rig, A[0:33], cuts=[16, 32])
    rig.cache.release(lease)
    assert rig.engine.pending
    other = rig.acquire(B[0:17])
    assert rig.compute(other, B[0:17], 16) is OK
    rig.check()
    again = rig.acquire(A[0:33])
    assert again.device_len == 32, "its pages were pinned by the transfer"
    rig.settle()
    assert not rig.cache.controller.operations
    rig.read(again, A[0:33])
    assert rig.compute(again, A[0:33], 33) is OK
    end(rig, other, again)


def test_c071_the_position_moves_to_what_every_component_has() -> None:
    rig = Rig("full+state")
    insert(rig, A[0:49], cuts=[16, 48])
    forget(rig, HOST, "state", A[0:48])
    demote(rig)
    tokens = [*A[0:48], *B[0:4]]
    assert match(rig, tokens).full_len == 48
    lease = rig.acquire(tokens)
    assert (lease.boundary, lease.length) == (16, 16)
    rig.read(lease, tokens)
    end(rig, lease)


@pytest.mark.parametrize("kind", ["full", "full+window+state"])
def test_c073_a_failed_transfer_serves_no_hit(kind: str) -> None:
    rig = Rig(kind)
    insert(rig, A[0:17], cuts=[16], settle=False)
    rig.settle(ok=False)
    assert held(rig, HOST, "full") == []
    demote(rig)
    assert rig.hit(A[0:16]) == (0, 0), "a failed backup is not found"
    insert(rig, A[0:17], cuts=[16])
    demote(rig)
    before = free(rig)
    lease = rig.acquire(A[0:17])
    (op,) = rig.engine.pending
    rig.engine.finish(op, ok=False)
    with pytest.raises(CopyError):
        rig.read(lease, A[0:17])
    rig.cache.poll()
    with pytest.raises(CopyError):
        rig.cache.allocate(lease, 17)
    rig.cache.release(lease)
    assert free(rig) == before and held(rig, DEVICE, "full") == []
    assert rig.cache.stats()["misses"]["load_failed"] == 1
    retry = rig.acquire(A[0:17], device_only=True)
    assert retry.boundary == 0 and rig.compute(retry, A[0:17], 17) is OK
    end(rig, retry)


def test_c107_a_transfer_that_never_ends_and_one_that_does_not_pay() -> None:
    rig = Rig("full+state")
    insert(rig, A[0:33], cuts=[32])
    demote(rig)
    lease = rig.acquire(A[0:33])
    rig.engine.start(rig.engine.pending[0])
    rig.engine.hold = True
    rig.now += 31
    rig.cache.poll()
    assert lease.broken
    rig.cache.release(lease)
    lease = start(rig, A[0:33], cuts=[32])
    assert lease.boundary == 0, "recomputed at once, although the transfer still runs"
    rig.cache.release(lease)
    rig.engine.hold = False
    rig.settle()
    rig.check()
    slow = Rig()
    slow.cache.controller.options = TierOptions(weigh_cost=True)
    insert(slow, A[0:33])
    demote(slow)
    end_of = slow.acquire(A[0:33])
    slow.settle()
    slow.cache.release(end_of)
    slow.cache.controller.totals[slow.engine.submitted[-1].kind].seconds = 10.0
    slow.cache.note_prefill(32, 0.1)
    demote(slow)
    lease = slow.acquire(A[0:33])
    assert lease.boundary == 0
    assert slow.cache.stats()["misses"] == {"cheaper_to_compute": 1}
    end(slow, lease)
