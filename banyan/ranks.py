"""Agreement between ranks: what one rank alone knows must not steer what all do.

Every rank of a tensor-parallel engine runs the same scheduler on the same requests and keeps an
equal tree. Left to itself a rank knows three things that others do not: when its copies finish, how
they ended, and what its storage holds. All three are reduced here before they are used. Knows no
process and no torch: a `Fabric` does the talking. Called from each rank's scheduler thread.

  R1  whether ranks talk is decided by what all of them know, never by a local fact (INV-16);
  R2  a completion is applied once all ranks have it, and as its worst outcome;
  R3  a wait that fails is not an exception on one rank: all learn of it after the forward;
  R4  histories are compared whenever ranks report; a difference stops the engine and is explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from banyan.errors import CopyError, RankError
from banyan.tiers.journal import Entry, Journal, Mutation, first_difference
from banyan.tiers.ops import CopyDone, CopyEngine, CopyJob, CopyTicket, OpId

Words = npt.NDArray[np.int64]

REPORTED = 112
"""Transfers, oldest first, that one report can speak of; the rest wait for the next."""

REPORT_WORDS = 4 + 2 * REPORTED
"""A report always has this length: ranks that have drifted apart must still understand each other
well enough to say so."""

_PENDING, _OK = 0, 9
_REASONS = ("checksum", "copy_error", "timeout", "cancelled")
"""By severity; an outcome's code is 1 + its place here, and the worst rank's counts."""

_NEVER = np.iinfo(np.int64).max


class Fabric(Protocol):
    """How the ranks of one engine talk. Every call is made by all ranks, in the same order.

    Args:
        rank: this one's number; 0 leads.
        size: how many there are.
    """

    rank: int
    size: int

    def collect(self, words: Words) -> list[Words] | None:
        """Send `words`, of one length on all ranks, to rank 0; it gets all, others None.

        Raises:
            RankLostError: a rank is gone, or silent for too long.
        """

    def broadcast(self, message: bytes | None) -> bytes:
        """The `message` of rank 0, on every rank; others pass None. Raises as `collect`."""

    def gather(self, part: bytes) -> list[bytes]:
        """Every rank's `part`, by rank, on every rank. Raises as `collect`."""

    def wait_for_all(self, what: str) -> None:
        """Return when every rank has called this with the same `what`; for starts, which may be
        slower than a step. Raises as `collect`."""


class StepClock:
    """A clock that all ranks read alike: it stands still but for what rank 0 says.

    Attributes:
        now: seconds, monotonic.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _AgreedTicket:
    """A reader's handle that never raises: a failed wait is kept for the ranks to compare."""

    def __init__(self, ticket: CopyTicket) -> None:
        self._ticket = ticket
        self.failed = False

    def wait_layer(self, layer: int) -> None:
        """As `CopyTicket`, but that a failure only sets `failed`: other ranks are in the same
        forward pass, and would wait for this one in vain (R3)."""
        if self.failed:
            return
        try:
            self._ticket.wait_layer(layer)
        except CopyError:
            self.failed = True


class AgreedCopies:
    """A copy engine whose completions are those of all ranks.

    Implements `CopyEngine` over this rank's own. `poll` gives what was agreed; `report` and
    `agree` stand before and after a talk between ranks, which is not this object's business.

    Args:
        inner: this rank's copy engine.
        record_bytes: bytes per slot by component, the same on all ranks: with them moved bytes, and
            so the measured speed that decides what is worth loading, are the same too.
    """

    def __init__(self, inner: CopyEngine, record_bytes: Sequence[int]) -> None:
        self.inner = inner
        self._record_bytes = record_bytes
        self._open: dict[OpId, tuple[CopyJob, _AgreedTicket]] = {}
        self._mine: dict[OpId, CopyDone] = {}
        self._agreed: list[CopyDone] = []

    @property
    def outstanding(self) -> int:
        """Transfers submitted and not agreed on; equal on all ranks."""
        return len(self._open)

    def submit(self, job: CopyJob) -> CopyTicket:
        """Queue `job` on this rank; every rank does the same."""
        ticket = _AgreedTicket(self.inner.submit(job))
        self._open[job.op_id] = job, ticket
        return ticket

    def report(self) -> Words:
        """What this rank knows of the transfers all have open: int64[2 * REPORTED], outcomes and
        then durations, negated, so that the least of all ranks is the worst of both."""
        for done in self.inner.poll():
            self._mine[done.op_id] = done
        words = np.full(2 * REPORTED, _NEVER, np.int64)
        for at, op_id in zip(range(REPORTED), self._open, strict=False):
            mine = self._mine.get(op_id)
            words[at] = _PENDING if mine is None else _code(mine)
            words[REPORTED + at] = 0 if mine is None else -int(mine.seconds * 1e9)
        return words

    def agree(self, least: Words) -> None:
        """Take in the least of all ranks' reports: what all have is given by the next `poll`."""
        codes, times = least[:REPORTED], least[REPORTED:]
        for at, op_id in enumerate(list(self._open)[:REPORTED]):
            code = int(codes[at])
            if code == _PENDING:
                continue
            job, ticket = self._open.pop(op_id)
            mine = self._mine.pop(op_id)
            moved = sum(len(b.dst) * self._record_bytes[b.component] for b in job.blocks)
            ok = code == _OK
            ticket.failed |= not ok  # here it may have ended well; its slots are others' now
            self._agreed.append(
                replace(
                    mine,
                    ok=ok,
                    reason="" if ok else _REASONS[code - 1],
                    seconds=-int(times[at]) / 1e9,
                    moved_bytes=moved if ok else 0,
                )
            )

    def poll(self) -> list[CopyDone]:
        """What has been agreed on since the last call."""
        agreed, self._agreed = self._agreed, []
        return agreed

    def cancel(self, op_id: OpId) -> bool:
        """Ask this rank's engine to take a job back; False, for another may have begun it."""
        self.inner.cancel(op_id)
        return False

    def close(self) -> None:
        """Stop this rank's engine."""
        self.inner.close()


