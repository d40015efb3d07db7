"""The pure byte movers: every dtype and shape, scattered slots, and the digests of both tiers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.errors import PoolError
from banyan.pools.assembler import PoolStack
from banyan.spec import CacheSpec
from banyan.tiers import moves, staging, verify
from banyan.tiers.moves import Pairing, StackMover
from banyan.tiers.ops import CopyBlock, CopyJob, CopyKind, OpId, Slots
from tests.support.stacks import (
    byteless_spec,
    device_records,
    every_dtype_spec,
    fill_device,
    hybrid_spec,
    indexed_spec,
    slots,
    stack_of,
)

torch.set_num_threads(1)

SPECS = {
    "hybrid-1": hybrid_spec(1),
    "hybrid-3-bf16": hybrid_spec(3, "bfloat16"),
    "hybrid-16-f16": hybrid_spec(16, "float16"),
    "hybrid-64": hybrid_spec(64),
    "hybrid-f64": hybrid_spec(2, "float64"),
    "indexed": indexed_spec(),
    "every-dtype": every_dtype_spec(),
    "byteless": byteless_spec(),
}
PAIRS = {
    "one": (slots(3), slots(9)),
    "run": (slots(2, 3, 4, 5), slots(8, 9, 10, 11)),
    "scattered": (slots(7, 0, 5, 2, 9), slots(1, 14, 3, 8, 0)),
    "to-a-run": (slots(7, 0, 5, 2, 9), slots(4, 5, 6, 7, 8)),
    "from-a-run": (slots(4, 5, 6, 7, 8), slots(15, 0, 5, 2, 9)),
    "two-runs": (slots(0, 1, 2, 6, 7), slots(3, 4, 5, 0, 1)),
    "descending": (slots(6, 5, 4, 3), slots(0, 1, 2, 3)),
    "none": (slots(), slots()),
}


def job(
    stack: PoolStack, kind: CopyKind, src: Slots, dst: Slots, *, check: bool = False
) -> CopyJob:
    blocks = tuple(CopyBlock(c, src, dst) for c in range(len(stack.spec.components)))
    return CopyJob(OpId(1), kind, blocks, verify=check)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize(("device", "host"), PAIRS.values(), ids=PAIRS.keys())
def test_a_round_trip_gives_every_byte_back(spec: CacheSpec, device: Slots, host: Slots) -> None:
    """C064, C065: all buffers of a slot travel, and no byte of another slot changes."""
    stack = stack_of(spec)
    mover = StackMover(stack)
    before = fill_device(stack)
    mover.backup(job(stack, CopyKind.BACKUP, device, host))
    for pool, records in zip(stack.host, before, strict=True):
        untouched = np.setdiff1d(np.arange(pool.slots), host)
        assert (pool.data.numpy()[host] == records[device]).all()
        assert not pool.data.numpy()[untouched].any()
    noise = fill_device(stack, seed=1)
    landing = device[::-1].copy()
    layers: list[int] = []
    load = job(stack, CopyKind.LOAD_BACK, host, landing)
    mover.load_back(load, layers.append)
    assert tuple(layers) == moves.job_layers(stack, load)
    for after, old, kept in zip(device_records(stack), before, noise, strict=True):
        expected = kept.copy()
        expected[landing] = old[device]
        assert (after == expected).all()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([8, 10_000_000]))
def test_both_ways_of_moving_agree(data: st.DataObject, threshold: int) -> None:
    """Runs in strided calls, or slots by index: whichever is chosen, the bytes are the same."""
    stack = stack_of(hybrid_spec(2, "bfloat16"), device=30, host=30)
    count = data.draw(st.integers(0, 30))
    device = np.array(data.draw(st.permutations(range(30)))[:count], np.int32)
    host = np.array(data.draw(st.permutations(range(30)))[:count], np.int32)
    if data.draw(st.booleans()):
        host.sort()
    records = fill_device(stack)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "_RUN_BYTES", threshold)
        StackMover(stack).backup(job(stack, CopyKind.BACKUP, device, host))
        for pool, wanted in zip(stack.host, records, strict=True):
            assert (pool.data.numpy()[host] == wanted[device]).all()
        fill_device(stack, seed=2)
        StackMover(stack).load_back(
            job(stack, CopyKind.LOAD_BACK, host, device), lambda layer: None
        )
    for found, wanted in zip(device_records(stack), records, strict=True):
        assert (found[device] == wanted[device]).all()


def test_blocks_of_one_component_become_one_pairing() -> None:
    """A path of several nodes is one run where its slots are."""
    stack = stack_of(hybrid_spec())
    records = fill_device(stack)
    blocks = (CopyBlock(0, slots(1, 2), slots(5, 6)), CopyBlock(0, slots(3, 9), slots(7, 0)))
    path = CopyJob(OpId(1), CopyKind.BACKUP, (*blocks, CopyBlock(1, slots(), slots())))
    mover = StackMover(stack)
    ((_, pairing),) = mover._pairs(path)
    assert pairing.runs == ((1, 5, 3), (9, 0, 1))
    mover.backup(path)
    assert (stack.host[0].data.numpy()[[5, 6, 7, 0]] == records[0][[1, 2, 3, 9]]).all()


def test_runs_must_go_on_on_both_sides() -> None:
    pairing = Pairing.of(slots(0, 1, 2, 3), slots(4, 5, 9, 10))
    assert pairing.runs == ((0, 4, 2), (2, 9, 2))
    assert pairing.take == slice(0, 4)
    assert isinstance(pairing.put, np.ndarray)
    assert Pairing.of(slots(), slots()).runs == ()
    assert Pairing.of(slots(6), slots(2)).runs == ((6, 2, 1),)
    assert Pairing.of(slots(3, 2, 1), slots(1, 2, 3)).runs == ((3, 1, 1), (2, 2, 1), (1, 3, 1))


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (CopyBlock(0, slots(12), slots(0)), "device slots outside 0..11"),
        (CopyBlock(0, slots(0), slots(16)), "host slots outside 0..15"),
        (CopyBlock(0, slots(-1), slots(0)), "device slots outside"),
        (CopyBlock(0, slots(0, 1), slots(0)), "2 slots to 1"),
        (CopyBlock(3, slots(0), slots(0)), "no host pool for component 3"),
        (CopyBlock(-1, slots(0), slots(0)), "no host pool for component -1"),
    ],
)
def test_slots_outside_the_pools_move_nothing(block: CopyBlock, why: str) -> None:
    stack = stack_of(hybrid_spec())
    fill_device(stack)
    good = CopyBlock(1, slots(0), slots(0))
    with pytest.raises(PoolError, match=why):
        StackMover(stack).backup(CopyJob(OpId(1), CopyKind.BACKUP, (good, block)))
    assert not any(pool.data.any() for pool in stack.host)


# ---- verification --------------------------------------------------------------------------------


def test_a_verified_backup_keeps_the_digest_of_the_device_bytes() -> None:
    stack = stack_of(hybrid_spec())
    records = fill_device(stack)
    verdict = StackMover(stack).backup(
        job(stack, CopyKind.BACKUP, slots(4, 1), slots(0, 7), check=True)
    )
    assert verdict == verify.Verdict(verified=6, mismatched=0)
    for pool, written in zip(stack.host, records, strict=True):
        assert pool.digests[7] == hashlib.sha256(written[1].tobytes()).digest()
        assert [i for i, d in enumerate(pool.digests) if d is not None] == [0, 7]


def test_an_unverified_backup_forgets_the_old_digest() -> None:
    stack = stack_of(hybrid_spec())
    fill_device(stack)
    mover = StackMover(stack)
    mover.backup(job(stack, CopyKind.BACKUP, slots(4, 1), slots(0, 7), check=True))
    mover.backup(job(stack, CopyKind.BACKUP, slots(2), slots(7)))
    assert stack.host[0].digests[7] is None
    assert stack.host[0].digests[0] is not None


@pytest.mark.parametrize("component", [0, 1, 2])
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_flipped_bit_on_host_is_caught(component: int, place: str) -> None:
    stack = stack_of(hybrid_spec())
    fill_device(stack)
    mover = StackMover(stack)
    mover.backup(job(stack, CopyKind.BACKUP, slots(4, 1, 2), slots(0, 7, 3), check=True))
    stack.host[component].data[7, 0 if place == "first" else -1] ^= 1
    load = job(stack, CopyKind.LOAD_BACK, slots(0, 7, 3), slots(8, 9, 10), check=True)
    verdict = mover.load_back(load, lambda layer: None)
    assert verdict == verify.Verdict(verified=9, mismatched=1)


@pytest.mark.parametrize("component", [0, 1, 2])
def test_a_byte_that_changes_during_a_backup_is_caught(
    component: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C067: the digest is taken before the copy, so a write under it shows."""
    stack = stack_of(hybrid_spec())
    fill_device(stack)
    mover = StackMover(stack)
    move = moves.PoolMover.backup

    def write_under_it(self: moves.PoolMover, pairing: Pairing) -> None:
        for buffer in stack.device[component].buffers.values():
            buffer[4].view(-1).view(torch.uint8)[0] ^= 1
        move(self, pairing)

    monkeypatch.setattr(moves.PoolMover, "backup", write_under_it)
    blocks = (CopyBlock(component, slots(4, 1), slots(0, 7)),)
    verdict = mover.backup(CopyJob(OpId(1), CopyKind.BACKUP, blocks, verify=True))
    assert verdict == verify.Verdict(verified=2, mismatched=1)
    assert stack.host[component].digests[0] is None
    assert stack.host[component].digests[7] is not None


