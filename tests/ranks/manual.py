"""Copies of one rank that end when the test says so, and calls made on every rank at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from banyan.errors import CopyError
from banyan.ranks import Fabric
from banyan.tiers.ops import CopyDone, CopyJob, CopyTicket, OpId
from tests.ranks.fabric import SimulatedFabric

RECORD_BYTES = [100, 7]


class Ticket:
    """A reader's handle that counts its waits, and fails if told to."""

    def __init__(self) -> None:
        self.waits = 0
        self.fails = False

    def wait_layer(self, layer: int) -> None:
        """As `CopyTicket`."""
        self.waits += 1
        if self.fails:
            raise CopyError("not loaded")


class Copies:
    """A rank's own engine: the test says what is done."""

    def __init__(self) -> None:
        self.done: list[CopyDone] = []
        self.tickets: dict[OpId, Ticket] = {}
        self.cancelled: list[OpId] = []
        self.closed = False

    def submit(self, job: CopyJob) -> CopyTicket:
        """See `CopyEngine`."""
        return self.tickets.setdefault(job.op_id, Ticket())

    def poll(self) -> list[CopyDone]:
        """See `CopyEngine`."""
        done, self.done = self.done, []
        return done

    def cancel(self, op_id: OpId) -> bool:
        """See `CopyEngine`."""
        self.cancelled.append(op_id)
        return True

    def close(self) -> None:
        """See `CopyEngine`."""
        self.closed = True

    def end(self, number: int, reason: str = "", seconds: float = 0.0, **more: int) -> None:
        """A copy has ended on this rank."""
        self.done.append(
            CopyDone(OpId(number), ok=not reason, reason=reason, seconds=seconds, **more)
        )


def on_ranks(size: int, call: Callable[[Fabric], Any]) -> list[Any]:
    """What `call` returns on each rank, or the error it raises there."""
    node = SimulatedFabric(size, random.Random(size))
    got: list[Any] = [None] * size

    def main(rank: int) -> None:
        try:
            got[rank] = call(node.end(rank))
        except Exception as error:
            got[rank] = error

    node.run([lambda rank=rank: main(rank) for rank in range(size)])  # type: ignore[misc]
    return got
