"""Every invariant of the tree, as code: `findings` lists all that does not hold.

Works from first principles: totals and lock counts are added up anew from the nodes and from what
the caller says it holds, and compared with what the tree keeps incrementally. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from banyan.tree.chain import Chain
from banyan.tree.keys import TOKEN_BYTES
from banyan.tree.node import Node, Tier
from banyan.tree.tree import Tree


@dataclass(frozen=True, slots=True)
class Hold:
    """One lock somebody has: a `Full` path (component 0), or one node's data."""

    tier: Tier
    node: Node
    component: int


def holds_of_lease(tree: Tree, node: Node, starts: list[int | None]) -> Iterator[Hold]:
    """The locks that `Tree.lock(node)` took and reported as `starts`."""
    if starts[0] is not None:
        yield Hold(Tier.DEVICE, node, 0)
    for c, _ in tree.need.windows:
        n, start = node, starts[c]
        while start is not None and n.parent is not None and n.end > start:
            yield Hold(Tier.DEVICE, n, c)
            n = n.parent
    for c in tree.need.points:
        if starts[c] is not None:
            yield Hold(Tier.DEVICE, node, c)


def findings(tree: Tree, holds: Iterable[Hold]) -> list[str]:
    """All violations found. Cost: O(nodes + slots).

    Args:
        holds: every lock that leases and operations have at this moment (INV-03).
    """
    found: list[str] = []
    nodes = list(tree.nodes())
    for node in nodes:
        found += _structure(tree, node)
        found += _presence(tree, node)
    for tier in Tier:
        found += _totals(tree, nodes, tier)
    found += _locks(tree, nodes, holds)
    return found


def _structure(tree: Tree, node: Node) -> Iterator[str]:
    """T1, INV-14: edges, positions, links; INV-09: claims point back."""
    parent = node.parent
    assert parent is not None
    edge = node.edge
    length = len(edge) // TOKEN_BYTES
    if not length or len(edge) % tree.page_bytes:
        yield f"T1 {node}: edge of {length} tokens is not a whole number of pages"
    if node.end - node.start != length or node.start != parent.end:
        yield f"INV-14 {node}: positions disagree with its edge or with {parent}"
    if parent.children.get(node.first) is not node or not edge.startswith(node.first):
        yield f"T1 {node}: not found under its first page"
    if len(node.first) != tree.page_bytes:
        yield f"T1 {node}: found under {len(node.first)} bytes, a page has {tree.page_bytes}"
    if node.full is not node.parts[0][0].slots:
        yield f"{node}: its device slots at hand are not those that the device holds"
    present = sum(1 << c for c in range(tree.width) if node.has(c, Tier.DEVICE))
    if node.present != present:
        yield f"{node}: says {node.present:b} of what the device has, it has {present:b}"
    for n in (node, parent):
        if n.lone is not (next(iter(n.children.values())) if len(n.children) == 1 else None):
            yield f"{n}: names {n.lone} as its only child, has {len(n.children)}"
    for claim in node.claims or ():
        if claim.node is not node or claim not in claim.op.claims:
            yield f"INV-09 {node}: carries a claim that is not its operation's"
    if (chain := node.chain) is not None:
        if not chain.has(node):
            yield f"T6 {node}: not in the chain that it names"
        elif chain.nodes[0] is node:
            yield from _chain(chain)


def _chain(chain: Chain) -> Iterator[str]:
    """T6: a chain's members are in a row, name it, and have its text and slots."""
    nodes = chain.nodes
    if len(nodes) < 2 or any(n.chain is not chain or n.own for n in nodes):
        yield f"T6 {nodes}: a chain that is not its members' own, or of too few"
    if any(high.lone is not low for high, low in pairwise(nodes)):
        yield f"T6 {nodes}: a chain of nodes that are not only children in a row"
    if len(chain.text) != (nodes[-1].end - nodes[0].start) * TOKEN_BYTES:
        yield f"T6 {nodes}: a chain with {len(chain.text)} bytes of text"
    if chain.known is not None:
        known = 0
        for node in nodes:
            if node.full is None or known == len(chain.known):
                break
            if not np.array_equal(chain.known[known : known + len(node.full)], node.full):
                yield f"T6 {node}: its chain says {chain.known[known:]} from it on"
            known += len(node.full)
        if known != len(chain.known):
            yield f"T6 {nodes}: a chain knows {len(chain.known)} slots of {known} pages"


def _presence(tree: Tree, node: Node) -> Iterator[str]:
    """T2, T3, T4, INV-06, INV-08: who may have what, and how much of it."""
    parent = node.parent
    assert parent is not None
    if not node.has(0, Tier.DEVICE) and not node.has(0, Tier.HOST):
        yield f"T3 {node}: no Full data on any tier"
    for tier in Tier:
        if node.has(0, tier) and parent.parent is not None and not parent.has(0, tier):
            yield f"T2/INV-08 {node}: Full on {tier.name}, its parent has none there"
        kids = sum(child.has(0, tier) for child in node.children.values())
        parts = node.parts[tier]
        if kids != parts[0].kids:
            yield f"{node}: counts {parts[0].kids} kids on {tier.name}, has {kids}"
        for c, component in enumerate(tree.spec.components):
            slots = parts[c].slots
            if slots is None:
                if c and parts[c].locks:
                    yield f"INV-06 {node}: absent {component.name} is locked on {tier.name}"
                continue
            pages = (node.end - node.start) // tree.page_size if component.reach.page_shaped else 1
            if len(slots) != pages:
                yield f"{node}: {len(slots)} {component.name} slots for {pages} on {tier.name}"
            if c and tier is Tier.DEVICE and not node.has(0, Tier.DEVICE):
                yield f"T4 {node}: {component.name} on device without Full"


def _totals(tree: Tree, nodes: list[Node], tier: Tier) -> Iterator[str]:
    """INV-01: evictable and protected, added up anew; every victim is queued."""
    index = tree.index[tier]
    for c in range(tree.width):
        sums = [0, 0]
        for node in nodes:
            part = node.parts[tier][c]
            slots = part.slots
            if slots is not None:
                sums[part.locks > 0] += len(slots)
            if index.is_victim(node, c):
                queued = part.queued
                if queued is None or queued > index.key_of(node, c):
                    yield f"{node}: may go from {tier.name} but is queued as {queued}"
        if sums != [index.evictable[c], index.protected[c]]:
            kept = [index.evictable[c], index.protected[c]]
            yield f"INV-01 {tier.name}/{c}: evictable, protected kept as {kept}, are {sums}"


def _locks(tree: Tree, nodes: list[Node], holds: Iterable[Hold]) -> Iterator[str]:
    """INV-03, INV-04: counts are exactly those of the holds; what is held is there."""
    own: Counter[tuple[int, int, int]] = Counter()
    for hold in holds:
        own[hold.tier, id(hold.node), hold.component] += 1
        if hold.node.parent is not None and not hold.node.has(hold.component, hold.tier):
            yield f"INV-04 {hold.node}: held {hold.component} is gone from {hold.tier.name}"
    for node in nodes:
        for tier in Tier:
            parts = node.parts[tier]
            for c in range(tree.width):
                wanted = own[tier, id(node), c]
                if c == 0:
                    wanted += sum(k.parts[tier][0].locks > 0 for k in node.children.values())
                if (locks := parts[c].locks) != wanted:
                    yield f"INV-03 {node}: {tier.name}/{c} has {locks} locks, holders {wanted}"
