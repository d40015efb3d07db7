"""The proofs can fail: defects put into the product are caught by the same random operations."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch

from banyan.cache import PrefixCache
from banyan.errors import InvariantError, PoolError
from banyan.lease import Lease
from banyan.spec import Point, Window
from banyan.tiers.controller import Controller
from banyan.tiers.operation import Operation
from banyan.tree import Node, Offer, Tier, Tree, match
from banyan.tree.tier_index import TierIndex
from tests.property.episodes import episode

CAUGHT = (AssertionError, InvariantError, PoolError)
EPISODES, OPERATIONS = 6, 400

Patch = pytest.MonkeyPatch


def lock_not_released(patch: Patch) -> None:
    """Release gives back windows and states, and forgets the path."""
    real = Tree.unlock

    def unlock(self: Tree, node: Node, starts: list[int | None]) -> None:
        real(self, node, starts)
        if node.parent is not None and node.end % 3 == 0:
            self.device.lock_path(node)

    patch.setattr(Tree, "unlock", unlock)


def window_lock_not_released(patch: Patch) -> None:
    """The topmost node of a window stays locked."""
    real = Tree.unlock_window

    def unlock(self: Tree, node: Node, c: int, start: int | None, below: int) -> int | None:
        first = None if start is None else start + self.page_size
        return real(self, node, c, first, below)

    patch.setattr(Tree, "unlock_window", unlock)


def state_lock_not_released(patch: Patch) -> None:
    """A state stays locked after it has been read."""

    def unlock(self: PrefixCache, lease: Lease, component: int) -> None:
        lease.lock_start[component] = None

    patch.setattr(PrefixCache, "_unlock_state", unlock)


def window_stored_shifted(patch: Patch) -> None:
    """A window's pages are published one page off."""
    real = PrefixCache._offer

    def offer(self: PrefixCache, lease: Lease, c: int, start: int, stop: int) -> Offer | None:
        made = real(self, lease, c, start, stop)
        if made is not None and isinstance(self.spec.components[c].reach, Window):
            return Offer(made.first_page, np.roll(made.slots, 1))
        return made

    patch.setattr(PrefixCache, "_offer", offer)


def window_matched_shifted(patch: Patch) -> None:
    """A match asks for one page of the window less than a resume needs."""
    real = match.coverage_of

    def coverage(spec: object) -> match.Coverage:
        got = real(spec)  # type: ignore[arg-type]
        page = spec.page_size  # type: ignore[attr-defined]
        return dataclasses.replace(
            got, windows=tuple((c, reach - page) for c, reach in got.windows)
        )

    patch.setattr("banyan.tree.tree.coverage_of", coverage)


def window_kept_shifted(patch: Patch) -> None:
    """A running request lets go of its window one page early."""
    real = PrefixCache._slide

    def slide(self: PrefixCache, lease: Lease, c: int, reach: int) -> np.ndarray:
        return real(self, lease, c, reach - self.page_size)

    patch.setattr(PrefixCache, "_slide", slide)


def state_stored_late(patch: Patch) -> None:
    """The state of one boundary is published under the next."""
    real = PrefixCache.advance

    def advance(self: PrefixCache, lease: Lease, stop: int) -> None:
        real(self, lease, stop)
        for c in self._points:
            if lease.states(c).kept_at == stop:
                lease.states(c).kept_at = stop + self.page_size

    patch.setattr(PrefixCache, "advance", advance)


def state_left_with_upper_half(patch: Patch) -> None:
    """A split gives the state to the half whose end it is not."""
    real = Tree.split

    def split(self: Tree, node: Node, at: int) -> Node:
        upper = real(self, node, at)
        for c, component in enumerate(self.spec.components):
            here = node.parts[Tier.DEVICE][c]
            moves = isinstance(component.reach, Point) and not here.locks
            if moves and here.slots is not None:
                self.device.add(upper, c, self.device.remove(node, c))
        return upper

    patch.setattr(Tree, "split", split)


def duplicate_not_repointed(patch: Patch) -> None:
    """Duplicates are freed while the request's table still names them."""
    real = Tree.insert

    def insert(self: Tree, *args: object) -> object:
        done = real(self, *args)  # type: ignore[arg-type]
        done.repoint = ()
        return done

    patch.setattr(Tree, "insert", insert)


def source_not_pinned(patch: Patch) -> None:
    """A load-back reads host data that nothing keeps there."""
    real = TierIndex.lock_path

    def lock_path(self: TierIndex, node: Node) -> None:
        if self.tier is Tier.DEVICE or "_pin_for_load" not in {
            frame.function for frame in inspect.stack(0)[1:4]
        }:
            real(self, node)

    patch.setattr(TierIndex, "lock_path", lock_path)


def backup_visible_at_once(patch: Patch) -> None:
    """A backup is published when it is started."""
    real = Controller._launch

    def launch(self: Controller, op: Operation, *rest: object) -> object:
        outcome = real(self, op, *rest)  # type: ignore[call-arg]
        if op.op_id in self.operations and op.target is Tier.HOST:
            for part in op.moving():
                if self._may_attach(op, part.node, part.component):
                    self.tree.attach(part.node, part.component, Tier.HOST, part.dst.copy())
                    part.dst = part.dst[:0]
        return outcome

    patch.setattr(Controller, "_launch", launch)


DEFECTS: list[tuple[Callable[[Patch], None], str]] = [
    (lock_not_released, "full"),
    (lock_not_released, "full+window+state"),
    (window_lock_not_released, "full+window"),
    (state_lock_not_released, "full+state"),
    (window_stored_shifted, "full+window"),
    (window_matched_shifted, "full+window"),
    (window_kept_shifted, "full+window"),
    (state_stored_late, "full+state"),
    (state_stored_late, "full+window+state"),
    (state_left_with_upper_half, "full+state"),
    (duplicate_not_repointed, "full"),
    (source_not_pinned, "full"),
    (backup_visible_at_once, "full"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("defect", "kind"), DEFECTS, ids=[f"{d.__name__}-{kind}" for d, kind in DEFECTS]
)
def test_defect_is_caught(defect: Callable[[Patch], None], kind: str, monkeypatch: Patch) -> None:
    defect(monkeypatch)
    with pytest.raises(CAUGHT) as caught:
        for seed in range(EPISODES):
            episode(kind, seed, OPERATIONS)
    assert "seed" in "".join(getattr(caught.value, "__notes__", []))
