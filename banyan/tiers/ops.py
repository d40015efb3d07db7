"""The words that the controller and the copy engines share: jobs, completions, tickets.

Knows slots and layers; knows no tree. A copy engine is given a `CopyJob`, moves the bytes, and
reports a `CopyDone`; what that means for the tree is the controller's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]
OpId = NewType("OpId", int)


class CopyKind(Enum):
    """Which way the bytes go."""

    BACKUP = "backup"
    """Device to host."""
    LOAD_BACK = "load_back"
    """Host to device."""


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Slots of one component to copy, pairwise: `src[i]` to `dst[i]`.

    Args:
        component: index into `CacheSpec.components`.
        src: int32[n], slots of the tier read from.
        dst: int32[n], slots of the tier written to.
    """

    component: int
    src: Slots
    dst: Slots


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One transfer: all its blocks complete together or the whole job fails.

    Args:
        verify: take and compare a SHA-256 of every record on both sides.
    """

    op_id: OpId
    kind: CopyKind
    blocks: tuple[CopyBlock, ...]
    verify: bool = False


@dataclass(frozen=True, slots=True)
class CopyDone:
    """What became of a job.

    Args:
        reason: empty when `ok`; else a short word for the miss counter (`copy_error`, `cancelled`,
            `checksum`, `timeout`).
        seconds: time spent copying, without queueing.
        moved_bytes: bytes written on the destination tier.
        verified: records whose SHA-256 was compared; `mismatched` of them differed.
    """

    op_id: OpId
    ok: bool
    reason: str = ""
    seconds: float = 0.0
    moved_bytes: int = 0
    verified: int = 0
    mismatched: int = 0


class CopyTicket(Protocol):
    """A reader's handle on a running load-back."""

    def wait_layer(self, layer: int) -> None:
        """Return once the bytes of `layer` are visible to the caller's stream.

        Raises:
            CopyError: the job failed or was cancelled; the bytes must not be read.
        """


class CopyEngine(Protocol):
    """Moves bytes between device and host pools.

    `submit`, `poll`, `cancel` and `close` are called from the scheduler thread only; none blocks
    on a copy (`close` waits for the running one). Completions may come in any order. A job's
    completion is observable by `poll` no later than its last layer is by `wait_layer`.
    """

    def submit(self, job: CopyJob) -> CopyTicket:
        """Queue `job`; its slots belong to the engine until its `CopyDone` is polled."""

    def poll(self) -> list[CopyDone]:
        """Completions since the last call."""

    def cancel(self, op_id: OpId) -> bool:
        """True when the job had not started: it will report `cancelled` at the next poll."""

    def close(self) -> None:
        """Stop threads and streams; queued jobs report `cancelled`."""


@dataclass(slots=True)
class CopyTotals:
    """Counters over all completions, monotone."""

    jobs: int = 0
    failed: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    verified: int = 0
    mismatched: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
