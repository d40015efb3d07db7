"""Eviction policies: each gives a node the key by which victims are ordered, lowest first.

A policy sees a node's stamp, hits, birth and priority, never time or data. Keys may change at any
use; the queue re-checks them, so any order works, also one whose keys become more urgent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banyan.errors import ConfigError
from banyan.tree.node import Node, OrderKey


class Policy(Protocol):
    """Order of eviction of `Full` leaves."""

    def key(self, node: Node) -> OrderKey:
        """Smaller goes first. Cost: O(1); called once per push and pop."""


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used first."""

    def key(self, node: Node) -> OrderKey:
        return node.stamp


@dataclass(frozen=True, slots=True)
class Lfu:
    """Least often used first; among equals, least recently."""

    def key(self, node: Node) -> OrderKey:
        return (node.hits, node.stamp)


@dataclass(frozen=True, slots=True)
class Slru:
    """Segmented LRU: what was used fewer than `threshold` times goes before all else."""

    threshold: int = 2

    def key(self, node: Node) -> OrderKey:
        return (int(node.hits >= self.threshold), node.stamp)


@dataclass(frozen=True, slots=True)
class Fifo:
    """Oldest first, whatever its use."""

    def key(self, node: Node) -> OrderKey:
        return node.born


@dataclass(frozen=True, slots=True)
class Priority:
    """Lowest request priority first; among equals, least recently used."""

    def key(self, node: Node) -> OrderKey:
        return (node.priority, node.stamp)


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "priority": Priority,
}


def make_policy(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        ConfigError: no policy has that name.
    """
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise ConfigError("--evict-policy", f"unknown policy {name!r}", f"Use one of: {known}.")
    return POLICIES[name]()
