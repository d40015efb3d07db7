"""The tree's node: an edge of tokens, and what each tier holds for it.

Plain data with no behaviour of its own but the links to its children; `Tree` and `TierIndex` change
it. A node's identity belongs to its end position: when an edge is split, the existing object stays
the lower half, so a handle on a boundary survives every split.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from banyan.tree.keys import TOKEN_BYTES, Text, common_bytes

if TYPE_CHECKING:
    from banyan.tree.chain import Chain

Slots: TypeAlias = npt.NDArray[np.int32]
OrderKey: TypeAlias = Any
"""An int or a tuple of ints; all keys of one queue are of one kind."""


INT32 = np.dtype(np.int32)


class Tier(IntEnum):
    """Where data can be looked up by the tree."""

    DEVICE = 0
    HOST = 1


class Mark(IntEnum):
    """What the windows and states kept at a node's end are for, and so how long they stay."""

    PASSED = 0
    """Nothing: a chunk ended there for its size."""
    TURN = 1
    """A conversation's next turn: the last page boundary of an answer."""
    PROMPT = 2
    """The same prompt again, or a next turn that shows the answer otherwise than computed."""
    MESSAGE = 3
    """Another answer to, or another wording of, what follows a message of this conversation."""
    KEEP = 4
    """Other prompts with the same beginning: a branch, the first message's end, an interval."""


class Part:
    """What one tier holds of one component for one node.

    Attributes:
        slots: int32[pages of the edge] (one entry for a `Point`), or None: absent.
        locks: how many readers need it. For `Full`, own locks plus the number of locked children,
            so that the totals of a whole branch change with the first lock only. A root counts as
            locked always: a path of locks ends there as it does at any locked node.
        used: recency stamp of `Window` and `Point` data.
        queued: the key of the live entry in the eviction queue, or None.
        kids: for `Full`, how many children have such data on this tier.
    """

    __slots__ = ("kids", "locks", "queued", "slots", "used")

    def __init__(self, slots: Slots | None = None, used: int = 0) -> None:
        self.slots = slots
        self.used = used
        self.locks = self.kids = 0
        self.queued: OrderKey | None = None


Parts: TypeAlias = tuple[Part, ...]
"""By component."""


class _NoPart(Part):
    """The absence of data; a write raises."""

    __slots__ = ()

    def __init__(self) -> None:
        for name in Part.__slots__:
            value = None if name in ("slots", "queued") else 0
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a part that is not there")


@cache
def nothing(components: int) -> Parts:
    """What a tier holds for a node that it has nothing of: one record for all, never written to.

    Many nodes are on one tier only; without an empty record of their own they take less memory, and
    there is less to touch when they go. `TierIndex.add` gives a node its own when it gets data.
    """
    return (_NoPart(),) * components


_numbers: list[Slots] = [np.arange(0, dtype=np.int32)]


def one(slot: int) -> Slots:
    """int32[1], to be read only: a view of one array for all, half the time of a new one."""
    numbers = _numbers[0]
    if slot >= len(numbers):
        numbers = _numbers[0] = np.arange(2 * slot + 1_024, dtype=np.int32)
        numbers.flags.writeable = False
    return numbers[slot : slot + 1]


def joined(parts: Sequence[Slots]) -> Slots:
    """The slots of `parts` in a row, int32[...], to be read only.

    Cost: O(slots). As bytes, many short pieces take a ninth of the time of `np.concatenate`: 64 of
    32 slots 1.2 us instead of 10.6.
    """
    if len(parts) == 1:
        return parts[0]
    return np.frombuffer(b"".join(parts), INT32)  # type: ignore[arg-type]


class Claim:
    """One node's part in a running operation.

    Args:
        op: the operation, opaque to the tree; has a list `claims` that holds this claim.
        pinned: the tier whose data of `component` this claim keeps locked while it runs.
        src, dst: slots read and written; they are split together with the node.
    """

    __slots__ = ("component", "dst", "node", "op", "pinned", "src")

    def __init__(
        self, op: Any, node: Node, component: int, pinned: Tier, src: Slots, dst: Slots
    ) -> None:
        self.op, self.node, self.component, self.pinned = op, node, component, pinned
        self.src, self.dst = src, dst


