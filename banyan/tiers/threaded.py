"""The copy engine for CPU pools: jobs move on worker threads, load-backs before backups.

Owns its threads, its queue and the tickets it hands out. Knows slots and bytes, not the tree.
`submit`, `poll`, `cancel` and `close` are called from the scheduler thread; `wait_layer` of a
ticket from whichever thread runs the model.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from banyan.errors import CopyError, PoolError
from banyan.pools.assembler import PoolStack
from banyan.tiers import moves
from banyan.tiers.ops import CopyDone, CopyJob, CopyKind, CopyTicket, OpId
from banyan.tiers.verify import Verdict

_log = logging.getLogger(__name__)

_PATIENCE_S = 30.0

Fault = Callable[[CopyJob], "str | None"]
"""Asked about a job; a reason makes the job fail with it, None lets it go on."""


class LayerTicket:
    """A reader's handle: layers come free in ascending order, or the whole job fails.

    Args:
        layers: those the job moves, ascending; any other is free at once.
        timeout_s: the longest that a reader waits for one layer.
    """

    def __init__(self, layers: tuple[int, ...], timeout_s: float = _PATIENCE_S) -> None:
        self._timeout_s = timeout_s
        self._position = {layer: index for index, layer in enumerate(layers)}
        self._released = 0
        self._failure: str | None = None
        self._changed = threading.Condition()

    def wait_layer(self, layer: int) -> None:
        """Block until the bytes of `layer` are in place.

        Raises:
            CopyError: the job failed, was cancelled, or took longer than the time-out.
        """
        position = self._position.get(layer)
        if position is None:
            return
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._failure is not None or self._released > position, self._timeout_s
            )
            failure = self._failure if arrived else "timeout"
        if failure is not None:
            raise CopyError(f"layer {layer} was not loaded: {failure}")

    def release_next(self) -> None:
        """Let readers of the next layer go on."""
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def settle(self, failure: str | None) -> None:
        """Let all readers go on, or make every wait raise."""
        with self._changed:
            self._failure = failure
            self._released = len(self._position)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Queued:
    job: CopyJob
    ticket: LayerTicket


class ThreadedCopyEngine:
    """Implements `CopyEngine` over CPU pools.

    A load-back moves layer by layer and lets each go at once, so the forward pass overlaps with it;
    a backup moves whole records, which is faster. Under verify nothing is let go before the check.
    A load-back goes before every queued backup: a request waits for it. Within a kind, jobs start
    in the order of submission.

    Args:
        stack: the pools. Their device pools must be on CPU.
        clock: seconds, monotone; read from the worker threads.
        workers: threads; with one, jobs of a kind complete in the order of submission.
        timeout_s: the longest that a reader of a load-back waits for one layer.
        fault: asked before a job's bytes move.
        late_fault: asked when they have moved and, under verify, been checked.

    Raises:
        PoolError: fewer than one worker, or a device pool that is not on CPU.
    """

    def __init__(
        self,
        stack: PoolStack,
        *,
        clock: Callable[[], float],
        workers: int = 1,
        timeout_s: float = _PATIENCE_S,
        fault: Fault | None = None,
        late_fault: Fault | None = None,
    ) -> None:
        if workers < 1:
            raise PoolError(f"a copy engine needs at least one worker, got {workers}")
        self._stack = stack
        self._mover = moves.StackMover(stack)
        self._clock = clock
        self._fault, self._late_fault = fault, late_fault
        self._timeout_s = timeout_s
        self._queues: dict[CopyKind, dict[OpId, _Queued]] = {
            CopyKind.LOAD_BACK: {},
            CopyKind.BACKUP: {},
        }
        self._done: deque[CopyDone] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"banyan-copy-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyJob) -> CopyTicket:
        """Queue `job`; after `close` it is reported `cancelled` at once.

        Raises:
            PoolError: an operation of this id is queued already.
        """
        ticket = LayerTicket(moves.job_layers(self._stack, job), self._timeout_s)
        with self._wake:
            if any(job.op_id in queue for queue in self._queues.values()):
                raise PoolError(f"operation {job.op_id} is queued already")
            if not self._closed:
                self._queues[job.kind][job.op_id] = _Queued(job, ticket)
                self._wake.notify()
                return ticket
        self._report(ticket, CopyDone(job.op_id, ok=False, reason="cancelled"))
        return ticket

    def poll(self) -> list[CopyDone]:
        """Completions since the last call, oldest first. Cost: one test when there is none."""
        done: list[CopyDone] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def cancel(self, op_id: OpId) -> bool:
        """Take a job back that no worker has begun; it then reports `cancelled`."""
        with self._wake:
            queued = next(
                (queue.pop(op_id) for queue in self._queues.values() if op_id in queue), None
            )
        if queued is None:
            return False
        self._report(queued.ticket, CopyDone(op_id, ok=False, reason="cancelled"))
        return True

    def close(self) -> None:
        """Cancel what is queued, wait for the running job, end the threads. Again: nothing."""
        with self._wake:
            self._closed = True
            queued = [entry for queue in self._queues.values() for entry in queue.values()]
            for queue in self._queues.values():
                queue.clear()
            self._wake.notify_all()
        for entry in queued:
            done = CopyDone(entry.job.op_id, ok=False, reason="cancelled")
            self._report(entry.ticket, done)
        for thread in self._threads:
            thread.join()

    # ---- worker threads ----------------------------------------------------------------------

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            started = self._clock()
            try:
                reason, verdict = self._run(entry)
            except Exception:  # the worker boundary: counted by the reason, the engine goes on
                _log.exception("copy job %d failed", entry.job.op_id)
                reason, verdict = "copy_error", Verdict()
            done = CopyDone(
                entry.job.op_id,
                ok=not reason,
                reason=reason,
                seconds=self._clock() - started,
                moved_bytes=0 if reason else moves.job_bytes(self._stack, entry.job),
                verified=verdict.verified,
                mismatched=verdict.mismatched,
            )
            self._report(entry.ticket, done)

    def _next(self) -> _Queued | None:
        """The job to do next, waiting for one; None when the engine is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or any(self._queues.values()))
            for queue in self._queues.values():
                if queue:
                    return queue.pop(next(iter(queue)))
            return None

    def _run(self, entry: _Queued) -> tuple[str, Verdict]:
        """Move and check one job. Returns the reason of its failure (empty: none), and counts."""
        job, ticket = entry.job, entry.ticket
        reason = self._fault(job) if self._fault else None
        if reason:
            return reason, Verdict()
        if job.kind is CopyKind.BACKUP:
            verdict = self._mover.backup(job)
        else:
            last = moves.job_layers(self._stack, job)[-1:]
            held = job.verify  # under verify no layer is let go before the check
            verdict = self._mover.load_back(
                job, lambda layer: None if held or layer in last else ticket.release_next()
            )
        if verdict.mismatched:
            return "checksum", verdict
        return (self._late_fault(job) if self._late_fault else None) or "", verdict

    def _report(self, ticket: LayerTicket, done: CopyDone) -> None:
        """Post the completion, and only then let the last layer's readers go on."""
        self._done.append(done)
        ticket.settle(None if done.ok else done.reason)
