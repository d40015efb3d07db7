"""Banyan as a plug-in of a harness that times SGLang's tree beside others.

The harness takes `--plugin module:factory`; put this repository on `PYTHONPATH` and name

    --plugin benchmarks.peers.sglang_plugin:banyan             the tree's own calls
    --plugin benchmarks.peers.sglang_plugin:banyan_holding     match = match, lock, use and unlock
    --plugin benchmarks.peers.sglang_plugin:banyan_from_tokens match = make the key, then match

The second and third are rows of their own in the same run. SGLang's match writes recency and may
split a node; Banyan's does neither, and the calls that do are part of `banyan_holding`'s match. The
third shows what a request pays once. How else the two differ is in `banyan_side`.
"""

from __future__ import annotations

from array import array
from typing import Any

from banyan.tree import Node
from banyan.tree.node import Slots
from benchmarks.peers.banyan_side import BanyanSide, Insertion, key_of

COMPONENTS = {"full": "full", "full+swa": "full+window", "full+mamba": "full+state"}
"""The harness's names for what a tree caches, and ours."""


class Plugin:
    """The harness's interface over a `BanyanSide`."""

    def __init__(self, components: str, page_size: int, name: str = "banyan") -> None:
        self.name = name
        self.side = BanyanSide(COMPONENTS[components], page_size)

    # ---- not timed -------------------------------------------------------------------------------

    def reset(self) -> None:
        self.side.clear()

    def prep(self, tokens: array[int]) -> Any:
        """A query as the caller would hold it."""
        return self.side.query(tokens)

    def prep_insert(self, tokens: array[int], cached: int) -> Insertion:
        """Arguments of an insert of `tokens`, whose first `cached` are in the tree."""
        return self.side.insertion(tokens, cached)

    def node_count(self, query: Any) -> int:
        return self.side.path_nodes(query)

    def node_of(self, query: Any) -> Node:
        return self.side.node_of(query)

    def check(self) -> None:
        self.side.check()

    # ---- timed -----------------------------------------------------------------------------------

    def match(self, query: Any) -> int:
        return self.side.match(query)

    def match_indices(self, query: Any) -> int:
        """A match with the slots of the path as one array; how many tokens they stand for."""
        slots: Slots = self.side.match_slots(query)
        return len(slots) * self.side.page_size

    def insert(self, prepared: Insertion) -> int:
        return self.side.insert(prepared)

    def evict(self, num_tokens: int) -> int:
        return self.side.evict(num_tokens)

    def lock_unlock(self, node: Node) -> None:
        self.side.lock_unlock(node)


class Holding(Plugin):
    """Matches as a request that starts: the match, its lock, its use, and letting go."""

    def match(self, query: Any) -> int:
        return self.side.hold(query)


class FromTokens(Plugin):
    """Matches from tokens: what a request pays once, for its first match."""

    def prep(self, tokens: array[int]) -> Any:
        return array("q", [*tokens, 0])

    def node_count(self, query: Any) -> int:
        return self.side.path_nodes(self.side.query(query[:-1]))

    def node_of(self, query: Any) -> Node:
        return self.side.node_of(self.side.query(query[:-1]))

    def match(self, query: Any) -> int:
        return self.side.match(key_of(query))

    def match_indices(self, query: Any) -> int:
        return super().match_indices(key_of(query))


def banyan(components: str, page_size: int, pool_tokens: int) -> Plugin:
    """The tree's own calls."""
    return Plugin(components, page_size)


def banyan_holding(components: str, page_size: int, pool_tokens: int) -> Plugin:
    """The same, with a match that also locks, refreshes and unlocks."""
    return Holding(components, page_size, "banyan match+hold")


def banyan_from_tokens(components: str, page_size: int, pool_tokens: int) -> Plugin:
    """The same, with a match that makes the key first."""
    return FromTokens(components, page_size, "banyan key+match")
