"""One tier's side of the tree: which data it holds, what of it may go, and in which order.

Owns the totals (`held`, and `protected` of it, in slots by component), the lock counts and one lazy
eviction queue per component. The same code serves device and host. Called by `Tree` only.

Queues delete lazily: an entry is pushed when data becomes evictable and checked when popped, so a
use costs nothing here and an eviction O(log n) at most, whatever the size of the tree. Entries that
stand for nothing are swept out now and then, at amortised O(1) per push.
`Window` and `Point` data wait in a queue like that of the `Full` leaves, ordered by their own
stamps, rather than in an ordered map: a node that is split then leaves both halves in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from banyan.tree.lazy_queue import Entry, LazyQueue
from banyan.tree.node import Node, OrderKey, Part, Slots, Tier, nothing


class TierIndex:
    """Totals, locks and eviction order of one tier.

    Args:
        tier: which of a node's parts this index keeps.
        components: how many components the spec has.
        page_size: tokens of a page, to tell slots from positions.
        full_key: the order of `Full` leaves, None: by the node's stamp, which saves a call for
            each; other data goes by its own stamp.
    """

    def __init__(
        self,
        tier: Tier,
        components: int,
        page_size: int,
        full_key: Callable[[Node], OrderKey] | None,
    ) -> None:
        self.tier = tier
        self.held = [0] * components
        self.protected = [0] * components
        self._at = int(tier)  # as an index, a plain int takes a third of the time of an enum's
        self._page_size = page_size
        self._nothing = nothing(components)
        self._full_key = full_key
        self.by_stamp = full_key is None
        self.queues = [
            LazyQueue(partial(self._is_live, component)) for component in range(components)
        ]

    @property
    def evictable(self) -> list[int]:
        """Slots by component that no lock protects."""
        return [held - kept for held, kept in zip(self.held, self.protected, strict=True)]

    # ---- data comes and goes ---------------------------------------------------------------------

    def add(self, node: Node, component: int, slots: Slots) -> None:
        """Give `node` data of `component`. Cost: O(log n). Mutates node, totals, queue."""
        self._own(node)
        part = node.parts[self._at][component]
        assert part.slots is None, (node, component)
        part.slots = slots
        self.held[component] += len(slots)
        if part.locks:
            self.protected[component] += len(slots)
        if self._at == 0:
            node.present |= 1 << component
        if component == 0 and node.parent is not None:
            node.full = node.parts[0][0].slots
            self._own(node.parent)
            node.parent.parts[self._at][0].kids += 1
        self.enqueue(node, component)

    def queue_leaf(self, node: Node) -> None:
        """Queue the `Full` data of a new node that no other has grown below."""
        part = node.parts[0][0]
        if part.slots is not None:
            part.queued = key = self.key_of(node, 0)
            self.queues[0].push(key, node)

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
        self.held[component] -= len(slots)
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
                below = self.last_with_data(below, node)
            pages = (below.end - node.end) // self._page_size
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
            self.path_is_free(below, node)

    def path_is_free(self, node: Node, top: Node) -> None:
        """The last lock has gone of each from `node` up to, but not including, `top`."""
        if node.parts[self._at][0].slots is None:
            node = self.last_with_data(node, top)
        pages = (node.end - top.end) // self._page_size
        self.protected[0] -= pages
        if node is not top:
            self.enqueue(node, 0)

    def last_with_data(self, node: Node, top: Node) -> Node:
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
            self.protected[component] += len(slots)

    def unlock(self, node: Node, component: int) -> None:
        """Undo one `lock` of one node."""
        part = node.parts[self._at][component]
        slots = part.slots
        assert slots is not None and part.locks > 0, (node, component)
        part.locks -= 1
        if not part.locks:
            self.protected[component] -= len(slots)
            if part.queued != part.used:
                part.queued = part.used
                self.queues[component].push(part.used, node)

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
                    part.queued = part.used
                    self.queues[component].push(part.used, node)
            node = node.parent  # type: ignore[assignment]  # a root ends at 0
        self.protected[component] -= moved

    # ---- order of eviction -----------------------------------------------------------------------

    def is_victim(self, node: Node, component: int) -> bool:
        """Whether this data may go now: present, unlocked and, for `Full`, a leaf of the tier."""
        part = node.parts[self._at][component]
        return part.slots is not None and not part.locks and not (component == 0 and part.kids)

    def key_of(self, node: Node, component: int) -> OrderKey:
        """The place of this data in the order of eviction, as of now."""
        if component:
            return node.parts[self._at][component].used
        return node.stamp if self._full_key is None else self._full_key(node)

    def enqueue(self, node: Node, component: int) -> None:
        """Queue data that may go, at its place in the order as of now.

        An entry at an earlier place is left to be skipped, which is cheaper than to find it again.
        """
        part = node.parts[self._at][component]
        if part.slots is None or part.locks or (component == 0 and part.kids):
            return
        if component:
            key = part.used
        else:
            key = node.stamp if self._full_key is None else self._full_key(node)
        if part.queued != key:
            part.queued = key
            self.queues[component].push(key, node)

    def pop(self, component: int) -> Node | None:
        """The next victim, taken off the queue; None when nothing may go."""
        queue = self.queues[component]
        at = self._at
        while (entry := queue.pop()) is not None:
            key, _, node = entry
            part = node.parts[at][component]
            if part.queued != key:
                continue  # a later push replaced this entry
            part.queued = None
            if part.slots is None or part.locks or (component == 0 and part.kids):
                continue
            if component:
                now = part.used
            else:
                now = node.stamp if self._full_key is None else self._full_key(node)
            if now == key:
                return node
            part.queued = now
            self.queues[component].push(now, node)
        return None

    def peek(self, component: int, count: int) -> Iterator[Node]:
        """The next `count` victims in order, left queued."""
        taken: list[Node] = []
        while len(taken) < count and (node := self.pop(component)) is not None:
            taken.append(node)
        for node in taken:
            self.enqueue(node, component)
        return iter(taken)

    def _is_live(self, component: int, entry: Entry) -> bool:
        """Whether an entry still stands for its node; if not, the node is queued no longer."""
        key, _, node = entry
        part = node.parts[self._at][component]
        if part.queued != key:
            return False
        if self.is_victim(node, component):
            return True
        part.queued = None
        return False