def _code(done: CopyDone) -> int:
    if done.ok:
        return _OK
    known = done.reason if done.reason in _REASONS else "copy_error"
    return 1 + _REASONS.index(known)


class Agreement:
    """What one rank says to the others and hears from them.

    Args:
        fabric: does the talking.
        journal: this rank's history.

    Attributes:
        copies: this rank's transfers, once there are any.
        talks: conversations so far, of every kind; equal on all ranks.
    """

    def __init__(self, fabric: Fabric, journal: Journal) -> None:
        self.fabric, self.journal = fabric, journal
        self.copies: AgreedCopies | None = None
        self.talks = 0

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.fabric.rank == 0

    @property
    def outstanding(self) -> int:
        """Transfers not agreed on; equal on all ranks."""
        return 0 if self.copies is None else self.copies.outstanding

    # ---- a step's report: up, and down with the leader's next message ----------------------------

    def collect(self, fact: int = 0) -> Words | None:
        """Tell rank 0 what this one knows. On rank 0: the least of all reports, and whether all
        histories are equal; elsewhere None.

        Args:
            fact: anything else, of which the least is of interest.
        """
        copies = self.copies
        own = np.empty(REPORT_WORDS, np.int64)
        own[:4] = (fact, self.outstanding, self.journal.count, _signed(self.journal.digest))
        own[4:] = _NEVER if copies is None else copies.report()
        self.talks += 1
        reports = self.fabric.collect(own)
        if reports is None:
            return None
        every = np.stack(reports)
        least: Words = every.min(axis=0)
        same = bool((every[:, 1:4] == every[0, 1:4]).all())
        least[1] = int(same)
        return least

    def take_in(self, least: Words) -> int:
        """The outcome of `collect`, as rank 0 has told it: the least `fact`.

        Raises:
            RankError: histories differ; the message names the first operation that does.
        """
        if not least[1]:
            raise RankError(self._explanation())
        if self.copies is not None:
            self.copies.agree(least[4:])
        return int(least[0])

    def settle(self, fact: int = 0) -> int:
        """Report and hear the outcome at once: for the middle of a step. Raises as `take_in`."""
        least = self.collect(fact)
        self.talks += 1
        heard = self.fabric.broadcast(None if least is None else least.tobytes())
        return self.take_in(np.frombuffer(heard, np.int64))

    # ---- other reductions ------------------------------------------------------------------------

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over all ranks; `values` has one length on all."""
        self.talks += 2
        got = self.fabric.collect(np.array(values, np.int64))
        told = None if got is None else np.stack(got).min(axis=0).tobytes()
        return [int(v) for v in np.frombuffer(self.fabric.broadcast(told), np.int64)]

    def most(self, values: Sequence[int]) -> list[int]:
        """The greatest of each value over all ranks."""
        return [-v for v in self.least([-v for v in values])]

    def hits(self, lengths: Sequence[int]) -> list[int]:
        """What all ranks found in storage of what each found there (tokens); use nothing else."""
        agreed = self.least(lengths)
        self.journal.note(Mutation.HITS, *agreed)
        return agreed

    # ---- when histories differ -------------------------------------------------------------------

    def _explanation(self) -> str:
        """Compare what all ranks remember; every rank gets the same answer."""
        own = msgspec.msgpack.encode(self.journal.tail())
        self.talks += 1
        histories = [_decode(part) for part in self.fabric.gather(own)]
        found = first_difference(histories)
        if found is None:
            return (
                "the ranks have drifted apart, in something older than the last "
                f"{len(histories[0])} operations, or in what is open"
            )
        index, entries = found
        told = ", ".join(f"rank {r}: {e or 'nothing'}" for r, e in enumerate(entries))
        return f"the ranks have drifted apart; the first difference is operation {index}: {told}"


_history = msgspec.msgpack.Decoder(list[Entry])


def _decode(part: bytes) -> list[Entry]:
    return _history.decode(part)


def _signed(digest: int) -> int:
    """A digest as a number of 64 bits."""
    return digest & (2**63 - 1)
