"""One tier's side of the tree: which data it holds, what of it may go, and in which order.

Owns the totals (`evictable`, `protected`, in slots by component), the lock counts and one lazy
eviction queue per component. The same code serves device and host. Called by `Tree` only.

Queues delete lazily: an entry is pushed when data becomes evictable and checked when popped, so a
use costs nothing here and an eviction O(log n) at most, whatever the size of the tree. Entries that
stand for nothing are swept out now and then, at amortised O(1) per push.
`Window` and `Point` data wait in a queue like that of the `Full` leaves, ordered by their own
stamps, rather than in an ordered map: a node that is split then leaves both halves in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from banyan.tree.lazy_queue import Entry, LazyQueue
from banyan.tree.node import Holding, Node, OrderKey, Slots, Tier, nothing

_SLACK = 64


class TierIndex:
    """Totals, locks and eviction order of one tier.

    Args:
        tier: which of a node's holdings this index keeps.
        components: how many components the spec has.
        full_key: the order of `Full` leaves; other data goes by its own stamp.
    """

    def __init__(self, tier: Tier, components: int, full_key: Callable[[Node], OrderKey]) -> None:
        self.tier = tier
        self.evictable = [0] * components
        self.protected = [0] * components
        self._full_key = full_key
        self._queues = [LazyQueue() for _ in range(components)]
        self._pushes = [0] * components

    # ---- data comes and goes ---------------------------------------------------------------------

    def add(self, node: Node, component: int, slots: Slots) -> None:
        """Give `node` data of `component`. Cost: O(log n). Mutates node, totals, queue."""
        holding = self._own_holding(node)
        assert holding.slots[component] is None, (node, component)
        holding.slots[component] = slots
        if holding.locks[component]:
            self.protected[component] += len(slots)
        else:
            self.evictable[component] += len(slots)
        if component == 0 and node.parent is not None:
            self._own_holding(node.parent).kids += 1
        self.enqueue(node, component)

    def _own_holding(self, node: Node) -> Holding:
        """This tier's record of `node`, made (as recent as the device's) when there is none."""
        width = len(self.evictable)
        if node.on[self.tier] is nothing(width):
            node.on[self.tier] = Holding(width)
            node.on[self.tier].used[:] = node.on[Tier.DEVICE].used
        return node.on[self.tier]

    def remove(self, node: Node, component: int) -> Slots:
        """Take `component`'s unlocked data away from `node`; returns its slots."""
        holding = node.on[self.tier]
        slots = holding.slots[component]
        assert slots is not None and not holding.locks[component], (node, component)
        holding.slots[component] = None
        self.evictable[component] -= len(slots)
        if component == 0 and node.parent is not None:
            node.parent.on[self.tier].kids -= 1
            self.enqueue(node.parent, 0)
        return slots

    # ---- locks -----------------------------------------------------------------------------------

    def lock_path(self, node: Node) -> None:
        """Lock `Full` data from `node` up. Stops at the first ancestor already locked.

        Cost: O(nodes newly locked).
        """
        tier = self.tier
        moved = 0
        while node.parent is not None:
            holding = node.on[tier]
            holding.locks[0] += 1
            if holding.locks[0] > 1:
                break
            slots = holding.slots[0]
            if slots is not None:
                moved += len(slots)
            node = node.parent
        self.evictable[0] -= moved
        self.protected[0] += moved

    def unlock_path(self, node: Node) -> None:
        """Undo one `lock_path(node)`. Cost: O(nodes newly unlocked)."""
        tier = self.tier
        moved = 0
        while node.parent is not None:
            holding = node.on[tier]
            holding.locks[0] -= 1
            assert holding.locks[0] >= 0, node
            if holding.locks[0]:
                break
            slots = holding.slots[0]
            if slots is not None:
                moved += len(slots)
                if not holding.kids:
                    self.enqueue(node, 0)
            node = node.parent
        self.evictable[0] += moved
        self.protected[0] -= moved

    def lock(self, node: Node, component: int) -> None:
        """Lock `Window` or `Point` data of one node, which must be present."""
        holding = node.on[self.tier]
        slots = holding.slots[component]
        assert component and slots is not None, (node, component)
        holding.locks[component] += 1
        if holding.locks[component] == 1:
            self.evictable[component] -= len(slots)
            self.protected[component] += len(slots)

    def unlock(self, node: Node, component: int) -> None:
        """Undo one `lock` of one node."""
        holding = node.on[self.tier]
        slots = holding.slots[component]
        assert slots is not None and holding.locks[component] > 0, (node, component)
        holding.locks[component] -= 1
        if not holding.locks[component]:
            self.evictable[component] += len(slots)
            self.protected[component] -= len(slots)
            self.enqueue(node, component)

    # ---- order of eviction -----------------------------------------------------------------------

    def is_victim(self, node: Node, component: int) -> bool:
        """Whether this data may go now: present, unlocked and, for `Full`, a leaf of the tier."""
        holding = node.on[self.tier]
        return (
            holding.slots[component] is not None
            and not holding.locks[component]
            and not (component == 0 and holding.kids)
        )

    def key_of(self, node: Node, component: int) -> OrderKey:
        """The place of this data in the order of eviction, as of now."""
        if component == 0:
            return self._full_key(node)
        return node.on[self.tier].used[component]

    def enqueue(self, node: Node, component: int) -> None:
        """Queue data that may go, at its place in the order as of now.

        An entry at an earlier place is left to be skipped, which is cheaper than to find it again.
        """
        if not self.is_victim(node, component):
            return
        key = self.key_of(node, component)
        holding = node.on[self.tier]
        if holding.queued[component] != key:
            self._push(holding, node, component, key)

    def pop(self, component: int) -> Node | None:
        """The next victim, taken off the queue; None when nothing may go."""
        queue = self._queues[component]
        while (entry := queue.pop()) is not None:
            key, _, node = entry
            holding = node.on[self.tier]
            if holding.queued[component] != key:
                continue  # a later push replaced this entry
            holding.queued[component] = None
            if not self.is_victim(node, component):
                continue
            now = self.key_of(node, component)
            if now == key:
                return node
            self._push(holding, node, component, now)
        return None

    def peek(self, component: int, count: int) -> Iterator[Node]:
        """The next `count` victims in order, left queued."""
        taken: list[Node] = []
        while len(taken) < count and (node := self.pop(component)) is not None:
            taken.append(node)
        for node in taken:
            self.enqueue(node, component)
        return iter(taken)

    def _push(self, holding: Holding, node: Node, component: int, key: OrderKey) -> None:
        queue = self._queues[component]
        holding.queued[component] = key
        queue.push(key, node)
        self._pushes[component] += 1
        if self._pushes[component] > _SLACK + len(queue) // 2:
            self._pushes[component] = 0
            queue.keep(lambda entry: self._is_live(entry, component))

    def _is_live(self, entry: Entry, component: int) -> bool:
        """Whether an entry still stands for its node; if not, the node is queued no longer."""
        key, _, node = entry
        holding = node.on[self.tier]
        if holding.queued[component] != key:
            return False
        if self.is_victim(node, component):
            return True
        holding.queued[component] = None
        return False
