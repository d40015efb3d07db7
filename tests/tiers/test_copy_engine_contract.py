"""What every copy engine promises, run over each; a new engine is one `rig_...` function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from banyan.errors import CopyError, PoolError
from banyan.pools.assembler import PoolStack, assemble
from banyan.tiers import stream
from banyan.tiers.moves import job_bytes
from banyan.tiers.ops import CopyBlock, CopyDone, CopyEngine, CopyJob, CopyKind, OpId, Slots
from banyan.tiers.stream import StreamCopyEngine
from banyan.tiers.threaded import ThreadedCopyEngine
from tests.support.manual_engine import ManualCopyEngine
from tests.support.stacks import (
    byteless_spec,
    device_records,
    fill_device,
    hybrid_spec,
    plan_of,
    slots,
    stack_of,
)

torch.set_num_threads(1)

LAYERS = (0, 1, 2, 3, 4, 5, 6)
PATIENCE_S = 20.0


@dataclass
class Rig:
    """An engine over a filled stack, and a way to let it finish what it has."""

    engine: CopyEngine
    stack: PoolStack
    records: list[np.ndarray]
    let_finish: Callable[[], None]

    def drain(self, count: int) -> list[CopyDone]:
        """Poll until `count` completions have come."""
        self.let_finish()
        done: list[CopyDone] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(done) < count:
            assert time.monotonic() < deadline, f"{len(done)} of {count} completions came"
            done += self.engine.poll()
            time.sleep(0 if done else 0.001)
        return done


class FakeEvent:
    """A CUDA event on a machine without CUDA, where every copy is synchronous."""

    passed = True

    def __init__(self, enable_timing: bool = False) -> None:
        self.synchronized = False

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0


class FakeStream:
    """A CUDA stream that remembers what it was told to wait for."""

    def __init__(self, device: Any = None) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None: ...

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None: ...


def fake_cuda(patch: pytest.MonkeyPatch) -> FakeStream:
    """Replace CUDA streams and events; returns the compute stream."""
    compute = FakeStream()
    patch.setattr(stream, "require_cuda", lambda stack: None)
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "stream", lambda s: s)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
    return compute


def rig_threaded(stack: PoolStack, patch: pytest.MonkeyPatch) -> Rig:
    return Rig(ThreadedCopyEngine(stack, clock=time.perf_counter), stack, [], lambda: None)


def rig_two_threads(stack: PoolStack, patch: pytest.MonkeyPatch) -> Rig:
    engine = ThreadedCopyEngine(stack, clock=time.perf_counter, workers=2)
    return Rig(engine, stack, [], lambda: None)


def rig_manual(stack: PoolStack, patch: pytest.MonkeyPatch) -> Rig:
    engine = ManualCopyEngine(stack)
    return Rig(engine, stack, [], engine.finish_all)


def rig_staged(stack: PoolStack, patch: pytest.MonkeyPatch) -> Rig:
    fake_cuda(patch)
    return Rig(StreamCopyEngine(stack), stack, [], lambda: None)


def rig_stream(stack: PoolStack, patch: pytest.MonkeyPatch) -> Rig:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = stack.spec
    on_gpu = assemble(
        spec, plan_of(spec, stack.device[0].slots, stack.host[0].slots), device="cuda"
    )
    return Rig(StreamCopyEngine(on_gpu), on_gpu, [], lambda: None)


RIGS = [
    rig_threaded,
    rig_two_threads,
    rig_manual,
    rig_staged,
    pytest.param(rig_stream, marks=pytest.mark.gpu),
]


@pytest.fixture(params=RIGS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds rigs of one kind, and closes their engines."""
    made: list[Rig] = []

    def build(stack: PoolStack) -> Rig:
        rig: Rig = request.param(stack, monkeypatch)
        rig.records = fill_device(rig.stack)
        made.append(rig)
        return rig

    yield build
    for rig in made:
        rig.engine.close()


@pytest.fixture
def rig(make: Any) -> Rig:
    built: Rig = make(stack_of(hybrid_spec(4, "bfloat16")))
    return built


def job(op: int, kind: CopyKind, src: Slots, dst: Slots, *, check: bool = False) -> CopyJob:
    blocks = tuple(CopyBlock(c, src, dst) for c in range(3))
    return CopyJob(OpId(op), kind, blocks, verify=check)


