"""Freeing the shortfall: which data goes, in what order, and what becomes of its node.

`Full` data goes leaf first, by policy; `Window` and `Point` data may go from inner nodes too and
leaves a tombstone. A device leaf with a host copy is demoted, one without is dropped. What is freed
is exactly the shortfall: the last victim is cut to size. Works on a `Tree`, for either tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from banyan.tree.chain import take_over
from banyan.tree.node import Node, Slots, Tier, joined

if TYPE_CHECKING:
    from banyan.tree.tree import Tree

Spare = Callable[[Node, int], bool]
"""Asked before a victim goes: True when it is being saved (and locked) and must stay for now."""


class Freed:
    """Slots that left the tree, by tier and component, to be given back to the pools.

    Args:
        demoted, dropped: device pages whose host copy stayed, and `Full` pages that are gone.
        tombstones: `Window` and `Point` slots freed from nodes that stayed.
    """

    def __init__(self, width: int) -> None:
        self.slots: tuple[list[list[Slots]], list[list[Slots]]] = (
            [[] for _ in range(width)],
            [[] for _ in range(width)],
        )
        self.demoted = 0
        self.dropped = 0
        self.tombstones = 0

    def add(self, tier: Tier, component: int, slots: Slots) -> None:
        """Record slots that left `tier`."""
        self.slots[tier][component].append(slots)

    def count(self, tier: Tier, component: int) -> int:
        """Slots freed so far. Cost: O(nodes they came from)."""
        return sum(map(len, self.slots[tier][component]))

    def take(self, tier: Tier, component: int) -> Slots:
        """All slots freed there, int32[count], to be read only."""
        parts = self.slots[tier][component]
        return joined(parts) if parts else np.empty(0, np.int32)

    def extend(self, other: Freed) -> None:
        """Add what another eviction freed."""
        for tier in Tier:
            for component, parts in enumerate(other.slots[tier]):
                self.slots[tier][component] += parts
        self.demoted += other.demoted
        self.dropped += other.dropped
        self.tombstones += other.tombstones


def evict(tree: Tree, tier: Tier, need: Sequence[int], spare: Spare | None) -> Freed | None:
    """Free at least `need[c]` slots of each component on `tier`.

    Args:
        need: shortfall by component, in slots.
        spare: may keep a victim (and lock it), to back it up first; its slots count as coming, so
            less may be freed than asked, and the rest when what was spared is saved.

    Returns:
        None, and nothing changed, when `need` exceeds what may be evicted.

    Cost: O(evicted log n), plus O(len(edge)) for the one victim cut to size.
    """
    index = tree.index[tier]
    if any(n > e for n, e in zip(need, index.evictable, strict=True)):
        return None
    freed = Freed(tree.width)
    for component, wanted in enumerate(need):
        _evict(tree, tier, component, wanted - freed.count(tier, component), spare, freed)
    return freed


def _evict(
    tree: Tree, tier: Tier, component: int, short: int, spare: Spare | None, freed: Freed
) -> None:
    """Free `short` slots of one component, as far as there are any."""
    index = tree.index[tier]
    at = int(tier)
    while short > 0 and (victim := index.pop(component)) is not None:
        slots = victim.parts[at][component].slots
        assert slots is not None
        if len(slots) > short:
            victim = _cut_to_size(tree, victim, component, tier, short)
            slots = slots[:short]
        short -= len(slots)
        if spare is not None and spare(victim, component):
            continue
        if component == at == 0 and victim.parts[1] is tree.nothing:
            _drop_leaf(tree, victim, freed)
        else:
            drop(tree, victim, component, tier, freed)


def drop_unlocked(tree: Tree, roots: Sequence[Node]) -> Freed:
    """Free all unlocked data below `roots`, on both tiers. Cost: O(nodes below them)."""
    freed = Freed(tree.width)
    order = list(roots)
    for node in order:
        order.extend(node.children.values())
    for node in reversed(order):
        for component in range(tree.width):
            for tier in Tier:
                if node.parent is not None and tree.index[tier].is_victim(node, component):
                    drop(tree, node, component, tier, freed)
    return freed


def _cut_to_size(tree: Tree, node: Node, component: int, tier: Tier, short: int) -> Node:
    """The part of a victim that covers the shortfall: a leaf's tail, a window's front."""
    if component == 0:
        tree.split(node, node.end - short * tree.page_size)
        return node
    upper = tree.split(node, node.start + short * tree.page_size)
    tree.index[tier].enqueue(node, component)
    return upper


def _drop_leaf(tree: Tree, node: Node, freed: Freed) -> None:
    """`drop` of a device leaf that host has nothing of, the usual one, in one go."""
    parent = node.parent
    assert parent is not None and node.full is not None, node
    held = tree.device.held
    freed.dropped += len(node.full)
    for c, part in enumerate(node.parts[0]):
        slots = part.slots
        if slots is not None:
            freed.slots[0][c].append(slots)
            held[c] -= len(slots)
            part.slots = None
    node.full, node.present = None, 0
    parent.parts[0][0].kids -= 1
    _pass_on_recency(tree, node)
    if node.chain is not None:
        node.chain.pop()
    node.unlink()
    tree.epoch += 1


def drop(tree: Tree, node: Node, component: int, tier: Tier, freed: Freed) -> None:
    """Take one victim's data away, and with `Full` data all that depends on it."""
    if component:
        freed.add(tier, component, tree.index[tier].remove(node, component))
        freed.tombstones += 1
        tree.epoch += 1
        return
    other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
    survives = node.has(0, other)
    tiers = (tier, other) if not survives else (tier,) if tier is Tier.DEVICE else ()
    for t in tiers:
        for c in range(1, tree.width):
            if node.has(c, t):
                freed.add(t, c, tree.index[t].remove(node, c))
    _pass_on_recency(tree, node)
    full = tree.index[tier].remove(node, 0)
    freed.add(tier, 0, full)
    tree.epoch += 1
    if survives:
        if tier is Tier.DEVICE:
            freed.demoted += len(full)
            _rejoin(tree, node)
        return
    freed.dropped += len(full)
    tree.unlink(node)


