"""Banyan's tree behind the interface that is measured, at the level a scheduler calls it.

Owns a tree without pools: slots come from counters. Needs numpy and msgspec only, so that it can be
measured inside the Python of another system. One thread.

What differs from SGLang's tree, and how it is made even:

- A match here reads only. SGLang's also refreshes recency and may split a node; here the one is
  `Tree.use`, the other `Tree.node_at` and `Tree.lock`, called when the request starts. `match` is
  what is asked for every waiting request in every step; `hold` is match, `node_at`, `lock`, `use`
  and `unlock` together: everything a scheduler pays.
- A key is bytes, made once per request outside the timed part, as SGLang's `array('q')` is;
  `make_key` times the making of both.
- A match covers all but the last token of a query, so a query is one token longer than what is
  asked of SGLang, which covers the same number of tokens.
- A commit goes on from the node that the request holds, so `insert` is given that node. SGLang's
  walks from the root. `use` is a part of it: without, windows and states would be the first to go.
- `evict` frees exactly what is asked for, SGLang's whole leaves; whole leaves is what is asked for.
  Here it includes joining the freed slots to one array per component, as the pools take them.
- SGLang counts as its window the tokens before a boundary, Banyan the current one too:
  `Window(WINDOW + 1)` needs the same tokens. Both get window slots for all of an insert.
- Slots are int32 and one per page, SGLang's int64 and one per token. What `match_slots` gives of a
  path of one chain is the tree's array itself, never to be written; SGLang copies. A chain is
  nodes in a row; its array is joined once, when it is asked for after the chain has changed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from banyan.spec import CacheSpec, Component, Full, Point, Window
from banyan.tree import ROOT_NAMESPACE, Match, Node, Offer, Tier, Tree, encode_tokens
from banyan.tree.chain import slots_to
from banyan.tree.check import findings, holds_of_lease
from banyan.tree.node import Slots

WINDOW = 512

COMPONENTS = {
    "full": (Component("full", Full()),),
    "full+window": (Component("full", Full()), Component("window", Window(WINDOW + 1))),
    "full+state": (Component("full", Full()), Component("state", Point())),
}

Receipt = tuple[Node, list[int | None]]
"""A lock that is held: the node, and what `Tree.lock` returned."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """The arguments of one insert, made beforehand.

    Args:
        cached: tokens of `key` that the tree has already.
    """

    node: Node
    key: bytes
    stop: int
    offers: list[Offer | None]
    states: dict[int, tuple[int, int]]
    cached: int


class BanyanSide:
    """One tree under test.

    Args:
        components: a key of `COMPONENTS`.
    """

    def __init__(self, components: str, page_size: int, name: str = "banyan") -> None:
        self.name = name
        self.spec = CacheSpec(COMPONENTS[components], page_size)
        self.page_size = page_size
        self.clear()

    # ---- not timed -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Start over with an empty tree."""
        self.tree = Tree(self.spec)
        self.held: list[Receipt] = []
        self._next = [0] * len(self.spec.components)

    def query(self, tokens: array[int]) -> bytes:
        """The key of a prompt that is `tokens` and one more."""
        return key_of(tokens) + b"\0\0\0\0"

    def insertion(self, tokens: array[int], cached: int) -> Insertion:
        """What a request offers that has computed `tokens` beyond the first `cached`."""
        page = self.page_size
        node = self._node_at(self.query(tokens[:cached]), cached)
        stop = len(tokens) // page * page
        offers: list[Offer | None] = []
        states: dict[int, tuple[int, int]] = {}
        for c, component in enumerate(self.spec.components):
            if component.reach.page_shaped:
                offers.append(Offer(cached // page, self._slots(c, (stop - cached) // page)))
            else:
                offers.append(None)
                states[c] = (stop, int(self._slots(c, 1)[0]))
        return Insertion(node, key_of(tokens), stop, offers, states, cached)

    def node_of(self, query: bytes) -> Node:
        """The node that ends where `query` can be resumed."""
        return self._node_at(query, self.match(query))

    def path_nodes(self, query: bytes) -> int:
        """How many nodes `query` passes."""
        return len(self.tree.match(query).path)

    def lock(self, node: Node) -> None:
        """Lock `node` until `release`."""
        self.held.append((node, self.tree.lock(node)))

    def release(self) -> None:
        """Undo every `lock`."""
        while self.held:
            self.tree.unlock(*self.held.pop())

    def check(self) -> None:
        """Every invariant of the tree.

        Raises:
            AssertionError: naming what does not hold.
        """
        holds = [h for held in self.held for h in holds_of_lease(self.tree, *held)]
        found = findings(self.tree, holds)
        assert not found, "\n".join(found)

    # ---- timed -----------------------------------------------------------------------------------

    def make_key(self, tokens: list[int]) -> bytes:
        """A request's key from its tokens as they come from a tokenizer."""
        return encode_tokens(tokens)

    def match(self, query: bytes) -> int:
        """Tokens that need not be computed."""
        return self.tree.match(query).device_boundary

    def match_slots(self, query: bytes) -> Slots:
        """A match, and the slots of what it found: int32[pages]."""
        return slots_of(self.tree.match(query))

    def hold(self, query: bytes) -> int:
        """What a request costs that starts and ends: match, lock, refresh, unlock."""
        tree = self.tree
        match = tree.match(query)
        node = tree.node_at(match, match.device_boundary)
        starts = tree.lock(node)
        tree.use(node)
        tree.unlock(node, starts)
        return match.device_boundary

    def insert(self, prepared: Insertion) -> int:
        """Publish; returns how many tokens the tree had."""
        tree, p = self.tree, prepared
        done = tree.insert(p.node, p.key, p.stop, p.offers, p.states)
        tree.use(done.node)
        had = p.cached
        for component, slots in done.duplicates:
            if component == 0:
                had += len(slots) * self.page_size
        return had

    def evict(self, tokens: int) -> int:
        """Free that many tokens; returns how many were freed."""
        need = [0] * self.tree.width
        need[0] = -(-tokens // self.page_size)
        freed = self.tree.evict(Tier.DEVICE, need)
        if freed is None:
            return 0
        taken = [freed.take(Tier.DEVICE, c) for c in range(self.tree.width)]
        return len(taken[0]) * self.page_size

    def lock_unlock(self, node: Node) -> None:
        """Protect what a reader of the node's end needs, and let go of it."""
        self.tree.unlock(node, self.tree.lock(node))

    # ---- parts -----------------------------------------------------------------------------------

    def _node_at(self, query: bytes, boundary: int) -> Node:
        match = self.tree.match(query)
        assert match.full_len >= boundary, (match.full_len, boundary)
        return self.tree.node_at(match, boundary) if boundary else self.tree.root(ROOT_NAMESPACE)

    def _slots(self, component: int, count: int) -> Slots:
        first = self._next[component]
        self._next[component] += count
        return np.arange(first, first + count, dtype=np.int32)


def slots_of(match: Match) -> Slots:
    """The device's `Full` slots up to the boundary of `match`: int32[pages], to be read only."""
    boundary, path = match.device_boundary, match.path
    if boundary and boundary == path[-1].end:
        return slots_to(path[-1], boundary)
    for node in reversed(path):
        if node.start < boundary:
            return slots_to(node, boundary)
    return np.empty(0, np.int32)


def key_of(tokens: array[int]) -> bytes:
    """The key of tokens that lie in an `array('q')`, as SGLang holds them."""
    return encode_tokens(np.frombuffer(tokens, np.int64))
