"""Grows trees without pools: slots come from counters, and what comes free is noted.

No tensor and no torch: what is proved with it is proved of the tree alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from banyan.spec import CacheSpec, Component, Full, Point, Window
from banyan.tree import (
    ROOT_NAMESPACE,
    Inserted,
    Match,
    Node,
    Offer,
    Policy,
    Tier,
    Tree,
    encode_tokens,
)
from banyan.tree.chain import slots_to
from banyan.tree.check import Hold, findings, holds_of_lease
from banyan.tree.eviction import Freed
from banyan.tree.node import Slots

KINDS = ("full", "full+window", "full+state", "full+window+state")


def bare_spec(kind: str = "full", page_size: int = 4, window: int = 8) -> CacheSpec:
    """Components without buffers: the tree needs their reaches only."""
    parts = [Component("full", Full())]
    if "window" in kind:
        parts.append(Component("window", Window(window)))
    if "state" in kind:
        parts.append(Component("state", Point()))
    return CacheSpec(tuple(parts), page_size)


class Plant:
    """A tree and the slots its data lies in.

    Args:
        kind, page_size, window: as `bare_spec`.
        policy: order of eviction.

    Attributes:
        held: by reader, the locks it has: (node, starts).
    """

    def __init__(
        self,
        kind: str = "full",
        page_size: int = 4,
        window: int = 8,
        policy: Policy | None = None,
    ) -> None:
        self.spec = bare_spec(kind, page_size, window)
        self.tree = Tree(self.spec, policy)
        self.page = page_size
        self.width = len(self.spec.components)
        self.window = next((c for c, _ in self.tree.need.windows), None)
        self.point = next(iter(self.tree.need.points), None)
        self.held: dict[str, tuple[Node, list[int | None]]] = {}
        self._next = [0] * self.width
        self._checks = 0

    # ---- growing ---------------------------------------------------------------------------------

    def fresh(self, component: int, count: int) -> Slots:
        """Slots that nobody has had."""
        first = self._next[component]
        self._next[component] += count
        return np.arange(first, first + count, dtype=np.int32)

    def insert(
        self,
        tokens: Sequence[int],
        *,
        start: int = 0,
        window_from: int | None = None,
        states: Sequence[int] = (),
        namespace: bytes = ROOT_NAMESPACE,
        priority: int = 0,
    ) -> Inserted:
        """Publish all whole pages of `tokens` from position `start` on, as a commit would.

        Args:
            window_from: position where the window's data begins; None: it covers all.
            states: positions at which a state is offered.
        """
        key = encode_tokens(tokens)
        stop = len(tokens) // self.page * self.page
        node = self.node(tokens[:start], namespace) if start else self.tree.root(namespace)
        offers: list[Offer | None] = [Offer(start // self.page, self._pages(0, start, stop))]
        for c in range(1, self.width):
            low = max(start, window_from or 0)
            if c == self.window and low < stop:
                offers.append(Offer(low // self.page, self._pages(c, low, stop)))
            else:
                offers.append(None)
        done = self.tree.insert(node, key, stop, offers, {}, priority)
        for at in states:
            assert self.point is not None
            above = self.node(tokens[:at], namespace)
            slot = int(self.fresh(self.point, 1)[0])
            if not above.has(self.point, Tier.DEVICE):
                above.parts[0][self.point].used = self.tree.tick
                self.tree.attach(above, self.point, Tier.DEVICE, np.array([slot], np.int32))
        return done

    def _pages(self, component: int, start: int, stop: int) -> Slots:
        return self.fresh(component, (stop - start) // self.page)

    def mirror(self, tokens: Sequence[int], namespace: bytes = ROOT_NAMESPACE) -> None:
        """Give the path of `tokens` host copies of all that the device has of it."""
        node = self.node(tokens, namespace)
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for n in reversed(path):
            for c in range(self.width):
                have = n.parts[Tier.DEVICE][c].slots
                if have is not None and not n.has(c, Tier.HOST):
                    self.tree.attach(n, c, Tier.HOST, have.copy())

    # ---- asking ----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], namespace: bytes = ROOT_NAMESPACE) -> Match:
        """Match the tokens and one more."""
        return self.tree.match(encode_tokens([*tokens, -1]), namespace)

    def node(self, tokens: Sequence[int], namespace: bytes = ROOT_NAMESPACE) -> Node:
        """The node that ends at the end of `tokens` (whole pages), split off where needed."""
        match = self.match(tokens, namespace)
        assert match.full_len == len(tokens), (match.full_len, len(tokens))
        return self.tree.node_at(match, len(tokens))

    def nodes(self) -> list[Node]:
        """All nodes, in a fixed order."""
        return list(self.tree.nodes())

    def victims(self, component: int = 0, tier: Tier = Tier.DEVICE) -> list[Node]:
        """All that may go now, in order of eviction: a full sort, with no queue."""
        index = self.tree.index[tier]
        found = [n for n in self.tree.nodes() if index.is_victim(n, component)]
        return sorted(found, key=lambda n: index.key_of(n, component))

    # ---- holding ---------------------------------------------------------------------------------

    def lock(self, name: str, tokens: Sequence[int], namespace: bytes = ROOT_NAMESPACE) -> Node:
        """Lock the boundary at the end of `tokens` for reader `name`."""
        node = self.node(tokens, namespace) if tokens else self.tree.root(namespace)
        self.held[name] = (node, self.tree.lock(node))
        return node

    def unlock(self, name: str) -> None:
        """Reader `name` is done."""
        node, starts = self.held.pop(name)
        self.tree.unlock(node, starts)

    def use(self, tokens: Sequence[int], namespace: bytes = ROOT_NAMESPACE) -> Node:
        """Refresh the boundary at the end of `tokens`."""
        node = self.node(tokens, namespace)
        self.tree.use(node)
        return node

    # ---- evicting --------------------------------------------------------------------------------

    def evict(self, *need: int, tier: Tier = Tier.DEVICE) -> Freed | None:
        """Evict a shortfall, by component; those left out are 0."""
        return self.tree.evict(tier, [*need, *([0] * (self.width - len(need)))])

    # ---- checking --------------------------------------------------------------------------------

    def holds(self) -> list[Hold]:
        """Every lock that readers have."""
        return [
            hold
            for node, starts in self.held.values()
            for hold in holds_of_lease(self.tree, node, starts)
        ]

    def findings(self) -> list[str]:
        """What `check` finds."""
        return findings(self.tree, self.holds())

    def check(self) -> None:
        """Every invariant of the tree; every other time also the slots that it gives for paths."""
        found = self.findings()
        assert not found, "\n".join(found)
        self._checks += 1
        if self._checks % 2:
            self._check_slots()

    def _check_slots(self) -> None:
        """The slots of every path are those of its nodes."""
        above: dict[int, list[int]] = {id(root): [] for root in self.tree.roots.values()}
        for node in self.nodes():
            if node.full is not None and id(node.parent) in above:
                above[id(node)] = [*above[id(node.parent)], *node.full.tolist()]
                assert slots_to(node, node.end).tolist() == above[id(node)], node


def count(freed: Freed | None, tier: Tier = Tier.DEVICE) -> list[int]:
    """Slots freed on a tier, by component."""
    assert freed is not None, "nothing could be evicted"
    return [freed.count(tier, c) for c in range(len(freed.slots[0]))]
