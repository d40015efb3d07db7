"""What a tree under measurement can do: the same few calls for every system."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

CONFIGURATIONS = tuple(
    (components, page) for components in ("full", "full+window", "full+state") for page in (1, 64)
)
"""What a tree caches, and its page size."""


class Side(Protocol):
    """One tree. Prompts are `array('q')`; queries, insertions and nodes are the tree's own."""

    name: str

    # ---- not timed -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Start over with an empty tree."""

    def query(self, tokens: array[int], /) -> Any:
        """What to match so that all of `tokens` is found, if the tree has it."""

    def insertion(self, tokens: array[int], cached: int, /) -> Any:
        """The arguments of an insert of `tokens`, the first `cached` of which the tree has."""

    def node_of(self, query: Any, /) -> Any:
        """The node that ends where `query` can be resumed."""

    def path_nodes(self, query: Any, /) -> int:
        """How many nodes `query` passes."""

    def lock(self, node: Any, /) -> None:
        """Lock `node` until `release`."""

    def release(self) -> None:
        """Undo every `lock`."""

    def check(self) -> None:
        """Raise if the tree is inconsistent."""

    # ---- timed -----------------------------------------------------------------------------------

    def make_key(self, tokens: list[int], /) -> Any:
        """A request's key from its tokens as they come from a tokenizer."""

    def match(self, query: Any, /) -> int:
        """How many tokens need not be computed."""

    def match_slots(self, query: Any, /) -> Any:
        """A match, and the slots of what it found as one array."""

    def hold(self, query: Any, /) -> int:
        """All that a request costs that starts and ends: match, lock, refresh, unlock."""

    def insert(self, prepared: Any, /) -> int:
        """Publish; returns how many tokens the tree had."""

    def evict(self, tokens: int, /) -> int:
        """Free that many tokens; returns how many were freed."""

    def lock_unlock(self, node: Any, /) -> None:
        """Protect what a reader of the node's end needs, and let go of it."""
