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
from banyan.tree.node import Holding, Node, OrderKey, Slots, Tier, empty, nothing

_SLACK = 64
"""Pushes between two sweeps of a queue, beside half its length."""


class TierIndex:
    """Totals, locks and eviction order of one tier.

    Args:
        tier: which of a node's holdings this index keeps.
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
        holding = self._own_holding(node)
        assert holding.slots[component] is None, (node, component)
        holding.slots[component] = slots
        if holding.locks[component]:
            self.protected[component] += len(slots)
        else:
            self.evictable[component] += len(slots)
        if component == 0 and node.parent is not None:
            node.full = node.on[0].slots[0]
            self._own_holding(node.parent).kids += 1
        self.enqueue(node, component)

    def add_leaf(self, node: Node, last: bool) -> None:
        """Count and queue what a new leaf has brought with it; `last`: it stays one."""
        parent = node.parent
        assert parent is not None
        parent.on[self._at].kids += 1
        holding = node.on[self._at]
        for component, slots in enumerate(holding.slots):
            if slots is not None:
                self.evictable[component] += len(slots)
                if component:
                    self._push(holding, node, component, holding.used[component])
                elif last:
                    self._push(holding, node, 0, self._full_key(node))

    def _own_holding(self, node: Node) -> Holding:
        """This tier's record of `node`, made (as recent as the device's) when there is none."""
        holding = node.on[self._at]
        if holding is self._nothing:
            device = node.on[0]
            holding = empty(len(self.evictable))
            holding.used[:] = device.used
            node.on = (device, holding)
        return holding

    def remove(self, node: Node, component: int) -> Slots:
        """Take `component`'s unlocked data away from `node`; returns its slots."""
        holding = node.on[self._at]
        slots = holding.slots[component]
        assert slots is not None and not holding.locks[component], (node, component)
        holding.slots[component] = None
        self.evictable[component] -= len(slots)
        if component == 0 and node.parent is not None:
            node.full = node.on[0].slots[0]
            above = node.parent.on[self._at]
            above.kids -= 1
            if not above.kids:
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
            locks = node.on[at].locks
            locks[0] += 1
            if locks[0] > 1:
                break
            node = node.parent  # type: ignore[assignment]  # a root is locked always
        if node is not below:
            if below.on[at].slots[0] is None:
                below = self._lowest_with_data(below)
            pages = (below.end - node.end) // self._page_size
            self.evictable[0] -= pages
            self.protected[0] += pages

    def unlock_path(self, node: Node) -> None:
        """Undo one `lock_path(node)`. Cost: O(nodes newly unlocked)."""
        at = self._at
        below = node
        while True:
            locks = node.on[at].locks
            locks[0] -= 1
            if locks[0]:
                break
            node = node.parent  # type: ignore[assignment]  # a root is locked always
        assert locks[0] > 0, node
        if node is not below:
            if below.on[at].slots[0] is None:
                below = self._lowest_with_data(below)
            pages = (below.end - node.end) // self._page_size
            self.evictable[0] += pages
            self.protected[0] -= pages
            self.enqueue(below, 0)

    def _lowest_with_data(self, node: Node) -> Node:
        """The first node from `node` up that has `Full` data here, or a root: as data is
        prefix-closed, all above it have too."""
        while node.on[self._at].slots[0] is None and node.parent is not None:
            node = node.parent
        return node

    def lock(self, node: Node, component: int) -> None:
        """Lock `Window` or `Point` data of one node, which must be present."""
        holding = node.on[self._at]
        slots = holding.slots[component]
        assert component and slots is not None, (node, component)
        holding.locks[component] += 1
        if holding.locks[component] == 1:
            self.evictable[component] -= len(slots)
            self.protected[component] += len(slots)

    def unlock(self, node: Node, component: int) -> None:
        """Undo one `lock` of one node."""
        holding = node.on[self._at]
        slots = holding.slots[component]
        locks = holding.locks
        assert slots is not None and locks[component] > 0, (node, component)
        locks[component] -= 1
        if not locks[component]:
            self.evictable[component] += len(slots)
            self.protected[component] -= len(slots)
            if holding.queued[component] != holding.used[component]:
                self._push(holding, node, component, holding.used[component])

    def lock_window(self, node: Node, component: int, low: int) -> Node:
        """Lock the data of the nodes from `node` up that lie beyond position `low` as a whole.

        Returns:
            The first node that does not, or lacks the data.
        """
        at = self._at
        moved = 0
        while node.start >= low < node.end:
            holding = node.on[at]
            slots = holding.slots[component]
            if slots is None:
                break
            holding.locks[component] += 1
            if holding.locks[component] == 1:
                moved += len(slots)
            node = node.parent  # type: ignore[assignment]  # a root ends at 0
        self.evictable[component] -= moved
        self.protected[component] += moved
        return node

    def unlock_window(self, node: Node, component: int, low: int) -> None:
        """Undo one lock of the data of each node from `node` up that ends beyond `low`."""
        at = self._at
        moved = 0
        while node.end > low:
            holding = node.on[at]
            slots, locks = holding.slots[component], holding.locks
            assert slots is not None and locks[component] > 0, (node, component)
            locks[component] -= 1
            if not locks[component]:
                moved += len(slots)
                if holding.queued[component] != holding.used[component]:
                    self._push(holding, node, component, holding.used[component])
            node = node.parent  # type: ignore[assignment]  # a root ends at 0
        self.evictable[component] += moved
        self.protected[component] -= moved

    # ---- order of eviction -----------------------------------------------------------------------

    def is_victim(self, node: Node, component: int) -> bool:
        """Whether this data may go now: present, unlocked and, for `Full`, a leaf of the tier."""
        holding = node.on[self._at]
        return (
            holding.slots[component] is not None
            and not holding.locks[component]
            and not (component == 0 and holding.kids)
        )

    def key_of(self, node: Node, component: int) -> OrderKey:
        """The place of this data in the order of eviction, as of now."""
        if component == 0:
            return self._full_key(node)
        return node.on[self._at].used[component]

    def _place(self, node: Node, holding: Holding, component: int) -> OrderKey | None:
        """`key_of` data that `is_victim`, else None: both in one, for what is done all the time."""
        if holding.slots[component] is None or holding.locks[component]:
            return None
        if component:
            return holding.used[component]
        return None if holding.kids else self._full_key(node)

    def enqueue(self, node: Node, component: int) -> None:
        """Queue data that may go, at its place in the order as of now.

        An entry at an earlier place is left to be skipped, which is cheaper than to find it again.
        """
        holding = node.on[self._at]
        key = self._place(node, holding, component)
        if key is not None and holding.queued[component] != key:
            self._push(holding, node, component, key)

    def pop(self, component: int) -> Node | None:
        """The next victim, taken off the queue; None when nothing may go."""
        queue = self._queues[component]
        at = self._at
        while (entry := queue.pop()) is not None:
            key, _, node = entry
            holding = node.on[at]
            if holding.queued[component] != key:
                continue  # a later push replaced this entry
            holding.queued[component] = None
            now = self._place(node, holding, component)
            if now == key:
                return node
            if now is not None:
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
        holding.queued[component] = key
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
        holding = node.on[self._at]
        if holding.queued[component] != key:
            return False
        if self.is_victim(node, component):
            return True
        holding.queued[component] = None
        return False