def backed_up(rig: Rig, device: Slots, host: Slots, *, check: bool = False) -> CopyDone:
    rig.engine.submit(job(0, CopyKind.BACKUP, device, host, check=check))
    (done,) = rig.drain(1)
    return done


def test_a_round_trip_through_the_engine(rig: Rig) -> None:
    """C064, C065: what comes back is what left, in slots of another order."""
    done = backed_up(rig, slots(7, 0, 1, 2), slots(3, 4, 5, 11))
    assert done.ok
    load = job(1, CopyKind.LOAD_BACK, slots(3, 4, 5, 11), slots(9, 6, 8, 5))
    assert done.moved_bytes == job_bytes(rig.stack, load) > 0
    fill_device(rig.stack, seed=9)
    rig.engine.submit(load)
    (done,) = rig.drain(1)
    assert done == CopyDone(OpId(1), True, "", done.seconds, done.moved_bytes)
    for found, old in zip(device_records(rig.stack), rig.records, strict=True):
        assert (found[[9, 6, 8, 5]] == old[[7, 0, 1, 2]]).all()


def test_each_layer_is_there_when_its_wait_returns(rig: Rig) -> None:
    """INV-10, layer by layer; and the completion is polled no later than the last layer."""
    backed_up(rig, slots(7, 0, 1), slots(3, 4, 5))
    fill_device(rig.stack, seed=9)
    ticket = rig.engine.submit(job(1, CopyKind.LOAD_BACK, slots(3, 4, 5), slots(9, 6, 8)))
    for layer in LAYERS:
        ticket.wait_layer(layer)
        for pool, old in zip(rig.stack.device, rig.records, strict=True):
            span = pool.layout.layer_span(layer)
            if span is not None:
                own = slice(span[0], sum(span))
                assert (pool.read_records(slots(9, 6, 8))[:, own] == old[[7, 0, 1], own]).all()
    assert [d.op_id for d in rig.engine.poll()] == [1]


def test_the_completion_never_comes_after_the_last_layer(rig: Rig) -> None:
    backed_up(rig, slots(7, 0, 1), slots(3, 4, 5))
    for op in range(1, 60):
        ticket = rig.engine.submit(job(op, CopyKind.LOAD_BACK, slots(3, 4, 5), slots(9, 6, 8)))
        ticket.wait_layer(LAYERS[-1])
        assert [d.op_id for d in rig.engine.poll()] == [op]


def test_a_layer_without_bytes_in_the_job_is_free_at_once(rig: Rig) -> None:
    blocks = (CopyBlock(1, slots(0), slots(0)), CopyBlock(2, slots(), slots()))
    ticket = rig.engine.submit(CopyJob(OpId(5), CopyKind.LOAD_BACK, blocks))
    for layer in (0, 1, 3, 4, 99):
        ticket.wait_layer(layer)
    rig.drain(1)


def test_verify_counts_every_record_on_both_ways(rig: Rig) -> None:
    done = backed_up(rig, slots(7, 0, 1), slots(3, 4, 5), check=True)
    assert (done.ok, done.verified, done.mismatched) == (True, 9, 0)
    ticket = rig.engine.submit(
        job(1, CopyKind.LOAD_BACK, slots(3, 4, 5), slots(9, 6, 8), check=True)
    )
    for layer in LAYERS:
        ticket.wait_layer(layer)
    (done,) = rig.engine.poll()
    assert (done.ok, done.verified, done.mismatched) == (True, 9, 0)


def test_a_flipped_bit_fails_the_load_back_for_every_layer(rig: Rig) -> None:
    """INV-19: wrong bytes are a miss; no reader gets past them, the first layer's neither."""
    backed_up(rig, slots(7, 0, 1), slots(3, 4, 5), check=True)
    rig.stack.host[1].data[4, 5] ^= 16
    ticket = rig.engine.submit(
        job(1, CopyKind.LOAD_BACK, slots(3, 4, 5), slots(9, 6, 8), check=True)
    )
    for layer in LAYERS:
        with pytest.raises(CopyError, match="checksum"):
            ticket.wait_layer(layer)
    (done,) = rig.drain(1)
    assert (done.ok, done.reason) == (False, "checksum")
    assert (done.verified, done.mismatched, done.moved_bytes) == (9, 1, 0)


