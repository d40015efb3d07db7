"""Chains: nodes in a row, each but the last with the next as its only child, share one buffer.

A conversation grows by a node each turn, and windows and states cut what is inserted at once. Such
nodes keep what is theirs (slots, locks, recency), but their edges lie in one buffer, so that a
match compares all of them at once, and their slots are joined once rather than for each who asks.
Chains come and go with growth, branching and eviction. Nothing but speed depends on them: a row of
nodes may as well be several chains, or none.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import Any

from numpy import frombuffer

from banyan.tree.keys import TOKEN_BYTES, Text
from banyan.tree.node import INT32, Node, Slots, joined

_start_of = attrgetter("start")

_WORTH_A_VIEW = 4_096
"""Bytes from which on a view is taken rather than a copy."""


class Chain:
    """Two nodes or more in a row.

    Args:
        nodes: top first; they name this chain from now on.
        text: their edges in a row. A `bytearray` is this chain's to change.

    Attributes:
        known: device `Full` slots from the first node on, of as many whole nodes as were there when
            somebody asked; None: of none. Its buffer has at most twice their size.
    """

    __slots__ = ("_room", "known", "nodes", "text")

    def __init__(self, nodes: list[Node], text: Text) -> None:
        self.nodes = nodes
        self.text = text
        self.known: Slots | None = None
        self._room = 0
        for node in nodes:
            node.chain, node.own = self, b""

    # ---- reading ---------------------------------------------------------------------------------

    def text_of(self, node: Node) -> memoryview:
        """The edge of a member. Hold it no longer than until the next change of the tree."""
        start = self.nodes[0].start
        return memoryview(self.text)[
            (node.start - start) * TOKEN_BYTES : (node.end - start) * TOKEN_BYTES
        ]

    def down_to(self, position: int) -> list[Node]:
        """The members that begin before `position` (tokens). Cost: O(log n + result)."""
        return self.nodes[: bisect_right(self.nodes, position - 1, key=_start_of)]

    def slots(self) -> Slots:
        """Device `Full` slots of all members that have them, int32[pages], to be read only.

        Cost: O(1), but for the first time after members came or data did, when it joins them.
        """
        known = self.known
        if known is not None and len(known) == self._pages_to(self.nodes[-1].end):
            return known
        parts = [] if known is None else [known]
        first = 0 if known is None else self._index_at(len(known))
        for node in self.nodes[first:]:
            if node.full is None:
                break
            parts.append(node.full)
        self.known = known = joined(parts)
        self._room = len(known)
        return known

    def has(self, node: Node) -> bool:
        """Whether `node` is a member. Cost: O(log n)."""
        at = self._index_of(node)
        return 0 <= at < len(self.nodes) and self.nodes[at] is node

    # ---- changing --------------------------------------------------------------------------------

    def extend(self, nodes: list[Node], text: Text) -> None:
        """Add what grew below the last node. Cost: amortised O(len(text))."""
        if not isinstance(self.text, bytearray):
            self.text = bytearray(self.text)
        self.text += text
        self.nodes += nodes
        for node in nodes:
            node.chain, node.own = self, b""

    def insert_above(self, node: Node, upper: Node) -> None:
        """A member was cut in two, of which `upper` is new. Cost: O(members)."""
        self.nodes.insert(self._index_of(node), upper)
        upper.chain = self

    def merge_down(self, node: Node) -> None:
        """The member below `node` takes its edge over. Cost: O(members)."""
        del self.nodes[self._index_of(node)]
        node.chain = None
        self._fit()

    def pop(self) -> None:
        """The last node goes. Cost: amortised O(1)."""
        node = self.nodes[-1]
        self.forget(node)
        length = (node.start - self.nodes[0].start) * TOKEN_BYTES
        if isinstance(self.text, bytearray):
            del self.text[length:]
        else:
            self.text = kept(self.text, 0, length)
        self.nodes.pop()
        node.chain = None
        self._fit()

    def leave(self) -> None:
        """The first node goes out, with its edge, to stay by itself. Cost: amortised O(its edge),
        and a move of the list of members."""
        node = self.nodes[0]
        length = (node.end - node.start) * TOKEN_BYTES
        if self.known is not None:
            self._know(self.known[self._pages_to(node.end) :], self._room)
        edge = bytes(self.text[:length])
        if isinstance(self.text, bytearray):
            del self.text[:length]
        else:
            self.text = kept(self.text, length, len(self.text))
        del self.nodes[0]
        node.chain, node.own = None, edge
        self._fit()

    def cut_below(self, node: Node) -> None:
        """A member that is not the last gets another child: what is below it and what is not are
        two chains. Cost: O(the shorter part of the text + the fewer members)."""
        count = self._index_of(node) + 1
        pages, at = self._pages_to(node.end), (node.end - self.nodes[0].start) * TOKEN_BYTES
        known, room = self.known, self._room
        upper, lower = parted(self.text, at)
        if 2 * count > len(self.nodes):
            below = Chain(self.nodes[count:], lower)
            del self.nodes[count:]
            above, above.text = self, upper
        else:
            above = Chain(self.nodes[:count], upper)
            del self.nodes[:count]
            below, below.text = self, lower
        if known is not None:
            above._know(known[:pages], room)
            below._know(known[pages:], room)
        above._fit()
        below._fit()

    def forget(self, node: Node) -> None:
        """The slots of a member are no longer what they were. Cost: amortised O(1)."""
        if self.known is not None:
            self._know(self.known[: self._pages_to(node.start)], self._room)

    def _know(self, known: Slots, room: int) -> None:
        """Keep a part of a buffer of `room` slots, as a copy once it is less than half."""
        if 2 * len(known) < room:
            known, room = known.copy(), len(known)
        self.known, self._room = known, room

    def _fit(self) -> None:
        """A node by itself is no chain."""
        if len(self.nodes) == 1:
            (node,) = self.nodes
            node.chain, node.own = None, self.text

    # ---- places ----------------------------------------------------------------------------------

    def _index_of(self, node: Node) -> int:
        return bisect_right(self.nodes, node.start, key=_start_of) - 1

    def _index_at(self, pages: int) -> int:
        """Index of the member that begins `pages` after the first one does."""
        first = self.nodes[0]
        position = first.start + pages * len(first.first) // TOKEN_BYTES
        return bisect_right(self.nodes, position - 1, key=_start_of)

    def _pages_to(self, position: int) -> int:
        first = self.nodes[0]
        return (position - first.start) * TOKEN_BYTES // len(first.first)


def kept(text: Text, start: int, stop: int) -> Text:
    """Bytes [start, stop) of `text`, to be kept: a view where that is long, and at least half of
    the buffer below.

    So nothing keeps more than twice its bytes alive, and a long suffix of a key is not copied. The
    two objects of a view take 328 bytes, and as long to make as 8 KiB to copy that lie in a cache.
    Of a `bytearray`, which may change, always a copy.
    """
    length = stop - start
    if length >= _WORTH_A_VIEW:
        if isinstance(text, bytes):
            if length == len(text):
                return text
            if 2 * length >= len(text):
                return memoryview(text)[start:stop]
        elif isinstance(text, memoryview) and 2 * length >= len(text.obj):  # type: ignore[arg-type]
            return text[start:stop]
    return bytes(text[start:stop])


def parted(text: Text, at: int) -> tuple[Text, Text]:
    """Both parts of a text. Cost: O(the shorter one) where it may be changed."""
    if not isinstance(text, bytearray):
        return kept(text, 0, at), kept(text, at, len(text))
    if 2 * at < len(text):
        upper = text[:at]
        del text[:at]
        return upper, text
    lower = text[at:]
    del text[at:]
    return text, lower


def take_over(below: Node, node: Node) -> None:
    """`node` goes, its only child `below` takes over its edge. Cost: O(both edges)."""
    if node.chain is not None and node.chain is below.chain:
        node.chain.merge_down(node)
        return
    text = bytearray(node.edge)
    if node.chain is not None:
        node.chain.pop()
    if below.chain is not None:
        below.chain.leave()
    below.own = text + below.own


def slots_to(node: Node, boundary: int) -> Slots:
    """Device `Full` slots of [0, boundary), int32[pages], to be read only.

    Args:
        node: the node in which, or at whose end, `boundary` lies; has such data.
        boundary: more than 0.

    Cost: O(chains and single nodes above), and of their pages where there is more than one.
    """
    chain = node.chain
    if chain is None:
        last, n = node.full, node.parent
        if boundary != node.end:
            last = _up_to(node, boundary, last)
    else:
        top, last = chain.nodes[0], chain.slots()
        n = top.parent
        if boundary != node.end or node is not chain.nodes[-1]:
            last = _up_to(top, boundary, last)
    assert last is not None and n is not None, node
    if n.parent is None:
        return last
    parts: list[Any] = [last]
    while n.parent is not None:
        chain = n.chain
        if chain is None:
            parts.append(n.full)
            n = n.parent
        else:
            parts.append(chain.slots())
            n = chain.nodes[0].parent
        assert n is not None
    parts.reverse()
    return frombuffer(b"".join(parts), INT32)


def _up_to(top: Node, boundary: int, slots: Slots | None) -> Slots:
    assert slots is not None, top
    return slots[: (boundary - top.start) * TOKEN_BYTES // len(top.first)]
