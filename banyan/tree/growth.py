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


class Inserted(Struct, eq=False, gc=False):
    """What an insert did with what it was offered.

    Args:
        node: the node that ends at the insert's stop.
        duplicates: (component, slots) that the tree had already; the caller's to free.
        repoint: (component, first page, slots): the tree's own slots for those pages.
        taken: `Point` components whose state the tree took.
    """

    node: Node
    duplicates: tuple[tuple[int, Slots], ...] = ()
    repoint: tuple[tuple[int, int, Slots], ...] = ()
    taken: tuple[int, ...] = ()


def insert(
    tree: Tree,
    node: Node,
    key: bytes,
    stop: int,
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
    priority: int = 0,
) -> Inserted:
    """Publish data computed beyond the locked boundary `node.end`, up to `stop`; `Tree.insert`.

    New pages become nodes; pages the tree has on device are reported as duplicates; pages it has on
    host only are revived; absent windows and states are healed. New windows and states are cold,
    the first to go, until `use` of a boundary that needs them.

    Args:
        key: the tokens from position 0, at least to `stop` (a whole number of pages). The tree may
            keep a view of it.
        offers: by component; the `Full` offer covers all of [node.end, stop) that the tree does not
            have on device, a `Window` offer a tail of it.
        states: by `Point` component, (boundary, slot).

    Mutates: nodes along the key. Cost: O(new tokens + nodes below `node` on the key).
    """
    tree.tick += 1
    out = Inserted(node)
    cuts = _cuts(tree, node, stop, offers, states)
    for i, cut in enumerate(cuts):
        while node.end < cut:
            at = node.end * TOKEN_BYTES
            child = node.children.get(key[at : at + tree.page_bytes])
            if child is None:
                out.node = _grow(tree, node, key, cuts[i:], offers, states, priority, out)
                return out
            node = _along(tree, child, key, cut, priority)
            _merge(tree, node, offers, states, out)
    out.node = node
    return out


def _cuts(
    tree: Tree,
    node: Node,
    stop: int,
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
) -> list[int]:
    """Where an edge must end: an offer or a window begins, a state is; and `stop`, last."""
    end = node.end
    cuts = [stop] if end < stop else []
    for at, _ in states.values():
        if end < at < stop and at not in cuts:
            cuts.append(at)
    for c, reach in tree.need.windows:
        offer = offers[c]
        if offer is not None:
            for at in (offer.first_page * tree.page_size, stop - reach):
                if end < at < stop and at not in cuts:
                    cuts.append(at)
    if len(cuts) > 1:
        cuts.sort()
    return cuts


def _grow(
    tree: Tree,
    above: Node,
    key: bytes,
    ends: Sequence[int],
    offers: Sequence[Offer | None],
    states: dict[int, tuple[int, int]],
    priority: int,
    out: Inserted,
) -> Node:
    """New nodes in a row below `above`, each to one of `ends`, with all that is offered for them,
    cold; returns the last."""
    device, page_size, page_bytes = tree.device, tree.page_size, tree.page_bytes
    held, queues, cold = device.held, device.queues, tree.tick - COLD
    nodes: list[Node] = []
    parent = above
    for end in ends:
        start = parent.end
        first_page, count = start // page_size, (end - start) // page_size
        parts, present = [], 0
        for c, offer in enumerate(offers):
            slots = None
            if offer is not None:
                first, slots = first_page - offer.first_page, offer.slots
                if first or len(slots) != count:
                    slots = None if first < 0 else slots[first : first + count]
                if slots is not None:
                    present |= 1 << c
                    held[c] += count
            parts.append(Part(slots, cold))
        for c, (boundary, slot) in states.items():
            if boundary == end:
                parts[c].slots = one(slot)
                present |= 1 << c
                held[c] += 1
                out.taken += (c,)
        at = start * TOKEN_BYTES
        node = Node(
            parent, key[at : at + page_bytes], b"", start, end, (tuple(parts), tree.nothing)
        )
        node.present = present
        node.born = node.stamp = tree.tick
        if priority > 0:
            node.priority = priority
        node.link()
        parent.parts[0][0].kids += 1
        if present > 1:
            for c in tree.others:
                part = parts[c]
                if part.slots is not None:
                    part.queued = cold
                    queues[c].push(cold, node)
        nodes.append(node)
        parent = node
    device.queue_leaf(parent)
    tree.epoch += 1
    text = kept(key, above.end * TOKEN_BYTES, parent.end * TOKEN_BYTES)
    _weave(above, nodes, text)
    return parent


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
            out.duplicates += ((c, piece),)
            out.repoint += ((c, low, have[low - first :]),)
    for c, (at, slot) in states.items():
        if at == node.end and not node.has(c, Tier.DEVICE):
            node.parts[0][c].used = tree.tick - COLD
            tree.attach(node, c, Tier.DEVICE, one(slot))
            out.taken += (c,)
