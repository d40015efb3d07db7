"""Ranks that share the host copy of what is equal on all: one writes, all read, every byte counts.

The stacks of this file stand for the ranks of a node. What makes a backup count only when all ranks
have finished theirs is not here: these tests finish all of them before a load-back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.pools.assembler import PoolStack
from banyan.pools.lanes import Lane
from banyan.pools.shared import SharedHost
from banyan.spec import CacheSpec
from banyan.tiers import moves
from banyan.tiers.moves import Pairing, PoolMover, StackMover, job_bytes
from banyan.tiers.ops import CopyBlock, CopyDone, CopyEngine, CopyJob, CopyKind, OpId, Slots
from banyan.tiers.stream import StreamCopyEngine
from banyan.tiers.threaded import ThreadedCopyEngine
from tests.support.node import fill_ranks, node_stacks, replicated, shared_plan, sharing_ranks
from tests.support.stacks import device_records, hybrid_spec, indexed_spec, slots
from tests.tiers.test_copy_engine_contract import fake_cuda

torch.set_num_threads(1)

SPECS = {
    "index": replicated(indexed_spec(), "index"),
    "latents": replicated(indexed_spec(), "k", "v", "index"),
    "states": replicated(hybrid_spec(), "conv", "recurrent", "extra"),
    "some-states": replicated(hybrid_spec(3, "bfloat16"), "recurrent"),
    "nothing": hybrid_spec(),
}
TAKEN, KEPT, LANDING = slots(2, 3, 4, 9, 0), slots(5, 6, 7, 1, 12), slots(8, 1, 10, 11, 5)


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def spec(request: pytest.FixtureRequest) -> CacheSpec:
    chosen: CacheSpec = request.param
    return chosen


@pytest.fixture
def shares() -> Iterator[list[SharedHost]]:
    with sharing_ranks(3) as made:
        yield made


@pytest.fixture
def pinned() -> Iterator[list[SharedHost]]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with sharing_ranks(3, pin=True) as made:
        yield made


def ranks_of(spec: CacheSpec, shares: Sequence[SharedHost], device: str = "cpu") -> list[PoolStack]:
    """A filled stack for each rank."""
    stacks = node_stacks(spec, shared_plan(spec, 12, 16, len(shares)), shares, device)
    fill_ranks(stacks)
    return stacks


def job(
    spec: CacheSpec, kind: CopyKind, src: Slots, dst: Slots, *, verify: bool = False
) -> CopyJob:
    blocks = tuple(CopyBlock(c, src, dst) for c in range(len(spec.components)))
    return CopyJob(OpId(1), kind, blocks, verify)


def backup_job(spec: CacheSpec, *, verify: bool = False) -> CopyJob:
    return job(spec, CopyKind.BACKUP, TAKEN, KEPT, verify=verify)


def load_job(spec: CacheSpec, *, verify: bool = False) -> CopyJob:
    return job(spec, CopyKind.LOAD_BACK, KEPT, LANDING, verify=verify)


def lanes_of(stack: PoolStack, *, shared: bool) -> list[Lane]:
    return [x for own in stack.lanes for x in own if x.shared is shared]


def threaded(stack: PoolStack, patch: pytest.MonkeyPatch) -> CopyEngine:
    return ThreadedCopyEngine(stack, clock=time.perf_counter)


def staged(stack: PoolStack, patch: pytest.MonkeyPatch) -> CopyEngine:
    fake_cuda(patch)
    return StreamCopyEngine(stack)


def finished(engine: CopyEngine, submitted: CopyJob) -> CopyDone:
    """Submit a job and wait for its end."""
    engine.submit(submitted)
    deadline = time.monotonic() + 20
    while not (done := engine.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return done[0]


@pytest.mark.parametrize("build", [threaded, staged])
@pytest.mark.parametrize("verify", [False, True])
def test_every_rank_gets_its_bytes_back(
    spec: CacheSpec,
    shares: list[SharedHost],
    build: Callable[[PoolStack, pytest.MonkeyPatch], CopyEngine],
    verify: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through either copy engine, readers first; each counts what it moved and compared itself."""
    stacks = ranks_of(spec, shares)
    check_round_trip([build(stack, monkeypatch) for stack in stacks], stacks, verify)


@pytest.mark.gpu
@pytest.mark.parametrize("verify", [False, True])
def test_every_rank_gets_its_bytes_back_on_cuda(
    spec: CacheSpec, pinned: list[SharedHost], verify: bool
) -> None:
    stacks = ranks_of(spec, pinned, "cuda")
    check_round_trip([StreamCopyEngine(stack) for stack in stacks], stacks, verify)


