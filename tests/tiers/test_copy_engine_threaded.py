"""The threaded engine: order, gating per layer, cancellation, faults, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from banyan.errors import CopyError, PoolError
from banyan.pools.assembler import PoolStack
from banyan.tiers import moves, verify
from banyan.tiers.ops import CopyBlock, CopyDone, CopyJob, CopyKind, OpId, Slots
from banyan.tiers.threaded import LayerTicket, ThreadedCopyEngine
from tests.support.stacks import device_records, fill_device, hybrid_spec, slots, stack_of

torch.set_num_threads(1)

PATIENCE_S = 20.0
SOON_S = 0.05
"""Long enough for a thread that is not held back to have gone on."""


@pytest.fixture
def stack() -> PoolStack:
    built = stack_of(hybrid_spec())
    fill_device(built)
    return built


@pytest.fixture
def build(stack: PoolStack) -> Iterator[Callable[..., ThreadedCopyEngine]]:
    made: list[ThreadedCopyEngine] = []

    def engine(**options: Any) -> ThreadedCopyEngine:
        made.append(ThreadedCopyEngine(stack, **({"clock": time.perf_counter} | options)))
        return made[-1]

    yield engine
    for each in made:
        each.close()


class Gate:
    """Holds a thread at a chosen call until `open`."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)

    def open(self) -> None:
        self.opened.set()


def job(op: int, kind: CopyKind, src: Slots, dst: Slots, *, check: bool = False) -> CopyJob:
    blocks = tuple(CopyBlock(c, src, dst) for c in range(3))
    return CopyJob(OpId(op), kind, blocks, verify=check)


def backup(op: int, src: int = 0, dst: int = 0) -> CopyJob:
    return job(op, CopyKind.BACKUP, slots(src), slots(dst))


def drain(engine: ThreadedCopyEngine, count: int) -> list[CopyDone]:
    done: list[CopyDone] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(done) < count:
        assert time.monotonic() < deadline
        done += engine.poll()
        time.sleep(0.001)
    return done


def hold(gate: Gate) -> Callable[[CopyJob], str | None]:
    """A fault hook that stops the worker at operation 0 and faults nothing."""

    def hook(job: CopyJob) -> str | None:
        if job.op_id == 0:
            gate()
        return None

    return hook


def test_jobs_complete_in_the_order_of_submission(build: Any) -> None:
    engine = build()
    for op in range(50):
        engine.submit(backup(op, op % 12, op % 16))
    assert [d.op_id for d in drain(engine, 50)] == list(range(50))


