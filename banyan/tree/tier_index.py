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
from banyan.tree.node import Node, OrderKey, Part, Slots, Tier, nothing

_SLACK = 64
"""Pushes between two sweeps of a queue, beside half its length."""


class TierIndex:
    """Totals, locks and eviction order of one tier.

    Args:
        tier: which of a node's parts this index keeps.
        components: how many components the spec has.
        page_size: tokens of a page, to tell slots from positions.
        full_key: the order of `Full` leaves; other data goes by its own stamp.
    """

    def __init__(
        self, tier: Tier, components: int, page_size: int, full_key: Callable[[Node], OrderKey]
    ) -> None:
        self.tier = tier
        self.evictable = [0] * components
        self.protected = [0] * components
        self._at = int(tier)  # as an index, a plain int takes a third of the time of an enum's
        self._page_size = page_size
        self._nothing = nothing(components)
        self._full_key = full_key
        self._queues = [LazyQueue() for _ in range(components)]
        self._until_sweep = [_SLACK] * components

    # ---- data comes and goes ---------------------------------------------------------------------

    def add(self, node: Node, component: int, slots: Slots) -> None:
        """Give `node` data of `component`. Cost: O(log n). Mutates node, totals, queue."""
        self._own(node)
        part = node.parts[self._at][component]
        assert part.slots is None, (node, component)
        part.slots = slots
        if part.locks:
            self.protected[component] += len(slots)
        else:
            self.evictable[component] += len(slots)
        if self._at == 0:
            node.present |= 1 << component
        if component == 0 and node.parent is not None:
            node.full = node.parts[0][0].slots
            self._own(node.parent)
            node.parent.parts[self._at][0].kids += 1
        self.enqueue(node, component)

    def add_leaf(self, node: Node, stays: bool) -> None:
        """Count and queue what a new leaf has brought with it to the device.

        Args:
            stays: it remains a leaf; else a child of it is on its way.
        """
        parent = node.parent
        assert parent is not None
        parent.parts[self._at][0].kids += 1
        present = 0
        for component, part in enumerate(node.parts[self._at]):
            slots = part.slots
            if slots is not None:
                present |= 1 << component
                self.evictable[component] += len(slots)
                if component:
                    self._push(part, node, component, part.used)
                elif stays:
                    self._push(part, node, 0, self._full_key(node))
        node.present = present

    def _own(self, node: Node) -> None:
        """Give `node` a record of its own, as recent as the device's, if it has none here."""
        if node.parts[self._at] is self._nothing:
            device = node.parts[0]
            node.parts = device, tuple([Part(None, part.used) for part in device])

    def remove(self, node: Node, component: int) -> Slots:
        """Take `component`'s unlocked data away from `node`; returns its slots."""
        part = node.parts[self._at][component]
        slots = part.slots
        assert slots is not None and not part.locks, (node, component)
        part.slots = None
        self.evictable[component] -= len(slots)
        if self._at == 0:
            node.present &= ~(1 << component)
            if component == 0:
                node.full = None
                if node.chain is not None:
                    node.chain.forget(node)
        if component == 0 and node.parent is not None:
            node.parent.parts[self._at][0].kids -= 1
            self.enqueue(node.parent, 0)
        return slots

    # ---- locks -----------------------------------------------------------------------------------

    def lock_path(self, node: Node) -> None:
        """Lock `Full` data from `node` up. Stops at the first ancestor already locked.

        Cost: O(nodes newly locked).
        """
        at = self._at
        below = node
        while True:
            part = node.parts[at][0]
            part.locks = locks = part.locks + 1
            if locks > 1:
                break
            node = node.parent  # type: ignore[assignment]  # a root is locked always
        if node is not below:
            if below.parts[at][0].slots is None:
                below = self._last_with_data(below, node)
            pages = (below.end - node.end) // self._page_size
            self.evictable[0] -= pages
            self.protected[0] += pages

    def unlock_path(self, node: Node) -> None:
        """Undo one `lock_path(node)`. Cost: O(nodes newly unlocked)."""
        at = self._at
        below = node
        while True:
            part = node.parts[at][0]
            part.locks = locks = part.locks - 1
            if locks:
                break
            node = node.parent  # type: ignore[assignment]  # a root is locked always
        assert locks > 0, node
        if node is not below:
            if below.parts[at][0].slots is None:
                below = self._last_with_data(below, node)
            pages = (below.end - node.end) // self._page_size
            self.evictable[0] += pages
            self.protected[0] -= pages
            if below is not node:
                self.enqueue(below, 0)

    def _last_with_data(self, node: Node, top: Node) -> Node:
        """The first node from `node` up that has `Full` data here, or `top`: as such data is
        prefix-closed, all between the two have it, and no other than this one can be a leaf."""
        while node.parts[self._at][0].slots is None and node is not top:
            node = node.parent  # type: ignore[assignment]  # `top` is above
        return node

    def lock(self, node: Node, component: int) -> None:
        """Lock `Window` or `Point` data of one node, which must be present."""
        part = node.parts[self._at][component]
        slots = part.slots
        assert component and slots is not None, (node, component)
        part.locks += 1
        if part.locks == 1:
            self.evictable[component] -= len(slots)
            self.protected[component] += len(slots)

    def unlock(self, node: Node, component: int) -> None:
        """Undo one `lock` of one node."""
        part = node.parts[self._at][component]
        slots = part.slots
        assert slots is not None and part.locks > 0, (node, component)
        part.locks -= 1
        if not part.locks:
            self.evictable[component] += len(slots)
            self.protected[component] -= len(slots)
            if part.queued != part.used:
                self._push(part, node, component, part.used)

    def lock_window(self, node: Node, component: int, low: int) -> Node:
        """Lock the data of the nodes from `node` up that lie beyond position `low` as a whole.

        Returns:
            The first node that does not, or lacks the data.
        """
        at = self._at
        moved = 0
        while node.start >= low < node.end:
            part = node.parts[at][component]
            if part.slots is None:
                break
            part.locks += 1
            if part.locks == 1:
                moved += len(part.slots)
            node = node.parent  # type: ignore[assignment]  # a root ends at 0
        self.evictable[component] -= moved
        self.protected[component] += moved
        return node

    def unlock_window(self, node: Node, component: int, low: int) -> None:
        """Undo one lock of the data of each node from `node` up that ends beyond `low`."""
        at = self._at
        moved = 0
        while node.end > low:
            part = node.parts[at][component]
            assert part.slots is not None and part.locks > 0, (node, component)
            part.locks -= 1
            if not part.locks:
                moved += len(part.slots)
                if part.queued != part.used:
                    self._push(part, node, component, part.used)
            node = node.parent  # type: ignore[assignment]  # a root ends at 0
        self.evictable[component] += moved
        self.protected[component] -= moved

    # ---- order of eviction -----------------------------------------------------------------------

    def is_victim(self, node: Node, component: int) -> bool:
        """Whether this data may go now: present, unlocked and, for `Full`, a leaf of the tier."""
        part = node.parts[self._at][component]
        return part.slots is not None and not part.locks and not (component == 0 and part.kids)

    def key_of(self, node: Node, component: int) -> OrderKey:
        """The place of this data in the order of eviction, as of now."""
        return node.parts[self._at][component].used if component else self._full_key(node)

    def enqueue(self, node: Node, component: int) -> None:
        """Queue data that may go, at its place in the order as of now.

        An entry at an earlier place is left to be skipped, which is cheaper than to find it again.
        """
        part = node.parts[self._at][component]
        if part.slots is None or part.locks or (component == 0 and part.kids):
            return
        key = part.used if component else self._full_key(node)
        if part.queued != key:
            self._push(part, node, component, key)

    def pop(self, component: int) -> Node | None:
        """The next victim, taken off the queue; None when nothing may go."""
        queue = self._queues[component]
        at = self._at
        while (entry := queue.pop()) is not None:
            key, _, node = entry
            part = node.parts[at][component]
            if part.queued != key:
                continue  # a later push replaced this entry
            part.queued = None
            if part.slots is None or part.locks or (component == 0 and part.kids):
                continue
            now = part.used if component else self._full_key(node)
            if now == key:
                return node
            self._push(part, node, component, now)
        return None

    def peek(self, component: int, count: int) -> Iterator[Node]:
        """The next `count` victims in order, left queued."""
        taken: list[Node] = []
        while len(taken) < count and (node := self.pop(component)) is not None:
            taken.append(node)
        for node in taken:
            self.enqueue(node, component)
        return iter(taken)

    def _push(self, part: Part, node: Node, component: int, key: OrderKey) -> None:
        part.queued = key
        self._queues[component].push(key, node)
        self._until_sweep[component] -= 1
        if self._until_sweep[component] < 0:
            self._sweep(component)

    def _sweep(self, component: int) -> None:
        """Drop the entries that stand for nothing. Cost: O(queue), once in half as many pushes."""
        queue = self._queues[component]
        queue.keep(lambda entry: self._is_live(entry, component))
        self._until_sweep[component] = _SLACK + len(queue) // 2

    def _is_live(self, entry: Entry, component: int) -> bool:
        """Whether an entry still stands for its node; if not, the node is queued no longer."""
        key, _, node = entry
        part = node.parts[self._at][component]
        if part.queued != key:
            return False
        if self.is_victim(node, component):
            return True
        part.queued = None
        return False
