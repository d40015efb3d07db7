"""What was decided about pool sizes: slots per component and tier, and the start-up table's rows.

Owns the records that `plan_sizes` fills and `assemble` obeys. Knows no tensor and no tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from banyan.spec import Point, Reach, Window


@dataclass(frozen=True, slots=True)
class PoolSize:
    """One component's pool on one tier.

    Args:
        component: the component's name.
        slots: pages, or states of a `Point` component.
        record_bytes: bytes of one slot, all layers, on one rank.
        shared_bytes: of those, bytes that all `ranks` keep once between them.
        ranks: ranks whose bytes the pool's total counts.
    """

    component: str
    slots: int
    record_bytes: int
    shared_bytes: int = 0
    ranks: int = 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on all `ranks`: each one's own, and what they share once."""
        return self.ranks * (self.record_bytes - self.shared_bytes) + self.shared_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool, on all `ranks`."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A line of the start-up table.

    Args:
        tier: `device` or `host`.
        tokens: tokens that fit, for page-shaped components; else None.
        windows: whole window reaches that fit, for `Window` components; else None.
        states: states that fit, for `Point` components; else None.
        share: of the tier's allocated bytes, 0 to 1.
        limiting: True for the pool that runs out first for the expected mix.
        ranks: ranks whose bytes `bytes` counts together.
    """

    tier: str
    component: str
    reach: str
    slots: int
    tokens: int | None
    windows: int | None
    states: int | None
    bytes: int
    share: float
    limiting: bool
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Slots per component and tier; `host` is empty when there is no host tier.

    Args:
        reaches: of the components, in order.
        page_size: tokens per page.
        device_limit, host_limit: name of the component whose pool runs out first for the expected
            mix; `host_limit` is None without a host tier.
    """

    device: tuple[PoolSize, ...]
    host: tuple[PoolSize, ...]
    reaches: tuple[Reach, ...]
    page_size: int
    device_limit: str
    host_limit: str | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of all device pools together, on one rank."""
        return sum(size.total_bytes for size in self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host pools together, on all ranks of the node."""
        return sum(size.total_bytes for size in self.host)

    def table_rows(self) -> list[SizeRow]:
        """A row per tier and component, device first."""
        rows = [self._row("device", i, s, self.device_bytes) for i, s in enumerate(self.device)]
        return rows + [self._row("host", i, s, self.host_bytes) for i, s in enumerate(self.host)]

    def _row(self, tier: str, index: int, size: PoolSize, total: int) -> SizeRow:
        reach = self.reaches[index]
        limit = self.device_limit if tier == "device" else self.host_limit
        pages = reach_pages(reach, self.page_size)
        return SizeRow(
            tier=tier,
            component=size.component,
            reach=str(reach),
            slots=size.slots,
            tokens=size.slots * self.page_size if reach.page_shaped else None,
            windows=size.slots // pages if isinstance(reach, Window) else None,
            states=size.slots if isinstance(reach, Point) else None,
            bytes=size.total_bytes,
            share=size.total_bytes / total if total else 0.0,
            limiting=size.component == limit,
            ranks=size.ranks,
        )


def reach_pages(reach: Reach, page_size: int) -> int:
    """Pages of a window's reach; 0 for the other reaches."""
    return math.ceil((reach.size - 1) / page_size) if isinstance(reach, Window) else 0
