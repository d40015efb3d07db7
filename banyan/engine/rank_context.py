"""One rank's place among the others: its fabric, its history, the clock that all go by.

Owns what ranks settle before they start (who shares a machine, how many slots the poorest has) and
hands out what makes a part of an engine one of several ranks. Made once for each process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from banyan.engine.ports import Model
from banyan.engine.ranked_model import RankedModel
from banyan.engine.scheduler import Pace
from banyan.pools.plan import SizePlan
from banyan.pools.shared import SharedHost
from banyan.ranks import AgreedCopies, Agreement, Fabric, StepClock
from banyan.tiers.journal import Journal
from banyan.tiers.ops import CopyEngine


class RankContext:
    """What one rank needs to be built and to run: its fabric, its history, the common clock.

    Args:
        fabric: how it talks.
        watch: seconds, monotonic, of this process: times prefill, and on rank 0 all time limits.

    Attributes:
        clock: for everything whose decisions depend on time.
        speeds: prefill chunks timed since the last frame; used on rank 0 only.
        node: the ranks of this machine, ascending, once `find_node` was called.
    """

    def __init__(self, fabric: Fabric, watch: Callable[[], float] = time.monotonic) -> None:
        self.fabric, self.watch = fabric, watch
        self.journal = Journal()
        self.agreement = Agreement(fabric, self.journal)
        self.clock = StepClock()
        self.speeds: list[tuple[int, float]] = []
        self.node: list[int] = []
        self.pace = Pace(watch, lambda tokens, seconds: self.speeds.append((tokens, seconds)))

    @property
    def rank(self) -> int:
        """This one's number."""
        return self.fabric.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.fabric.size

    def find_node(self) -> list[int]:
        """The ranks that can share memory with this one, itself included. Called by all ranks."""
        if not self.node:
            parts = self.fabric.gather(_machine())
            self.node = [r for r, part in enumerate(parts) if part == parts[self.rank]]
        return self.node

    def sharing(self, pin: bool = False) -> SharedHost:
        """Host memory of what is equal on all ranks, one copy for each machine; its lowest rank
        writes. Called by all ranks."""
        writer = self.find_node()[0]

        def exchange(part: bytes | None) -> bytes:
            return self.fabric.gather(part or b"")[writer]

        return SharedHost(exchange, writes=self.rank == writer, pin=pin)

    def agree_plan(self, plan: SizePlan) -> SizePlan:
        """`plan` with the slots of the rank that has the fewest, pool by pool. Called by all."""
        sizes = [*plan.device, *plan.host]
        slots = self.agreement.least([size.slots for size in sizes])
        agreed = [replace(size, slots=n) for size, n in zip(sizes, slots, strict=True)]
        count = len(plan.device)
        return replace(plan, device=tuple(agreed[:count]), host=tuple(agreed[count:]))

    def copies(self, engine: CopyEngine, record_bytes: Sequence[int]) -> AgreedCopies:
        """This rank's copy engine, made one whose completions are those of all ranks.

        Args:
            record_bytes: as agreed.
        """
        self.agreement.copies = AgreedCopies(engine, record_bytes)
        return self.agreement.copies

    def model(self, model: Model, exact: bool = False) -> RankedModel:
        """This rank's model, made one that fails on all ranks or on none.

        Args:
            exact: see `RankedModel`.
        """
        return RankedModel(model, self.agreement, exact)


def _machine() -> bytes:
    """Equal for processes that see each other: the same boot of one machine, the same namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    space = Path("/proc/self/ns/pid")
    return f"{name} {space.stat().st_ino if space.exists() else 0}".encode()
