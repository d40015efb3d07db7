"""A rank's copy engine whose every fate is drawn: when a copy ends, how, and in which order.

Bytes move with the product's own mover at the moment a copy is finished, so what is read too early
or from the wrong place is wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from banyan.errors import CopyError
from banyan.pools.assembler import PoolStack
from banyan.tiers.moves import StackMover, job_bytes, job_layers
from banyan.tiers.ops import CopyDone, CopyJob, CopyKind, CopyTicket, OpId

_REASONS = ("copy_error", "checksum", "timeout", "odd")


@dataclass(frozen=True, slots=True)
class CopyOdds:
    """How copies fare, as chances of each.

    Args:
        at_once: it ends by the next poll.
        fails: it fails; half of the time after its bytes have moved.
        hangs: it takes longer than anybody waits for it.
        quick, slow: fewest and most polls that an ordinary one takes.
        unready_fails: a reader that comes before the end fails, and the copy with it.
        unready_gives_up: a reader that comes before the end fails, and the copy goes on.
        obeys_cancel: a copy that is called off has not begun, and ends.
    """

    at_once: float = 0.5
    fails: float = 0.0
    hangs: float = 0.0
    quick: int = 1
    slow: int = 4
    unready_fails: float = 0.0
    unready_gives_up: float = 0.0
    obeys_cancel: float = 0.5


class _Ticket:
    """A reader's handle: what is not there yet is brought, or not, as is drawn."""

    def __init__(self, engine: SimulatedCopies, job: CopyJob, layers: tuple[int, ...]) -> None:
        self._engine, self._job, self._layers = engine, job, layers
        self.settled = False
        self.failure: str | None = None

    def wait_layer(self, layer: int) -> None:
        """As `CopyTicket`; never blocks."""
        if layer not in self._layers:
            return
        if not self.settled:
            self._engine.come_early(self._job.op_id)
        if self.failure is not None:
            raise CopyError(f"operation {self._job.op_id} failed: {self.failure}")


@dataclass(slots=True)
class _Running:
    job: CopyJob
    ticket: _Ticket
    due: int
    reason: str


class SimulatedCopies:
    """Implements `CopyEngine` over a CPU stack.

    Args:
        rng: this rank's own.
        saw: counts what has happened, for all ranks together.

    Attributes:
        odds: may be changed while it runs.
    """

    def __init__(
        self, stack: PoolStack, odds: CopyOdds, rng: random.Random, saw: Counter[str]
    ) -> None:
        self.odds = odds
        self._stack, self._rng, self._saw = stack, rng, saw
        self._mover = StackMover(stack)
        self._running: dict[OpId, _Running] = {}
        self._done: list[CopyDone] = []
        self._polls = 0

    @property
    def unfinished(self) -> int:
        """Copies that this rank has not reported as ended."""
        return len(self._running) + len(self._done)

    def submit(self, job: CopyJob) -> CopyTicket:
        """Draw the fate of `job`."""
        rng, odds = self._rng, self.odds
        due = self._polls + (
            1 if rng.random() < odds.at_once else rng.randint(odds.quick, odds.slow)
        )
        if rng.random() < odds.hangs:
            due += rng.randint(10, 30)
            self._saw["hang"] += 1
        reason = rng.choice(_REASONS) if rng.random() < odds.fails else ""
        ticket = _Ticket(self, job, job_layers(self._stack, job))
        self._running[job.op_id] = _Running(job, ticket, due, reason)
        self._saw[job.kind.value] += 1
        return ticket

    def poll(self) -> list[CopyDone]:
        """Finish what is due, in an order that is drawn, and report it."""
        self._polls += 1
        due = [op_id for op_id, op in self._running.items() if op.due <= self._polls]
        if len(due) > 1:
            self._rng.shuffle(due)
        for op_id in due:
            self._finish(op_id)
        done, self._done = self._done, []
        return done

    def cancel(self, op_id: OpId) -> bool:
        """Whether it had not begun is drawn."""
        if op_id not in self._running or self._rng.random() >= self.odds.obeys_cancel:
            return False
        self._saw["cancelled"] += 1
        self._end(op_id, "cancelled")
        return True

    def come_early(self, op_id: OpId) -> None:
        """A reader wants what has not ended: finish it, fail it, or fail the reader alone."""
        fate = self._rng.random()
        if fate < self.odds.unready_fails:
            self._saw["early_reader_failed"] += 1
            self._end(op_id, "timeout")
        elif fate < self.odds.unready_fails + self.odds.unready_gives_up:
            self._saw["early_reader_gave_up"] += 1
            raise CopyError(f"operation {op_id} takes too long")
        else:
            self._saw["early_reader_served"] += 1
            self._finish(op_id)

    def close(self) -> None:
        """Report what runs as cancelled."""
        for op_id in list(self._running):
            self._end(op_id, "cancelled")

    def _finish(self, op_id: OpId) -> None:
        op = self._running[op_id]
        if not op.reason or self._rng.random() < 0.5:
            self._move(op.job)
        self._saw["failed"] += bool(op.reason)
        self._end(op_id, op.reason)

    def _end(self, op_id: OpId, reason: str) -> None:
        op = self._running.pop(op_id)
        op.ticket.settled, op.ticket.failure = True, reason or None
        moved = 0 if reason else job_bytes(self._stack, op.job)
        seconds = self._rng.random() * 0.02
        self._done.append(
            CopyDone(op_id, ok=not reason, reason=reason, seconds=seconds, moved_bytes=moved)
        )

    def _move(self, job: CopyJob) -> None:
        if job.kind is CopyKind.BACKUP:
            self._mover.backup(job)
        else:
            self._mover.load_back(job, lambda layer: None)