def test_a_layer_is_let_go_while_later_ones_still_copy(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    load_layer = moves.PoolMover.load_layer

    def slow(self: moves.PoolMover, layer: int, pairing: moves.Pairing) -> None:
        if layer == 3:
            gate()
        load_layer(self, layer, pairing)

    monkeypatch.setattr(moves.PoolMover, "load_layer", slow)
    engine = build()
    engine.submit(job(0, CopyKind.BACKUP, slots(1, 2), slots(3, 4)))
    drain(engine, 1)
    ticket = engine.submit(job(1, CopyKind.LOAD_BACK, slots(3, 4), slots(5, 6)))
    for layer in (0, 1, 2):
        ticket.wait_layer(layer)
    gate.wait()
    reader = threading.Thread(target=ticket.wait_layer, args=(3,))
    reader.start()
    reader.join(SOON_S)
    assert reader.is_alive()
    assert engine.poll() == []
    gate.open()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    ticket.wait_layer(6)
    assert [d.op_id for d in engine.poll()] == [1]


def test_the_completion_is_posted_before_the_last_layer_is_let_go(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-10: seen at the very moment at which readers are let go."""
    settle = LayerTicket.settle
    posted: list[list[CopyDone]] = []

    def watched(self: LayerTicket, failure: str | None) -> None:
        posted.append(engine.poll())
        settle(self, failure)

    monkeypatch.setattr(LayerTicket, "settle", watched)
    engine = build()
    engine.submit(job(1, CopyKind.LOAD_BACK, slots(0), slots(5))).wait_layer(6)
    assert [[d.op_id for d in done] for done in posted] == [[1]]


def test_a_load_back_overtakes_queued_backups(build: Any) -> None:
    gate = Gate()
    engine = build(fault=hold(gate))
    for op in (0, 1, 2):
        engine.submit(backup(op))
    gate.wait()
    engine.submit(job(3, CopyKind.LOAD_BACK, slots(0), slots(5)))
    engine.submit(job(4, CopyKind.LOAD_BACK, slots(1), slots(6)))
    gate.open()
    assert [d.op_id for d in drain(engine, 5)] == [0, 3, 4, 1, 2]


def test_a_reader_does_not_wait_for_ever(build: Any) -> None:
    """C107, INV-20: a copy that hangs becomes an error that the request recovers from."""
    gate = Gate()
    engine = build(fault=hold(gate), timeout_s=0.05)
    ticket = engine.submit(job(0, CopyKind.LOAD_BACK, slots(0), slots(5)))
    gate.wait()
    with pytest.raises(CopyError, match="timeout"):
        ticket.wait_layer(0)
    gate.open()


def test_under_verify_no_layer_is_let_go_before_the_check(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    check = verify.verify_load_back

    def slow(stack: PoolStack, job: CopyJob) -> verify.Verdict:
        gate()
        return check(stack, job)

    monkeypatch.setattr(verify, "verify_load_back", slow)
    engine = build()
    engine.submit(job(0, CopyKind.BACKUP, slots(1), slots(3), check=True))
    drain(engine, 1)
    ticket = engine.submit(job(1, CopyKind.LOAD_BACK, slots(3), slots(5), check=True))
    gate.wait()
    reader = threading.Thread(target=ticket.wait_layer, args=(0,))
    reader.start()
    reader.join(SOON_S)
    assert reader.is_alive()
    gate.open()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()


def test_a_queued_job_can_be_cancelled_and_moves_nothing(build: Any, stack: PoolStack) -> None:
    """C031: a transfer cancelled before its launch leaves no trace, and says so once."""
    gate = Gate()
    engine = build(fault=hold(gate))
    engine.submit(backup(0, 0, 0))
    gate.wait()
    ticket = engine.submit(job(1, CopyKind.BACKUP, slots(1), slots(9)))
    engine.submit(backup(2, 2, 2))
    assert engine.cancel(OpId(0)) is False
    assert engine.cancel(OpId(1)) is True
    assert engine.cancel(OpId(1)) is False
    assert engine.poll() == [CopyDone(OpId(1), ok=False, reason="cancelled")]
    with pytest.raises(CopyError, match="cancelled"):
        ticket.wait_layer(0)
    gate.open()
    assert [(d.op_id, d.ok) for d in drain(engine, 2)] == [(0, True), (2, True)]
    assert not stack.host[0].data[9].any()
    assert stack.host[0].data[2].any()


def test_a_reader_of_a_cancelled_job_is_woken(build: Any) -> None:
    """INV-20: nobody waits for ever."""
    gate = Gate()
    engine = build(fault=hold(gate))
    engine.submit(backup(0))
    gate.wait()
    ticket = engine.submit(job(1, CopyKind.LOAD_BACK, slots(1), slots(1)))
    failures: list[str] = []

    def read() -> None:
        try:
            ticket.wait_layer(4)
        except CopyError as error:
            failures.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert engine.cancel(OpId(1))
    reader.join(PATIENCE_S)
    assert failures == ["layer 4 was not loaded: cancelled"]
    gate.open()


def test_close_cancels_the_queue_and_lets_the_running_job_end(build: Any, stack: PoolStack) -> None:
    gate = Gate()
    engine = build(fault=hold(gate))
    engine.submit(backup(0, 3, 3))
    gate.wait()
    tickets = [engine.submit(backup(op, op, op)) for op in (1, 2)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(SOON_S)
    assert closing.is_alive()
    gate.open()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert sorted((d.op_id, d.reason) for d in engine.poll()) == [
        (0, ""),
        (1, "cancelled"),
        (2, "cancelled"),
    ]
    assert stack.host[0].data[3].any()
    for ticket in tickets:
        with pytest.raises(CopyError, match="cancelled"):
            ticket.wait_layer(0)
    engine.close()
    late = engine.submit(backup(9))
    assert engine.poll() == [CopyDone(OpId(9), ok=False, reason="cancelled")]
    with pytest.raises(CopyError, match="cancelled"):
        late.wait_layer(0)
    assert not any(thread.is_alive() for thread in engine._threads)


def test_a_fault_before_the_bytes_moves_none(build: Any, stack: PoolStack) -> None:
    engine = build(fault=lambda job: "timeout" if job.op_id == 1 else None)
    ticket = engine.submit(job(1, CopyKind.BACKUP, slots(1), slots(9)))
    engine.submit(backup(2, 2, 2))
    first, second = drain(engine, 2)
    assert (first.ok, first.reason, first.moved_bytes) == (False, "timeout", 0)
    assert second.ok
    assert not stack.host[0].data[9].any()
    with pytest.raises(CopyError, match="timeout"):
        ticket.wait_layer(0)


def test_a_fault_after_the_bytes_fails_every_later_wait(build: Any, stack: PoolStack) -> None:
    gate = Gate()

    def late(job: CopyJob) -> str | None:
        if job.kind is CopyKind.BACKUP:
            return None
        gate()
        return "copy_error"

    engine = build(late_fault=late)
    engine.submit(job(0, CopyKind.BACKUP, slots(1), slots(3)))
    assert drain(engine, 1)[0].ok
    ticket = engine.submit(job(1, CopyKind.LOAD_BACK, slots(3), slots(5)))
    gate.wait()
    ticket.wait_layer(5)
    gate.open()
    with pytest.raises(CopyError, match="copy_error"):
        ticket.wait_layer(6)
    with pytest.raises(CopyError, match="copy_error"):
        ticket.wait_layer(5)
    assert [(d.op_id, d.reason) for d in drain(engine, 1)] == [(1, "copy_error")]
    for records in device_records(stack):
        assert (records[5] == records[1]).all()


@pytest.mark.parametrize("failure", [RuntimeError("no"), MemoryError(), PoolError("no")])
def test_an_exception_in_a_job_is_counted_and_the_engine_goes_on(
    build: Any, failure: Exception
) -> None:
    """INV-19, C125: 100 failing jobs kill no worker and disturb no later job."""

    def hook(job: CopyJob) -> str | None:
        if job.op_id < 100:
            raise failure
        return None

    engine = build(fault=hook)
    tickets = [engine.submit(backup(op)) for op in range(100)]
    engine.submit(backup(100, 4, 4))
    done = drain(engine, 101)
    assert [d.reason for d in done] == ["copy_error"] * 100 + [""]
    with pytest.raises(CopyError, match="copy_error"):
        tickets[7].wait_layer(0)


def test_slots_outside_the_pools_are_a_failed_job(build: Any) -> None:
    engine = build()
    engine.submit(backup(0, 0, 999))
    engine.submit(backup(1))
    assert [(d.op_id, d.reason) for d in drain(engine, 2)] == [(0, "copy_error"), (1, "")]


def test_seconds_come_from_the_clock_and_leave_out_the_queue(build: Any) -> None:
    ticks = iter(range(100))
    engine = build(clock=lambda: float(next(ticks)))
    for op in range(3):
        engine.submit(backup(op))
    assert [d.seconds for d in drain(engine, 3)] == [1.0, 1.0, 1.0]


def test_an_operation_is_queued_once(build: Any) -> None:
    gate = Gate()
    engine = build(fault=hold(gate))
    engine.submit(backup(0))
    gate.wait()
    engine.submit(backup(1))
    with pytest.raises(PoolError, match="operation 1 is queued already"):
        engine.submit(backup(1))
    gate.open()
    drain(engine, 2)


def test_it_needs_a_worker(stack: PoolStack) -> None:
    with pytest.raises(PoolError, match="at least one worker, got 0"):
        ThreadedCopyEngine(stack, clock=time.perf_counter, workers=0)


@pytest.mark.parametrize("workers", [1, 3])
def test_many_jobs_leave_the_bytes_of_a_plain_copy(
    build: Any, stack: PoolStack, workers: int
) -> None:
    """Random disjoint backups and load-backs, verified, against numpy on the records."""
    engine = build(workers=workers)
    rng = np.random.default_rng(5)
    device, host = device_records(stack), [p.data.numpy().copy() for p in stack.host]
    for round_ in range(30):
        at, to = rng.permutation(12).astype(np.int32), rng.permutation(16).astype(np.int32)
        out, back = (at[:5], to[:5]), (to[5:11], at[5:11])
        engine.submit(job(2 * round_, CopyKind.BACKUP, *out, check=True))
        ticket = engine.submit(job(2 * round_ + 1, CopyKind.LOAD_BACK, *back, check=True))
        ticket.wait_layer(6)
        assert all(d.ok and d.mismatched == 0 for d in drain(engine, 2))
        for c in range(3):
            host[c][out[1]] = device[c][out[0]]
            device[c][back[1]] = host[c][back[0]]
    for c, found in enumerate(device_records(stack)):
        assert (found == device[c]).all()
        assert (stack.host[c].data.numpy() == host[c]).all()