def test_an_empty_job_completes(rig: Rig) -> None:
    rig.engine.submit(CopyJob(OpId(1), CopyKind.BACKUP, ()))
    rig.engine.submit(CopyJob(OpId(2), CopyKind.LOAD_BACK, (CopyBlock(0, slots(), slots()),)))
    assert sorted((d.op_id, d.ok, d.moved_bytes) for d in rig.drain(2)) == [
        (1, True, 0),
        (2, True, 0),
    ]


def test_a_component_without_bytes_completes(make: Any) -> None:
    rig = make(stack_of(byteless_spec()))
    blocks = (CopyBlock(0, slots(0, 1), slots(3, 4)), CopyBlock(1, slots(2), slots(6)))
    rig.engine.submit(CopyJob(OpId(1), CopyKind.BACKUP, blocks, verify=True))
    (done,) = rig.drain(1)
    assert (done.ok, done.verified) == (True, 3)
    assert (rig.stack.host[1].data.numpy()[6] == rig.records[1][2]).all()


def test_unknown_operations_cannot_be_cancelled(rig: Rig) -> None:
    assert rig.engine.cancel(OpId(77)) is False
    backed_up(rig, slots(1), slots(1))
    assert rig.engine.cancel(OpId(0)) is False
    assert rig.engine.poll() == []


def test_every_job_is_reported_once_also_over_close(rig: Rig) -> None:
    """INV-12: closing with queued jobs; closing again changes nothing."""
    ops = list(range(20))
    for op in ops:
        rig.engine.submit(job(op, CopyKind.BACKUP, slots(op % 12), slots(op % 16)))
    rig.engine.close()
    rig.engine.close()
    done = rig.engine.poll()
    assert sorted(d.op_id for d in done) == ops
    assert all(d.ok or d.reason == "cancelled" for d in done)
    assert rig.engine.poll() == []


# ---- the CUDA engine, on fakes ---------------------------------------------------------------


def test_the_stream_engine_refuses_pools_on_cpu() -> None:
    with pytest.raises(PoolError, match="needs CUDA"):
        StreamCopyEngine(stack_of(hybrid_spec()))


def test_the_copy_stream_waits_for_compute_and_compute_for_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C067: a backup and a load-back are ordered behind what the model has been given to do."""
    compute = fake_cuda(monkeypatch)
    stack = stack_of(hybrid_spec())
    engine = StreamCopyEngine(stack)
    fill_device(stack)
    engine.submit(job(0, CopyKind.BACKUP, slots(1), slots(1)))
    ticket = engine.submit(job(1, CopyKind.LOAD_BACK, slots(1), slots(2)))
    assert engine._stream.waited == [compute, compute]
    ticket.wait_layer(0)
    assert len(compute.waited) == 1
    monkeypatch.setattr(FakeEvent, "passed", False)
    assert engine.poll() == []
    ticket.wait_layer(LAYERS[-1])
    assert compute.waited[-1] is not compute.waited[0]
    assert [d.op_id for d in engine.poll()] == [1]
    monkeypatch.setattr(FakeEvent, "passed", True)
    assert [(d.op_id, d.seconds) for d in engine.poll()] == [(0, 0.002)]


def test_the_stream_engine_survives_a_job_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    stack = stack_of(hybrid_spec())
    engine = StreamCopyEngine(stack)
    ticket = engine.submit(job(0, CopyKind.LOAD_BACK, slots(99), slots(1)))
    with pytest.raises(CopyError, match="copy_error"):
        ticket.wait_layer(0)
    engine.submit(job(1, CopyKind.BACKUP, slots(1), slots(1)))
    assert [(d.op_id, d.reason) for d in engine.poll()] == [(0, "copy_error"), (1, "")]
    engine.close()
    late = engine.submit(job(2, CopyKind.LOAD_BACK, slots(1), slots(1)))
    with pytest.raises(CopyError, match="cancelled"):
        late.wait_layer(0)
    assert [d.reason for d in engine.poll()] == ["cancelled"]
