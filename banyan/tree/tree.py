"""The radix tree: one structure for every component and both tiers.

Owns nodes, edges, slots (as numbers), locks, recency and the order of eviction. Knows no tensor,
no thread, no device and no clock: time is a count of uses. Whatever it frees it hands back to the
caller, who gives it to the pools. Called from the scheduler thread only.

Rules kept at all times (checked by `banyan.tree.check`):
  T1  every edge is a whole number of pages, children differ in their first page;
  T2  device `Full` data is prefix-closed, host `Full` data likewise (INV-08);
  T3  every node but a root has `Full` data on a tier;
  T4  device `Window`/`Point` data lies only where device `Full` data is;
  T5  what is locked stays where it is (INV-04);
  T6  a chain's members are only children in a row, and its text and slots are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from banyan.spec import CacheSpec
from banyan.tree.chain import parted
from banyan.tree.eviction import Freed, Spare, drop_unlocked, evict
from banyan.tree.growth import COLD, insert
from banyan.tree.keys import TOKEN_BYTES
from banyan.tree.match import Coverage, Match, coverage_of, match
from banyan.tree.node import Claim, Mark, Node, Part, Parts, Slots, Tier, nothing
from banyan.tree.policies import Lru, Policy
from banyan.tree.tier_index import TierIndex

_MIN_ROOTS = 64


class Tree:
    """A radix tree over token keys, one root per namespace.

    Args:
        spec: the components and the page size.
        policy: order of eviction of `Full` leaves, on both tiers.
        mirrors_first: host copies of data that is also on device go before all others. Right where
            data comes to host as it leaves the device. Where it comes as it is committed, the
            copies of what leaves next would go first, and the host would keep what is oldest.
    """

    def __init__(
        self, spec: CacheSpec, policy: Policy | None = None, mirrors_first: bool = True
    ) -> None:
        self.spec = spec
        self.page_size = spec.page_size
        self.page_bytes = spec.page_size * TOKEN_BYTES
        self.policy = policy or Lru()
        self.need: Coverage = coverage_of(spec)
        self.width = len(spec.components)
        self.others = range(1, self.width)
        self.nothing = nothing(self.width)
        self._page_shaped = sum(
            1 << c for c, component in enumerate(spec.components) if component.reach.page_shaped
        )
        self._unlocked: list[int | None] = [0] + [None] * (self.width - 1)
        self.roots: dict[bytes, Node] = {}
        self.detached: list[Node] = []
        self._roots_limit = _MIN_ROOTS
        self.epoch = 0
        self.tick = 0
        key, by_stamp = self.policy.key, type(self.policy) is Lru
        device_key = None if by_stamp else key
        self.device = TierIndex(Tier.DEVICE, self.width, self.page_size, device_key)
        host_key = (lambda n: (n.full is None, key(n))) if mirrors_first else device_key
        self.host = TierIndex(Tier.HOST, self.width, self.page_size, host_key)
        self.index = (self.device, self.host)

    # ---- reading ---------------------------------------------------------------------------------

    match = match  # a call less than a method that calls it, a tenth of a short match

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first, detached ones included. Cost: O(nodes)."""
        stack = [*self.roots.values(), *self.detached]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(reversed(node.children.values()))

    def missing(self, node: Node, tier: Tier) -> list[tuple[Node, int]]:
        """What resuming at `node.end` needs and `tier` lacks, as (node, component), top first."""
        lacking: list[tuple[Node, int]] = []
        n = node
        while n.parent is not None and not n.has(0, tier):
            lacking.append((n, 0))
            n = n.parent
        for component, reach in self.need.windows:
            n = node
            while n.parent is not None and n.end > node.end - reach:
                if not n.has(component, tier):
                    lacking.append((n, component))
                n = n.parent
        lacking += [(node, c) for c in self.need.points if node.parent and not node.has(c, tier)]
        lacking.sort(key=lambda item: (item[1], item[0].end))
        return lacking

    # ---- boundaries ------------------------------------------------------------------------------

    def root(self, namespace: bytes) -> Node:
        """The root of `namespace`, made when it is not there. Cost: amortised O(1).

        Roots that nothing hangs on are forgotten now and then: hold a root no longer than a step.
        """
        root = self.roots.get(namespace)
        if root is None:
            if len(self.roots) >= self._roots_limit:
                self.roots = {name: node for name, node in self.roots.items() if node.children}
                self._roots_limit = 2 * len(self.roots) + _MIN_ROOTS
            device, host = ([Part() for _ in range(self.width)] for _ in Tier)
            device[0].locks = host[0].locks = 1  # see `Part.locks`
            parts = tuple(device), tuple(host)
            root = self.roots[namespace] = Node(None, b"", b"", 0, 0, parts)
        return root

    def node_at(self, match: Match, boundary: int) -> Node:
        """The node that ends at `boundary` of a match; splits when it lies inside an edge.

        The match may be older than the last change: it is then made again, and the boundary must
        still be matched (callers that hold nothing in between call this at once).
        """
        if not boundary:
            return self.root(match.namespace)
        if match.epoch != self.epoch:
            match = self.match(match.key, match.namespace)
        assert boundary <= match.full_len, (boundary, match.full_len)
        node = next(n for n in reversed(match.path) if n.start < boundary)
        return node if node.end == boundary else self.split(node, boundary)

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` at position `at`; returns the new upper half, `node` stays the lower.

        Page-shaped data and running claims divide by position; a state stays with the lower half,
        whose end it is; locks of both halves are those of the whole. Cost: O(len(edge)).
        """
        parent = node.parent
        assert parent is not None and node.start < at < node.end, (node, at)
        pages = (at - node.start) // self.page_size
        cut = pages * self.page_bytes
        device, host = node.parts
        parts = self._front(device, pages), self._front(host, pages)
        upper = Node(parent, node.first, b"", node.start, at, parts)
        upper.present = node.present & self._page_shaped
        node.start, node.parent, node.full = at, upper, device[0].slots
        chain = node.chain
        if chain is None:
            upper.own, node.own = parted(node.own, cut)
            node.first = bytes(node.own[: self.page_bytes])
        else:
            chain.insert_above(node, upper)
            node.first = bytes(chain.text_of(node)[: self.page_bytes])
        upper.link()
        node.link()
        upper.stamp, upper.hits, upper.born = node.stamp, node.hits, node.born
        upper.priority = node.priority
        for c, _ in self.need.windows:
            self._enqueue(upper, c)
        self._split_claims(node, upper, pages)
        self.epoch += 1
        return upper

    def _front(self, low: Parts, pages: int) -> Parts:
        """The upper half's share of what a tier holds for a node, taken from it."""
        if low is self.nothing:
            return low
        high = tuple([Part() for _ in low])
        for front, part, component in zip(high, low, self.spec.components, strict=True):
            if not component.reach.page_shaped:
                continue
            front.locks, front.used = part.locks, part.used
            slots = part.slots
            if slots is not None:
                front.slots, part.slots = slots[:pages].copy(), slots[pages:].copy()
        high[0].locks = int(low[0].locks > 0)
        high[0].kids = int(low[0].slots is not None)
        return high

    def _split_claims(self, node: Node, upper: Node, pages: int) -> None:
        """Give the upper half its part of what is being copied."""
        for claim in tuple(node.claims or ()):
            if self.spec.components[claim.component].reach.page_shaped:
                front = Claim(
                    claim.op, upper, claim.component, claim.pinned,
                    claim.src[:pages], claim.dst[:pages],
                )  # fmt: skip
                claim.src, claim.dst = claim.src[pages:], claim.dst[pages:]
                claim.op.claims.append(front)
                upper.claims = [*(upper.claims or ()), front]

    # ---- locks and recency -----------------------------------------------------------------------

    def lock(self, node: Node, states: bool = True) -> list[int | None]:
        """Protect what a reader of boundary `node.end` needs on device, and no more (INV-05).

        Splits where a window begins inside an edge. Returns, by component, the position from which
        data is locked (None: nothing); `unlock` with it undoes exactly this, splits or not.
        """
        device = self.device
        protected = device.protected
        n = node
        while True:  # as `TierIndex.lock_path`, without the call
            part = n.parts[0][0]
            part.locks = locks = part.locks + 1
            if locks > 1:
                break
            n = n.parent  # type: ignore[assignment]  # a root is locked always
        if n is not node:
            last = node if node.full is not None else device.last_with_data(node, n)
            pages = (last.end - n.end) // self.page_size
            protected[0] += pages
        starts = self._unlocked.copy()
        for c, reach in self.need.windows:
            low, n, moved = node.end - reach, node, 0
            if low < 0:
                low = 0
            while n.end > low:
                part = n.parts[0][c]
                if part.slots is None:
                    break
                if n.start < low:
                    self.split(n, low)
                part.locks = locks = part.locks + 1
                if locks == 1:
                    moved += len(part.slots)
                n = n.parent  # type: ignore[assignment]  # a root ends at 0
            starts[c] = n.end
            protected[c] += moved
        if states and node.parent is not None:
            for c in self.need.points:
                part = node.parts[0][c]
                if part.slots is not None:
                    part.locks = locks = part.locks + 1
                    if locks == 1:
                        protected[c] += 1
                    starts[c] = node.end
        return starts

    def unlock(self, node: Node, starts: Sequence[int | None]) -> None:
        """Undo one `lock`, of which `starts` says how far it went."""
        device = self.device
        protected = device.protected
        for c, _ in self.need.windows:
            start = starts[c]
            if start is None:
                continue
            n, moved = node, 0
            while n.end > start:
                part = n.parts[0][c]
                part.locks = locks = part.locks - 1
                if not locks:
                    moved += len(part.slots)  # type: ignore[arg-type]  # what is locked is there
                    if part.queued != part.used:
                        device.enqueue(n, c)
                n = n.parent  # type: ignore[assignment]  # a root ends at 0
            protected[c] -= moved
        for c in self.need.points:
            if starts[c] is not None:
                part = node.parts[0][c]
                part.locks = locks = part.locks - 1
                if not locks:
                    protected[c] -= 1
                    if part.queued != part.used:
                        device.enqueue(node, c)
        n = node
        while True:  # as `TierIndex.unlock_path`, without the call
            part = n.parts[0][0]
            part.locks = locks = part.locks - 1
            if locks:
                break
            n = n.parent  # type: ignore[assignment]  # a root is locked always
        assert locks > 0, n
        if n is node:
            return
        if node.full is None:
            device.path_is_free(node, n)
            return
        pages = (node.end - n.end) // self.page_size
        protected[0] -= pages
        part = node.parts[0][0]
        if not part.kids and not (device.by_stamp and part.queued == node.stamp):
            device.enqueue(node, 0)

    def unlock_window(self, node: Node, c: int, start: int | None, below: int) -> int | None:
        """Unlock the nodes of a locked window that end at or before `below`; returns the new start.

        Args:
            start: where the lock began, as `lock` returned it.
        """
        n, kept = node, node.end
        if start is None:
            return kept
        while n.end > below and n.end > start:
            kept = n.start
            n = n.parent  # type: ignore[assignment]  # a root ends at 0
        self.device.unlock_window(n, c, start)
        return kept

    def use(self, node: Node, checkpoint: bool = True) -> None:
        """Refresh what a reader of boundary `node.end` consumes, and nothing else (INV-23).

        Args:
            checkpoint: False where the boundary was only passed: its `Full` data is refreshed.
        """
        if node.parent is None:
            return
        if node.hits or node.born != self.tick:  # else it was just inserted: the latest already
            self.tick += 1
        tick = self.tick
        node.stamp = tick
        node.hits += 1
        device, host = node.parts
        if checkpoint:
            for c in self.need.points:
                device[c].used = tick
                if host is not self.nothing:
                    host[c].used = tick
            for c, reach in self.need.windows:
                n, low = node, max(0, node.end - reach)
                while n.end > low:
                    self._stamp(n, c, tick)
                    n = n.parent  # type: ignore[assignment]  # a root ends at 0
        if host is not self.nothing or device[0].queued != tick or not self.device.by_stamp:
            self.requeue(node)

    def cool(self, node: Node) -> None:
        """Make the windows and states of boundary `node.end` the first to go, on both tiers.

        Not the pages that a `KEEP` checkpoint near it needs as well. What a boundary of another
        kind needs is cooled too: `use` that one afterwards.
        """
        cold = self.tick - COLD
        for c, reach in self.need.windows:
            low, n = self._kept_from(node, reach), node
            while n.parent is not None and n.end > node.end - reach:
                if n is not node and n.mark is Mark.KEEP:
                    break
                if n.end <= low:
                    self._stamp(n, c, cold)
                    self._enqueue(n, c)
                n = n.parent
        for c in self.need.points:
            self._stamp(node, c, cold)
            self._enqueue(node, c)

    def _kept_from(self, node: Node, reach: int) -> int:
        """End of the pages up to `node.end` that no `KEEP` checkpoint beyond it looks back at."""
        n = node
        while n.lone is not None:
            n = n.lone
            if n.start >= node.end + reach:
                break
            if n.mark is Mark.KEEP:
                return min(node.end, n.end - reach)
        return node.end

    def _enqueue(self, node: Node, component: int) -> None:
        self.device.enqueue(node, component)
        if node.parts[1] is not self.nothing:
            self.host.enqueue(node, component)

    def _stamp(self, node: Node, component: int, stamp: int) -> None:
        device, host = node.parts
        device[component].used = stamp
        if host is not self.nothing:
            host[component].used = stamp

    def requeue(self, node: Node) -> None:
        """What a policy orders by has changed: the node may have become more urgent."""
        self._enqueue(node, 0)

    # ---- growing ---------------------------------------------------------------------------------

    insert = insert

    def attach(self, node: Node, component: int, tier: Tier, slots: Slots) -> None:
        """Give `node` data on `tier`; the caller has seen to T2 and T4."""
        self.index[tier].add(node, component, slots)
        if component == 0:
            self.host.enqueue(node, 0)  # its place among host copies may have moved up
        self.epoch += 1

    # ---- shrinking -------------------------------------------------------------------------------

    def evict(self, tier: Tier, need: Sequence[int], spare: Spare | None = None) -> Freed | None:
        """Free at least `need[c]` slots of each component on `tier`, or nothing at all (INV-18).

        See `banyan.tree.eviction.evict`.
        """
        return evict(self, tier, need, spare)

    def flush(self) -> Freed:
        """Forget everything: free what is unlocked and cut the rest off from matching (INV-24)."""
        freed = Freed(self.width)
        for tier in Tier:
            part = self.evict(tier, list(self.index[tier].evictable))
            assert part is not None
            freed.extend(part)
        self.detached += [root for root in self.roots.values() if root.children]
        self.roots = {}
        self.epoch += 1
        return freed

    def purge(self) -> Freed:
        """Free what became unlocked in trees cut off by `flush`. Cost: O(their nodes)."""
        freed = drop_unlocked(self, self.detached)
        self.detached = [root for root in self.detached if root.children]
        return freed

    def unlink(self, node: Node) -> None:
        """Take out a node that has no data and no children left."""
        assert not node.children, node
        if node.chain is not None:
            node.chain.pop()
        node.unlink()
        self.epoch += 1