def check_round_trip(
    engines: Sequence[CopyEngine], stacks: Sequence[PoolStack], verify: bool
) -> None:
    """Back up on all ranks, overwrite the device, load back; compare every byte and count."""
    spec = stacks[0].spec
    before = [device_records(stack) for stack in stacks]
    for stack, engine in list(zip(stacks, engines, strict=True))[::-1]:
        done = finished(engine, backup_job(spec, verify=verify))
        own = [x for lanes in stack.lanes for x in lanes if x.writes]
        assert done.ok
        assert done.moved_bytes == len(KEPT) * sum(x.host.record_bytes for x in own)
        assert done.verified == (len(KEPT) * len(own) if verify else 0)
    fill_ranks(stacks, seed=1)
    noise = [device_records(stack) for stack in stacks]
    for rank, (stack, engine) in enumerate(zip(stacks, engines, strict=True)):
        done = finished(engine, load_job(spec, verify=verify))
        assert done.ok and not done.mismatched
        assert done.moved_bytes == len(KEPT) * sum(p.record_bytes for p in stack.device)
        assert done.verified == (len(KEPT) * sum(map(len, stack.lanes)) if verify else 0)
        for after, old, kept in zip(device_records(stack), before[rank], noise[rank], strict=True):
            expected = kept.copy()
            expected[LANDING] = old[TAKEN]
            assert np.array_equal(after, expected), f"rank {rank}"
        engine.close()


def test_only_the_writer_writes(spec: CacheSpec, shares: list[SharedHost]) -> None:
    """A reader's backup leaves shared records as they are, and remembers what it should find."""
    stacks = ranks_of(spec, shares)
    writer, *readers = stacks
    for stack in readers:
        verdict = StackMover(stack).backup(backup_job(spec, verify=True))
        assert verdict.mismatched == 0, "it does not look at what is not there yet"
    for lane in lanes_of(writer, shared=True):
        assert not lane.host.data.any()
    StackMover(writer).backup(backup_job(spec, verify=True))
    assert all(lane.host.data[KEPT].any() for lane in lanes_of(writer, shared=True))
    for stack in readers:
        for lane, written in zip(
            lanes_of(stack, shared=True), lanes_of(writer, shared=True), strict=True
        ):
            assert lane.host.digests == written.host.digests
            assert [s for s, d in enumerate(lane.host.digests) if d] == sorted(KEPT.tolist())
        StackMover(stack).backup(backup_job(spec))
        assert not any(d for own in stack.lanes for x in own for d in x.host.digests)


def test_nothing_on_a_reader_can_write_a_shared_record(shares: list[SharedHost]) -> None:
    stacks = ranks_of(SPECS["index"], shares)
    pairing = Pairing.of(TAKEN, KEPT)
    _, lane = stacks[1].lanes[0]
    with pytest.raises(ValueError, match="read-only"):
        PoolMover(lane.device, lane.host, writes=lane.writes).backup(pairing)
    assert not lane.host.data.any()


def outcomes(stacks: Sequence[PoolStack], *, verify: bool = True) -> list[int]:
    """Back up on all ranks, then load back; how many records each finds wrong."""
    spec = stacks[0].spec
    for stack in stacks:
        StackMover(stack).backup(backup_job(spec, verify=verify))
    load = load_job(spec, verify=verify)
    return [StackMover(stack).load_back(load, lambda layer: None).mismatched for stack in stacks]


@pytest.mark.parametrize("verify", [False, True])
def test_a_reader_that_wrote_would_be_found(shares: list[SharedHost], verify: bool) -> None:
    """A mutation: the last rank takes itself for the writer, and its bytes are not the others'."""
    stacks = ranks_of(SPECS["index"], shares)
    before = [device_records(stack) for stack in stacks]
    own, shared = stacks[2].lanes[0]
    stacks[2].lanes[0] = (own, Lane(shared.device, shared.host, shared=True, writes=True))
    shared.device.buffers[1, "index"][int(TAKEN[0])] ^= 1
    assert outcomes(stacks, verify=verify) == ([1, 1, 0] if verify else [0, 0, 0])
    for stack, old in zip(stacks, before, strict=True):
        wrong = (device_records(stack)[0][LANDING] != old[0][TAKEN]).any(axis=1)
        assert wrong.tolist() == [True, False, False, False, False], "bytes tell without verify"


def test_bytes_that_are_not_equal_on_all_ranks_are_found(shares: list[SharedHost]) -> None:
    """A buffer that was taken for replicated and is not: the rank that differs finds out."""
    stacks = ranks_of(SPECS["states"], shares)
    assert outcomes(stacks) == [0, 0, 0]
    stacks[1].device[2].buffers[4, "conv"][int(TAKEN[3])] += 1
    assert outcomes(stacks) == [0, 1, 0]


@pytest.mark.parametrize("name", ["index", "states", "some-states"])
def test_a_wrong_shared_record_is_found_by_every_rank(name: str, shares: list[SharedHost]) -> None:
    spec = SPECS[name]
    stacks = ranks_of(spec, shares)
    for stack in stacks:
        StackMover(stack).backup(backup_job(spec, verify=True))
    lanes_of(stacks[0], shared=True)[0].host.data[KEPT[2], -1] ^= 8
    for stack in stacks:
        verdict = StackMover(stack).load_back(load_job(spec, verify=True), lambda layer: None)
        assert verdict.mismatched == 1
    lanes_of(stacks[0], shared=True)[0].host.data[KEPT[2], -1] ^= 8
    lanes_of(stacks[1], shared=False)[0].host.data[KEPT[2], 0] ^= 8
    found = [
        StackMover(stack).load_back(load_job(spec, verify=True), lambda layer: None).mismatched
        for stack in stacks
    ]
    assert found == [0, 1, 0], "what is a rank's own concerns that rank"


