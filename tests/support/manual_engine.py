"""A copy engine whose completions the test triggers by hand; it moves real bytes.

Bytes move when a job is finished, not when it is submitted, so a test chooses every order. The
moving is the product's own (`banyan.tiers.moves`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from banyan.errors import CopyError
from banyan.pools.assembler import PoolStack
from banyan.tiers.moves import StackMover, job_bytes, job_layers
from banyan.tiers.ops import CopyDone, CopyJob, CopyKind, CopyTicket, OpId
from banyan.tiers.verify import Verdict


class ManualTicket:
    """Waits by finishing the job on demand, or raises while the engine holds."""

    def __init__(self, engine: ManualCopyEngine, job: CopyJob, layers: tuple[int, ...]) -> None:
        self._engine, self._job, self._layers = engine, job, layers
        self.settled = False
        self.failure: str | None = None

    def wait_layer(self, layer: int) -> None:
        """As `CopyTicket`; never blocks.

        Raises:
            CopyError: the job failed or was cancelled, or the engine holds it.
        """
        if layer not in self._layers:
            return
        if not self.settled:
            if self._engine.hold:
                raise CopyError(f"operation {self._job.op_id} is held by the test")
            self._engine.finish(self._job.op_id)
        if self.failure is not None:
            raise CopyError(f"operation {self._job.op_id} failed: {self.failure}")


class ManualCopyEngine:
    """Implements `CopyEngine` over a CPU stack, holding each job until `finish`.

    Args:
        clock: seconds for `CopyDone.seconds`; None reports 0.

    Attributes:
        submitted: every job ever given, in order.
        hold: when True, a `wait_layer` on an unfinished job raises instead of finishing it.
    """

    def __init__(self, stack: PoolStack, clock: Callable[[], float] | None = None) -> None:
        self._stack = stack
        self._mover = StackMover(stack)
        self._clock = clock or (lambda: 0.0)
        self._pending: dict[OpId, tuple[CopyJob, ManualTicket]] = {}
        self._started: set[OpId] = set()
        self._done: list[CopyDone] = []
        self.submitted: list[CopyJob] = []
        self.hold = False
        self.closed = False

    @property
    def pending(self) -> list[OpId]:
        """Unfinished operations, in the order of submission."""
        return list(self._pending)

    def submit(self, job: CopyJob) -> CopyTicket:
        """Hold `job` until the test finishes it."""
        assert not self.closed, "submitted after close"
        assert job.op_id not in self._pending, f"operation {job.op_id} is pending already"
        ticket = ManualTicket(self, job, job_layers(self._stack, job))
        self.submitted.append(job)
        self._pending[job.op_id] = (job, ticket)
        return ticket

    def start(self, op_id: OpId) -> None:
        """Make the job one that can no longer be cancelled."""
        assert op_id in self._pending
        self._started.add(op_id)

    def finish(self, op_id: OpId, ok: bool = True, reason: str = "") -> None:
        """Complete a job now: move and verify its bytes, or fail without moving any."""
        job, ticket = self._pending.pop(op_id)
        self._started.discard(op_id)
        began = self._clock()
        verdict = Verdict()
        if ok:
            verdict = self._move(job)
            ok, reason = not verdict.mismatched, "checksum" if verdict.mismatched else ""
        else:
            reason = reason or "copy_error"
        self._done.append(
            CopyDone(
                op_id,
                ok=ok,
                reason=reason,
                seconds=self._clock() - began,
                moved_bytes=job_bytes(self._stack, job) if ok else 0,
                verified=verdict.verified,
                mismatched=verdict.mismatched,
            )
        )
        ticket.settled, ticket.failure = True, None if ok else reason

    def finish_all(self, order: str | random.Random = "fifo") -> None:
        """Complete everything pending: "fifo", "reverse", or shuffled by a random source."""
        ops = self.pending
        if isinstance(order, random.Random):
            order.shuffle(ops)
        elif order == "reverse":
            ops.reverse()
        elif order != "fifo":
            raise ValueError(f"unknown order {order!r}")
        for op_id in ops:
            self.finish(op_id)

    def poll(self) -> list[CopyDone]:
        """Completions since the last call."""
        done, self._done = self._done, []
        return done

    def cancel(self, op_id: OpId) -> bool:
        """True for a pending job that `start` was not called for."""
        if op_id not in self._pending or op_id in self._started:
            return False
        self.finish(op_id, ok=False, reason="cancelled")
        return True

    def close(self) -> None:
        """Report what is pending as cancelled."""
        for op_id in self.pending:
            self.finish(op_id, ok=False, reason="cancelled")
        self.closed = True

    def _move(self, job: CopyJob) -> Verdict:
        if job.kind is CopyKind.BACKUP:
            return self._mover.backup(job)
        return self._mover.load_back(job, lambda layer: None)