_CHILDLESS: dict[bytes, Node] = MappingProxyType({})  # type: ignore[assignment]
"""The children of all nodes that have had none yet, most of a wide tree; a write raises."""


class Node:
    """A run of whole pages below its parent.

    Args:
        first: the bytes of the edge's first page, by which its parent finds it.
        own: the run's tokens as key bytes, a whole number of pages.
        start, end: positions in tokens, half-open.
        parts: what each tier holds, device first, by component.

    Attributes:
        chain: what it shares its tokens with; `own` is empty then.
        full: the device's `Full` slots, the same object as `parts[0][0].slots`.
        present: the components that the device has, a bit for each. With `full` at hand for a match
            that reads them of many nodes: each step on the way to a part may be a cache miss.
        lone: the only child; None where there are none or several. Kept by `link` and `unlink`.
        stamp, hits, born, priority: what eviction policies order by.
        mark: what the checkpoint at `end` is for.
        snapshot: how many snapshots of conversations had been published with this one.
        claims: parts in running operations, None while there are none.
    """

    __slots__ = (
        "born",
        "chain",
        "children",
        "claims",
        "end",
        "first",
        "full",
        "hits",
        "lone",
        "mark",
        "own",
        "parent",
        "parts",
        "present",
        "priority",
        "snapshot",
        "stamp",
        "start",
    )

    def __init__(
        self,
        parent: Node | None,
        first: bytes,
        own: Text,
        start: int,
        end: int,
        parts: tuple[Parts, Parts],
    ) -> None:
        self.parent = parent
        self.first = first
        self.own = own
        self.chain: Chain | None = None
        self.start = start
        self.end = end
        self.parts = parts
        self.full = parts[0][0].slots
        self.present = 0
        self.children = _CHILDLESS
        self.lone: Node | None = None
        self.stamp = self.hits = self.born = self.priority = self.snapshot = 0
        self.mark = Mark.PASSED
        self.claims: list[Claim] | None = None

    @property
    def edge(self) -> bytes:
        """The run's tokens as key bytes. Cost: O(len(edge)), a copy."""
        return bytes(self.own if self.chain is None else self.chain.text_of(self))

    def spells(self, key: bytes) -> bool:
        """Whether `key` has this edge at its place. Cost: O(len(edge)), one memcmp."""
        text = self.own if self.chain is None else self.chain.text_of(self)
        return key.startswith(text, self.start * TOKEN_BYTES)

    def common_to(self, key: bytes, end: int) -> int:
        """How many tokens of this edge `key[:end]` has at its place; `end` in tokens."""
        text = self.own if self.chain is None else self.chain.text_of(self)
        at = self.start * TOKEN_BYTES
        return common_bytes(text, key, at, end * TOKEN_BYTES) // TOKEN_BYTES

    def link(self) -> None:
        """Hang this node on its parent, in the place of another with the same first page."""
        parent = self.parent
        assert parent is not None
        if parent.children is _CHILDLESS:
            parent.children = {self.first: self}
            parent.lone = self
            return
        parent.children[self.first] = self
        parent.lone = self if len(parent.children) == 1 else None

    def unlink(self) -> None:
        """Take this node off its parent."""
        parent = self.parent
        assert parent is not None
        children = parent.children
        del children[self.first]
        if len(children) < 2:
            parent.lone = next(iter(children.values()), None)

    def has(self, component: int, tier: Tier) -> bool:
        """Whether `tier` has this node's data of `component`."""
        return self.parts[tier][component].slots is not None

    def __repr__(self) -> str:
        marks = "".join(
            "." if part.slots is None else "dh"[t] for t in (0, 1) for part in self.parts[t]
        )
        return f"Node[{self.start}:{self.end} {marks}]"