@pytest.mark.parametrize("kind", ["checksum", "fault"])
def test_a_writer_that_fails_claims_no_record(
    kind: str, shares: list[SharedHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst outcome of the ranks is a failure, and no digest vouches for the bytes there."""
    spec = SPECS["index"]
    stacks = ranks_of(spec, shares)
    fault = (lambda job: "copy_error") if kind == "fault" else None
    engines = [
        ThreadedCopyEngine(
            stack, clock=time.perf_counter, fault=fault if stack is stacks[0] else None
        )
        for stack in stacks
    ]
    if kind == "checksum":
        torn(monkeypatch, stacks[0].lanes[0][1])
    done = [finished(engine, backup_job(spec, verify=True)) for engine in engines]
    assert [d.ok for d in done] == [False, True, True]
    assert done[0].reason == ("checksum" if kind == "checksum" else "copy_error")
    claimed = [s for s, digest in enumerate(stacks[0].lanes[0][1].host.digests) if digest]
    assert claimed == ([] if kind == "fault" else sorted(KEPT.tolist()[1:]))
    read = [finished(engine, load_job(spec, verify=True)) for engine in engines[1:]]
    assert [(d.ok, d.reason) for d in read] == [(False, "checksum")] * 2, "were it read after all"
    for engine in engines:
        engine.close()


def torn(patch: pytest.MonkeyPatch, lane: Lane) -> None:
    """Let the first record of a lane arrive wrong on host."""
    move = moves.PoolMover.backup

    def and_tear(self: PoolMover, pairing: Pairing) -> None:
        move(self, pairing)
        if self.layers == lane.host.layout.layers and self.writes:
            lane.host.data[KEPT[0], 3] ^= 1

    patch.setattr(moves.PoolMover, "backup", and_tear)


def test_host_bytes_do_not_grow_with_the_ranks() -> None:
    """At 16 ranks at most 1.1 times those at one: allocated, and taken after a backup of all."""
    spec = SPECS["latents"]
    only = CacheSpec((spec.components[0].only(replicated=True),), spec.page_size)
    spent = {}
    for ranks in (1, 16):
        with sharing_ranks(ranks) as shares:
            stacks = node_stacks(only, shared_plan(only, 4096, 4096, ranks), shares)
            every = np.arange(4096, dtype=np.int32)
            for stack in stacks:
                StackMover(stack).backup(job(only, CopyKind.BACKUP, every, every))
            private = sum(x.host.nbytes for s in stacks for x in lanes_of(s, shared=False))
            taken = sum(os.fstat(fd).st_blocks * 512 for s in shares for fd in s._held)
            spent[ranks] = private + shares[0].nbytes, private + taken
            assert sum(s.host_bytes for s in stacks) == stacks[0].host_bytes
            assert taken >= stacks[0].host_bytes > 0
    assert spent[16][0] <= 1.1 * spent[1][0]
    assert spent[16][1] <= 1.1 * spent[1][1]
    alone = 4096 * only.components[0].record_bytes(only.page_size)
    assert spent[16][0] <= 1.1 * alone, "nor with sharing itself"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_buffers_shared_by_any_ranks_round_trip(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([hybrid_spec(2), indexed_spec(), hybrid_spec(5, "float16")]))
    names = {b.name for c in base.components for b in c.buffers}
    spec = replicated(base, *data.draw(st.sets(st.sampled_from(sorted(names)))))
    ranks = data.draw(st.integers(1, 4))
    device = np.array(data.draw(st.permutations(range(12)))[:6], np.int32)
    host = np.array(data.draw(st.permutations(range(16)))[:6], np.int32)
    with sharing_ranks(ranks) as shares:
        stacks = ranks_of(spec, shares)
        movers = [StackMover(stack) for stack in stacks]
        before = [device_records(stack) for stack in stacks]
        for rank in data.draw(st.permutations(range(ranks))):
            movers[rank].backup(job(spec, CopyKind.BACKUP, device, host, verify=True))
        fill_ranks(stacks, seed=2)
        load = job(spec, CopyKind.LOAD_BACK, host, device, verify=True)
        for rank in data.draw(st.permutations(range(ranks))):
            assert movers[rank].load_back(load, lambda layer: None).mismatched == 0
            for after, old in zip(device_records(stacks[rank]), before[rank], strict=True):
                assert np.array_equal(after[device], old[device])
        moved = [job_bytes(s, job(spec, CopyKind.BACKUP, device, host)) for s in stacks]
        shared = sum(c.only(replicated=True).record_bytes(spec.page_size) for c in spec.components)
        assert [moved[0] - m for m in moved[1:]] == [6 * shared] * (ranks - 1)
