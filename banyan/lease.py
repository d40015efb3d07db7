"""What one request holds: its page tables, its state slots, its place in the tree.

A `Lease` is made by `PrefixCache.acquire` and given back once by `PrefixCache.release`; between
the two, `allocate`, `advance` and `commit` change it, all from the scheduler thread. The runner
only reads the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from banyan.tiers.operation import Operation
    from banyan.tiers.ops import CopyTicket
    from banyan.tree.node import Node

Slots = npt.NDArray[np.int32]

_MIN_CAPACITY = 16


class PageTable:
    """The slots of consecutive pages of one `Full` or `Window` component.

    Entry `i` is the slot of page `first_page + i`. Pages below `owned_from` belong to the tree (a
    lock keeps them); those from it on belong to the request.
    """

    __slots__ = ("_buffer", "_origin", "_room", "first_page", "owned_from", "stop_page")

    stop_page: int
    """One past the last page that has a slot."""

    def __init__(self, first_page: int = 0) -> None:
        self.first_page = self.stop_page = self.owned_from = first_page
        self._buffer: Slots = np.empty(_MIN_CAPACITY, np.int32)
        self._origin = first_page
        """The page of the buffer's first entry."""
        self._room = first_page + _MIN_CAPACITY
        """The first page that the buffer has no entry for."""

    @property
    def slots(self) -> Slots:
        """int32[stop_page - first_page], a read-only view valid until the next change."""
        view = self._between(self.first_page, self.stop_page)
        view.flags.writeable = False
        return view

    @property
    def owned(self) -> Slots:
        """int32[...], a copy of the request-owned tail."""
        return self._between(max(self.owned_from, self.first_page), self.stop_page).copy()

    def append(self, slots: Slots) -> None:
        """Add slots for the pages from `stop_page` on. Cost: amortised O(len(slots))."""
        stop = self.stop_page + len(slots)
        if stop > self._room:
            live = self._between(self.first_page, self.stop_page)
            grown = np.empty(max(_MIN_CAPACITY, 2 * (len(live) + len(slots))), np.int32)
            grown[: len(live)] = live
            self._buffer, self._origin = grown, self.first_page
            self._room = self.first_page + len(grown)
        self._buffer[self.stop_page - self._origin : stop - self._origin] = slots
        self.stop_page = stop

    def push(self, slot: int) -> None:
        """Add the slot of one page more. Cost: amortised O(1)."""
        stop = self.stop_page
        if stop == self._room:
            self.append(np.array([slot], np.int32))
            return
        self._buffer[stop - self._origin] = slot
        self.stop_page = stop + 1

    def replace(self, first: int, slots: Slots) -> None:
        """Point the pages from `first` on at other slots (duplicates repointed to the tree's)."""
        self._between(first, first + len(slots))[:] = slots

    def drop_before(self, page: int) -> Slots:
        """Forget pages below `page`; returns the request-owned slots among them, to be freed.

        What it returns is a part of the buffer that is not written to any more.
        """
        first = self.first_page
        page = min(max(page, first), self.stop_page)
        freed = self._between(max(first, min(self.owned_from, page)), page)
        self.first_page = page
        if self.owned_from < page:
            self.owned_from = page
        return freed

    def _between(self, first: int, stop: int) -> Slots:
        return self._buffer[first - self._origin : stop - self._origin]