def test_a_record_without_a_digest_is_compared_with_its_host_bytes() -> None:
    stack = stack_of(hybrid_spec())
    fill_device(stack)
    mover = StackMover(stack)
    mover.backup(job(stack, CopyKind.BACKUP, slots(4, 1), slots(0, 7)))
    load = job(stack, CopyKind.LOAD_BACK, slots(0, 7), slots(8, 9), check=True)
    assert mover.load_back(load, lambda layer: None) == verify.Verdict(6, 0)


def test_hashing_in_parts_equals_hashing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of(hybrid_spec())
    fill_device(stack)
    order = slots(*range(11, -1, -1))
    at_once = verify.device_digests(stack.device[0], order)
    monkeypatch.setattr(verify, "_HASH_BYTES", 3 * stack.device[0].record_bytes)
    assert verify.device_digests(stack.device[0], order) == at_once
    assert len(set(at_once)) == 12


# ---- staging, the CUDA engine's way of moving, on CPU tensors ------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_staged_copies_move_the_same_bytes(spec: CacheSpec, piece_bytes: int) -> None:
    stack = stack_of(spec)
    records = fill_device(stack)
    device, host = PAIRS["scattered"]
    for pool, kept in zip(stack.device, stack.host, strict=True):
        for src, dst in staging.chunks(device, host, pool.record_bytes):
            staging.backup_records(pool, kept, src, dst)
    for kept, written in zip(stack.host, records, strict=True):
        assert (kept.data.numpy()[host] == written[device]).all()
    fill_device(stack, seed=3)
    for pool, kept in zip(stack.device, stack.host, strict=True):
        for group in staging.layer_groups(kept.layout, piece_bytes):
            for src, dst in staging.chunks(host, device, group.nbytes):
                staging.load_group(pool, kept, group, src, dst)
    for found, written in zip(device_records(stack), records, strict=True):
        assert (found[device] == written[device]).all()


def test_layer_groups_cover_the_record_in_order() -> None:
    layout = stack_of(indexed_spec()).host[0].layout
    for piece_bytes in (1, 150, 1 << 20):
        groups = staging.layer_groups(layout, piece_bytes)
        assert [layer for g in groups for layer in g.layers] == list(layout.layers)
        assert [g.offset for g in groups[1:]] == [g.offset + g.nbytes for g in groups[:-1]]
        assert groups[-1].offset + groups[-1].nbytes == layout.record_bytes
        assert all(g.nbytes >= piece_bytes for g in groups[:-1])
    assert len(staging.layer_groups(layout, 1)) == len(layout.layers)
    assert len(staging.layer_groups(layout, 1 << 20)) == 1


def test_chunks_bound_the_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_STAGING_BYTES", 1000)
    parts = list(staging.chunks(slots(*range(9)), slots(*range(9)), 250))
    assert [len(src) for src, _ in parts] == [4, 4, 1]
    assert [len(src) for src, _ in staging.chunks(slots(1, 2), slots(3, 4), 5000)] == [1, 1]
    assert list(staging.chunks(slots(1), slots(1), 0)) == []
