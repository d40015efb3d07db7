"""Read-only matching: the best boundary a key can resume at, from device alone and from any tier.

The walk finds the nodes that spell the key; the coverage pass then goes backwards from the deepest
one, so its cost depends on how far the answer lies from the end, not on the length of the path.
The result is the largest boundary in the intersection of what all components can serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from banyan.spec import CacheSpec, Full, Point, Window
from banyan.tree.keys import (
    LONG_BYTES,
    ROOT_NAMESPACE,
    TOKEN_BYTES,
    common_bytes,
    common_bytes_of_long,
)
from banyan.tree.node import Node, Tier

if TYPE_CHECKING:
    from banyan.tree.tree import Tree


@dataclass(frozen=True, slots=True)
class Coverage:
    """The components of a spec by what matching asks of them, worked out once."""

    windows: tuple[tuple[int, int], ...]
    """(component, tokens that must be present before a boundary)."""
    points: tuple[int, ...]
    all: int
    """A bit for each component."""
    furthest: int
    """The reach of the longest window, 0 where there is none."""


def coverage_of(spec: CacheSpec) -> Coverage:
    """Sort the components of `spec` by reach."""
    windows, points = [], []
    for index, component in enumerate(spec.components):
        match component.reach:
            case Full():
                pass
            case Window() as window:
                far = 1 << 40
                far -= far % spec.page_size
                windows.append((index, far - window.first_needed(far, spec.page_size)))
            case Point():
                points.append(index)
    everything = (1 << len(spec.components)) - 1
    furthest = max((reach for _, reach in windows), default=0)
    return Coverage(tuple(windows), tuple(points), everything, furthest)


class Match(Struct, frozen=True, eq=False, gc=False):
    """What a key can be resumed from. Made by `Tree.match`; the tree is not changed by it.

    A `Struct` takes less than half of a dataclass's time to create. Nothing that it names refers to
    it, so that the garbage collector need not look at it.

    Args:
        boundary: tokens that need not be computed if what is on host is loaded back.
        device_boundary: tokens that need not be computed with device data alone.
        full_len: how far `Full` data matches (tokens): beyond `boundary`, a checkpoint was missing.
        device_full: how far it matches on device alone.
        loading: a load-back of part of this path is running; wait for it rather than start another.
        path: the matched nodes below the root, the last one perhaps in part.
        epoch: the tree's structure count when this was made.
    """

    key: bytes
    namespace: bytes
    boundary: int
    device_boundary: int
    full_len: int
    device_full: int
    loading: bool
    path: Sequence[Node]
    epoch: int

    @property
    def branch(self) -> int:
        """Where the key parts from other keys, a place that more keys may come by (tokens); 0 where
        it goes on from a leaf, which is its own earlier turn, or is known to its end."""
        if not self.path or not (self.full_len < self.path[-1].end or self.path[-1].children):
            return 0
        return self.full_len


def match(tree: Tree, key: bytes, namespace: bytes = ROOT_NAMESPACE) -> Match:
    """The best boundaries for `key`: at most all but its last token, in whole pages (INV-15).

    Changes nothing (no split, no recency, no allocation).

    Cost: one memcmp per chain or single node of the path, one dict look-up where a node has several
    children, and the coverage of one boundary. All in one function: what a short match takes is
    calls, once its tokens are compared.
    """
    node = tree.roots.get(namespace)
    if node is None:
        return Match(key, namespace, 0, 0, 0, 0, False, (), tree.epoch)
    page_bytes = tree.page_bytes
    path: list[Node] = []
    startswith = key.startswith
    at, limit = 0, (len(key) - TOKEN_BYTES) // page_bytes * page_bytes
    while at < limit:
        child = node.lone
        if child is None:
            child = node.children.get(key[at : at + page_bytes])
            if child is None:
                break
        chain = child.chain
        if chain is None:
            text, same = child.own, None
            if startswith(text, at):
                path.append(child)
                node = child
                at = child.end * TOKEN_BYTES
                continue
        else:
            text, same = chain.text, None
            if len(text) > LONG_BYTES:  # often known in part, and not to be compared twice
                same = common_bytes_of_long(text, key, at)
                whole = same == len(text)
            else:
                whole = startswith(text, at)
            if whole:
                path += chain.nodes
                node = path[-1]
                at = node.end * TOKEN_BYTES
                continue
        if same is None:
            same = common_bytes(text, key, at, limit)
        shared = min(same, limit - at) // page_bytes * page_bytes
        if shared:
            at += shared
            path += (child,) if chain is None else chain.down_to(at // TOKEN_BYTES)
        break
    if not path:
        return Match(key, namespace, 0, 0, 0, 0, False, (), tree.epoch)
    if at > limit:
        at = limit
        while path[-1].start * TOKEN_BYTES >= limit:  # a chain was longer than what may be matched
            path.pop()
    end = at // TOKEN_BYTES
    last, need = path[-1], tree.need
    if (
        last.present != need.all
        or (need.points and end != last.end)
        or (end - need.furthest < last.start and not _windows_on_device(path, end, need))
    ):
        return _match_on_tiers(key, namespace, path, end, need, tree.epoch)
    return Match(key, namespace, end, end, end, end, False, path, tree.epoch)


def best_boundary(path: list[Node], matched: int, need: Coverage, device_only: bool) -> int:
    """The largest boundary at most `matched` tokens that every component covers (INV-07).

    Args:
        path: matched nodes, top first; `matched` lies in or at the end of the last one.
        device_only: ask for device data alone; otherwise either tier's will do.

    Cost: O(nodes between the answer and the end of the path + nodes of one window).
    """
    i, boundary = len(path) - 1, matched
    if device_only:
        i, boundary = device_end(path, matched)
    while i >= 0:
        gap = _first_gap(path, i, boundary, need, device_only)
        if gap is None:
            return boundary
        i = gap
        boundary = path[i].end if i >= 0 else 0
    return 0


def device_end(path: list[Node], matched: int) -> tuple[int, int]:
    """Index of the last node of `path` with `Full` data on device, and how far that matches."""
    i = len(path) - 1
    while i >= 0 and path[i].full is None:
        i -= 1
    return i, min(matched, path[i].end) if i >= 0 else 0


def _first_gap(
    path: list[Node], i: int, boundary: int, need: Coverage, device_only: bool
) -> int | None:
    """None when `boundary`, in node `i`, is covered; else the next node worth trying."""
    node = path[i]
    for component in need.points:
        if boundary != node.end or _absent(node, component, device_only):
            return i - 1
    for component, reach in need.windows:
        low = boundary - reach
        j = i
        while j >= 0 and path[j].end > low:
            if _absent(path[j], component, device_only):
                return j - 1
            j -= 1
    return None


def _absent(node: Node, component: int, device_only: bool) -> bool:
    device, host = node.parts
    if device[component].slots is not None:
        return False
    return device_only or host[component].slots is None


def is_loading(path: list[Node]) -> bool:
    """Whether a load-back into a node of `path` is running. Cost: O(len(path))."""
    return any(
        node.claims and any(claim.pinned is Tier.HOST for claim in node.claims) for node in path
    )


def _windows_on_device(path: list[Node], matched: int, need: Coverage) -> bool:
    """Whether the device has all windows of the end of the match."""
    for component, reach in need.windows:
        low, bit = matched - reach, 1 << component
        for node in reversed(path):
            if node.end <= low:
                break
            if not node.present & bit:
                return False
    return True


def _match_on_tiers(
    key: bytes, namespace: bytes, path: list[Node], matched: int, need: Coverage, epoch: int
) -> Match:
    """The match of a key that `path` spells for `matched` tokens, where the device lacks a part."""
    device = best_boundary(path, matched, need, device_only=True)
    boundary = device if device == matched else best_boundary(path, matched, need, False)
    loading = boundary > device and is_loading(path)
    full = matched if device == matched else device_end(path, matched)[1]
    return Match(key, namespace, boundary, device, matched, full, loading, path, epoch)