@dataclass(slots=True)
class StateTable:
    """The state slots of one `Point` component, used in turn so that no state is ever copied.

    The forward pass reads its initial state from `read` (None: start from zeros) and writes the
    final one to `write`, which may be the same slot. A checkpoint is kept by writing elsewhere.

    Args:
        read: slot the next forward starts from; the tree's when `read_locked`.
        write: slot the next forward writes to, request-owned; None until allocated.
        kept: request-owned slot that holds the state at `kept_at` tokens (the rolling snapshot).
        spare: a request-owned slot without content, to write to next.
    """

    read: int | None = None
    read_locked: bool = False
    write: int | None = None
    kept: int | None = None
    kept_at: int = -1
    spare: int | None = None

    @property
    def is_wanting(self) -> bool:
        """Whether there is no slot to write to that may be overwritten."""
        return self.write is None or self.write == self.kept

    @property
    def needs_slot(self) -> bool:
        """Whether a new slot must be found to write to."""
        return self.is_wanting and self.spare is None

    def choose_write(self, fresh: int | None) -> None:
        """Where the next forward pass writes: the slot in use, `fresh`, the spare one, or else
        over the kept state, which is then kept no longer."""
        if not self.is_wanting:
            return
        if fresh is not None:
            self.write = fresh
        elif self.spare is not None:
            self.write, self.spare = self.spare, None
        else:
            self.kept, self.kept_at = None, -1

    def has_written(self, stop: int, keep: bool) -> None:
        """A forward pass has left the state of `stop` tokens in `write`; `keep` it, or go on."""
        if not self.read_locked and self.read not in (None, self.write, self.kept):
            self.spare = self.read
        self.read, self.read_locked = self.write, False
        if keep:
            if self.kept not in (None, self.write):
                self.spare = self.kept
            self.kept, self.kept_at = self.write, stop

    def has_published(self, taken: bool) -> None:
        """The kept state was offered to the tree, which has `taken` its slot or had one."""
        slot, current = self.kept, self.read == self.kept
        self.kept, self.kept_at = None, -1
        if taken:
            self.read_locked = current
            if self.write == slot:
                self.write = None
        elif not current:
            self.spare = slot

    @property
    def owned(self) -> list[int]:
        """The distinct request-owned slots."""
        slots = {self.write, self.kept, self.spare}
        if not self.read_locked:
            slots.add(self.read)
        return sorted(s for s in slots if s is not None)


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on a boundary and everything it computed beyond it.

    Args:
        boundary: tokens that need not be computed, as granted by `acquire`.
        device_len, host_len: of those, the tokens served from each tier (they sum to `boundary`).
        length: tokens whose data the tables now hold; grows with `advance`.
        tables: by component index, a `PageTable` or a `StateTable`.
        node: the tree's node that ends at the last published boundary.
        lock_start: by component, the position from which the tree keeps data for this lease.
        generation: of the cache when it was granted; after a flush it publishes nothing.
        publish: whether commits reach the tree.
        ticket: the running load-back to wait on layer by layer, or None.
        loading: that load-back while it has not been applied; it holds the pins until then.
        broken: the load-back failed: release this lease and acquire again.
        borrowed: the tree's node up to whose end the `Full` table has the tree's own slots, beyond
            the published boundary, while there is such a part; it is locked.
        rolling: the snapshots of its conversation that later ones supersede.
        continues: the latest snapshot that its prompt goes on from, there or gone, or None.
        repeats: its prompt ends where that snapshot was taken: it was asked before.
        welcome: whether its snapshots may stay, once that was decided.
    """

    boundary: int
    device_len: int
    host_len: int
    namespace: bytes
    node: Node
    tables: list[PageTable | StateTable]
    lock_start: list[int | None] = field(default_factory=list)
    length: int = 0
    priority: int = 0
    generation: int = 0
    publish: bool = True
    ticket: CopyTicket | None = None
    loading: Operation | None = None
    broken: bool = False
    borrowed: Node | None = None
    released: bool = False
    rolling: list[Node] = field(default_factory=list)
    continues: Node | None = None
    repeats: bool = False
    welcome: bool | None = None

    @property
    def present(self) -> int:
        """Tokens whose `Full` data is the tree's: a forward pass reads it and must not write it."""
        return max(self.node.end, self.borrowed.end if self.borrowed is not None else 0)

    def pages(self, component: int) -> PageTable:
        """The page table of a page-shaped component."""
        table = self.tables[component]
        assert isinstance(table, PageTable)
        return table

    def states(self, component: int) -> StateTable:
        """The state table of a `Point` component."""
        table = self.tables[component]
        assert isinstance(table, StateTable)
        return table