def _rejoin(tree: Tree, node: Node) -> None:
    """Join a demoted node with its only child where both are on host alone and nothing holds them.

    Undoes the cuts of an eviction page by page, which would leave a node per page for good. The
    child stays, being the end. Cost: O(len(edge)), as the cut.
    """
    below = node.lone
    if below is None or not _may_join(tree, node, below):
        return
    for high, low in zip(node.parts[1], below.parts[1], strict=True):
        if high.slots is not None and low.slots is not None:
            low.slots, high.slots = joined([high.slots, low.slots]), None
            low.used = max(low.used, high.used)
    parent = node.parent
    assert parent is not None
    take_over(below, node)
    below.start, below.parent, below.first = node.start, parent, node.first
    below.link()
    below.stamp, below.hits = max(below.stamp, node.stamp), max(below.hits, node.hits)
    below.priority, below.born = max(below.priority, node.priority), min(below.born, node.born)
    tree.requeue(below)


def _may_join(tree: Tree, node: Node, below: Node) -> bool:
    """Whether the two hold the same kinds of data, on host only, with no lock and no claim."""
    if node.claims or below.claims or below.has(0, Tier.DEVICE):
        return False
    if any(part.locks for n in (node, below) for parts in n.parts for part in parts):
        return False
    return not any(node.has(c, Tier.HOST) for c in tree.need.points) and all(
        node.has(c, Tier.HOST) == below.has(c, Tier.HOST) for c, _ in tree.need.windows
    )


def _pass_on_recency(tree: Tree, node: Node) -> None:
    """A leaf's use was a use of its whole path: the parent inherits what is later or larger."""
    parent = node.parent
    if parent is None or parent.parent is None:
        return
    if node.stamp > parent.stamp:
        parent.stamp = node.stamp
    if node.hits > parent.hits:
        parent.hits = node.hits
    if node.priority > parent.priority:
        parent.priority = node.priority
    device, host = parent.parts
    if not device[0].kids or host is not tree.nothing:  # else it may not go yet
        tree.requeue(parent)
