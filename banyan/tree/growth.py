"""Publishing what was computed: new pages become nodes, gaps are filled, duplicates reported.

Owns the way from what a request offers to the nodes that carry it; `eviction` is the way back.
Works on a `Tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from banyan.tree.chain import Chain, kept
from banyan.tree.keys import TOKEN_BYTES, Text
from banyan.tree.node import Node, Part, Slots, Tier, one

if TYPE_CHECKING:
    from banyan.tree.tree import Tree

COLD = 1 << 62
"""How far behind the present those windows and states are that go first."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Request-owned slots of consecutive pages from `first_page` on, offered to the tree.

    The tree keeps the array, or views of it: it must not be changed afterwards.
    """

    first_page: int
    slots: Slots


class Inserted(Struct, frozen=True, eq=False, gc=False):
    """What an insert did with what it was offered.

    Args:
        node: the node that ends at the insert's stop.
        duplicates: (component, slots) that the tree had already; the caller's to free.
        repoint: (component, first page, slots): the tree's own slots for those pages.
        taken: `Point` components whose state the tree took.
    """

    node: Node
    duplicates: list[tuple[int, Slots]]
    repoint: list[tuple[int, int, Slots]]
    taken: set[int]


def insert(
    tree: Tree,
    node: Node,
    key: bytes,
    stop: int,
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
    priority: int,
) -> Inserted:
    """See `Tree.insert`."""
    tree.tick += 1
    out = Inserted(node, [], [], set())
    cuts = _cuts(tree, node, stop, offers, states)
    for i, cut in enumerate(cuts):
        while node.end < cut:
            at = node.end * TOKEN_BYTES
            child = node.children.get(key[at : at + tree.page_bytes])
            if child is None:
                last = _grow(tree, node, key, cuts[i:], offers, states, priority, out)
                return Inserted(last, out.duplicates, out.repoint, out.taken)
            node = _along(tree, child, key, cut, priority)
            _merge(tree, node, offers, states, out)
    return Inserted(node, out.duplicates, out.repoint, out.taken)


def _cuts(
    tree: Tree,
    node: Node,
    stop: int,
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
) -> list[int]:
    """Where an edge must end: an offer or a window begins, a state is; and `stop`, last."""
    wanted = [at for at, _ in states.values()]
    for c, reach in tree.need.windows:
        offer = offers[c]
        if offer is not None:
            wanted += (offer.first_page * tree.page_size, stop - reach)
    end = node.end
    cuts = [stop] if end < stop else []
    for at in wanted:
        if end < at < stop and at not in cuts:
            cuts.append(at)
    cuts.sort()
    return cuts


def _grow(
    tree: Tree,
    parent: Node,
    key: bytes,
    ends: Sequence[int],
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
    priority: int,
    out: Inserted,
) -> Node:
    """New nodes in a row below `parent`, each to one of `ends`; returns the last."""
    text = kept(key, parent.end * TOKEN_BYTES, ends[-1] * TOKEN_BYTES)
    above, nodes = parent, []
    for end in ends:
        parent = _leaf(tree, parent, key, end, offers, states, out)
        parent.priority = max(0, priority)
        tree.device.add_leaf(parent, stays=end == ends[-1])
        nodes.append(parent)
    _weave(above, nodes, text)
    return parent


def _leaf(
    tree: Tree,
    parent: Node,
    key: bytes,
    end: int,
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
    out: Inserted,
) -> Node:
    """A new leaf below `parent` with all that is offered for it, cold, to be counted yet."""
    start, cold = parent.end, tree.tick - COLD
    at = start * TOKEN_BYTES
    pages = slice(start // tree.page_size, end // tree.page_size)
    parts = [Part(None if offer is None else _part(offer, pages), cold) for offer in offers]
    for c, (boundary, slot) in states.items():
        if boundary == end:
            parts[c].slots = one(slot)
            out.taken.add(c)
    first = key[at : at + tree.page_bytes]
    node = Node(parent, first, b"", start, end, (tuple(parts), tree.nothing))
    node.born = node.stamp = tree.tick
    node.link()
    tree.epoch += 1
    return node


def _weave(above: Node, nodes: list[Node], text: Text) -> None:
    """Give new nodes in a row their tokens, in one chain with the node above if that has no other
    children; if it has got its second, what is below it becomes a chain of its own."""
    if above.parent is not None:
        chain = above.chain
        if above.lone is nodes[0]:
            if chain is None:
                chain = Chain([above], above.own)
            chain.extend(nodes, text)
            return
        if chain is not None and chain.nodes[-1] is not above:
            chain.cut_below(above)
    if len(nodes) == 1:
        nodes[0].own = text
    else:
        Chain(nodes, text)


def _along(tree: Tree, child: Node, key: bytes, end: int, priority: int) -> Node:
    """The part of `child` that spells `key` to `end` at most; split off where needed."""
    if child.end > end or not child.spells(key):
        shared = child.common_to(key, end) // tree.page_size
        child = tree.split(child, child.start + shared * tree.page_size)
    if priority > child.priority:
        child.priority = priority
        tree.requeue(child)
    return child


def _merge(
    tree: Tree,
    node: Node,
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
    out: Inserted,
) -> None:
    """Give `node` what it lacks of the offers; report the rest as duplicates."""
    first, last = node.start // tree.page_size, node.end // tree.page_size
    for c, offer in enumerate(offers):
        if offer is None or offer.first_page >= last:
            continue
        low = max(first, offer.first_page)
        piece = offer.slots[low - offer.first_page : last - offer.first_page]
        part = node.parts[0][c]
        have = part.slots
        if have is None:
            part.used = tree.tick - COLD
            tree.attach(node, c, Tier.DEVICE, piece)
        else:
            out.duplicates.append((c, piece))
            out.repoint.append((c, low, have[low - first :]))
    for c, (at, slot) in states.items():
        if at == node.end and not node.has(c, Tier.DEVICE):
            node.parts[0][c].used = tree.tick - COLD
            tree.attach(node, c, Tier.DEVICE, one(slot))
            out.taken.add(c)


def _part(offer: Offer, pages: slice) -> Slots | None:
    """What is offered for a run of pages, all of it or none; the array itself where it is that."""
    first, slots = offer.first_page, offer.slots
    if first > pages.start:
        return None
    if first == pages.start and len(slots) == pages.stop - first:
        return slots
    return slots[pages.start - first : pages.stop - first]
