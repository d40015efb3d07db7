"""A running transfer as the controller sees it: what it pinned, what it will publish.

Knows nodes and slots; knows no bytes. Made, applied and ended by `Controller` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from banyan.tiers.ops import CopyBlock, CopyKind, CopyTicket, OpId, Slots
from banyan.tree.node import Claim, Node, OrderKey, Tier
from banyan.tree.tree import Tree

NO_SLOTS = np.empty(0, np.int32)


class Victim(NamedTuple):
    """Device data chosen to go, and its place in the order of eviction when it was chosen."""

    node: Node
    component: int
    key: OrderKey


@dataclass(slots=True, eq=False)
class Operation:
    """One backup or load-back from submission to application.

    Args:
        node: the node whose boundary the transfer serves.
        generation: of the tree when it was submitted; an older one publishes nothing.
        claims: its parts, by node and component; a split under it adds to them.
        paths: (tier, node) of the `Full` paths it keeps locked.
        on_end: called once it is applied or has failed, with whether it succeeded; the request
            that waits for a load-back, None when there is none any more.
        victim: device data that goes as soon as this backup of it has ended.
        deadline: clock reading after which nobody waits for it any longer.
        abandoned: past its deadline; its slots come back when the engine lets go of them.
    """

    op_id: OpId
    kind: CopyKind
    node: Node
    generation: int
    deadline: float
    claims: list[Claim] = field(default_factory=list)
    paths: list[tuple[Tier, Node]] = field(default_factory=list)
    on_end: Callable[[bool], None] | None = None
    ticket: CopyTicket | None = None
    victim: Victim | None = None
    abandoned: bool = False

    @property
    def source(self) -> Tier:
        """The tier read from."""
        return Tier.DEVICE if self.kind is CopyKind.BACKUP else Tier.HOST

    @property
    def target(self) -> Tier:
        """The tier written to."""
        return Tier.HOST if self.kind is CopyKind.BACKUP else Tier.DEVICE

    # ---- pins (INV-09) ---------------------------------------------------------------------------

    def pin_path(self, tree: Tree, tier: Tier, node: Node) -> None:
        """Keep the `Full` data of `node` and its ancestors on `tier`."""
        tree.index[tier].lock_path(node)
        self.paths.append((tier, node))

    def claim(
        self, tree: Tree, node: Node, component: int, tier: Tier, src: Slots, dst: Slots
    ) -> None:
        """Take part in `node`: keep its data of `component` on `tier` while this runs."""
        part = Claim(self, node, component, tier, src, dst)
        self.claims.append(part)
        node.claims = [*(node.claims or ()), part]
        if component:
            tree.index[tier].lock(node, component)

    def unpin(self, tree: Tree) -> None:
        """Give back every pin, exactly once, wherever splits have carried them."""
        for part in self.claims:
            node = part.node
            rest = [c for c in node.claims or () if c is not part]
            node.claims = rest or None
            if part.component:
                tree.index[part.pinned].unlock(node, part.component)
        for tier, node in self.paths:
            tree.index[tier].unlock_path(node)
        self.paths.clear()

    # ---- what moves ------------------------------------------------------------------------------

    def moving(self) -> list[Claim]:
        """The claims that move bytes, parents before children, `Full` before what rests on it."""
        return sorted(
            (part for part in self.claims if len(part.dst)),
            key=lambda part: (part.component, part.node.end),
        )

    def blocks(self) -> tuple[CopyBlock, ...]:
        """What the copy engine is to do, one block per component."""
        by_component: dict[int, list[Claim]] = {}
        for part in self.moving():
            by_component.setdefault(part.component, []).append(part)
        return tuple(
            CopyBlock(
                component,
                np.concatenate([p.src for p in parts]),
                np.concatenate([p.dst for p in parts]),
            )
            for component, parts in by_component.items()
        )

    def target_slots(self, width: int) -> list[Slots]:
        """All slots it writes to, by component."""
        parts: list[list[Slots]] = [[] for _ in range(width)]
        for part in self.claims:
            parts[part.component].append(part.dst)
        return [np.concatenate(p) if p else NO_SLOTS for p in parts]
