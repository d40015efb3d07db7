"""Where one forward pass reads and writes each component: slots turned into tensor indices, once.

Owns the arithmetic between page tables and rows of pool tensors. A row is one token's entry: row
`slot * page_size + offset` of a page-shaped buffer viewed as [slots * page_size, ...]. Knows no
model and no layer: every layer of a component uses the same plan. Made and used on the thread
that runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan.errors import LeaseError
from banyan.lease import PageTable, StateTable
from banyan.spec import Reach, Window
from banyan.tiers.ops import CopyTicket

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SeqInput:
    """One sequence's share of a forward pass.

    Args:
        tokens: the new tokens, at least one.
        start: position of the first; data for what each component needs of [0, start) is cached.
        tables: by component index; page tables reach through the page of the last new token,
            state tables have a `write` slot.
        ticket: a load-back still running on these tables, or None.
        present: tokens whose data in the first, `Full` component is there already, so that the
            forward reads it and does not write it.
        history: all tokens so far, prompt and answer, a live list that only grows; only a model
            that proves what it reads looks at it.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[PageTable | StateTable]
    ticket: CopyTicket | None = None
    present: int = 0
    history: Sequence[int] = ()

    @property
    def stop(self) -> int:
        """One past the position of the last new token."""
        return self.start + len(self.tokens)


class Read(Protocol):
    """How to fetch a batch's keys or values from one page-shaped buffer."""

    def take(self, pages: Tensor, rows: Tensor) -> Tensor:
        """The entries in position order, as [batch, key_len, *shape].

        Args:
            pages: [slots, page_size, *shape], the buffer.
            rows: [slots * page_size, *shape], the same memory.

        Returns:
            A view of the buffer or a fresh tensor, with the same strides either way.
        """


@dataclass(frozen=True, slots=True)
class RunRead:
    """One sequence whose slots are an ascending run: no copy."""

    start: int
    stop: int

    def take(self, pages: Tensor, rows: Tensor) -> Tensor:
        """See `Read`."""
        return rows[self.start : self.stop].unsqueeze(0)


@dataclass(frozen=True, slots=True)
class PagesRead:
    """One sequence with scattered slots: whole pages are gathered, then trimmed.

    Args:
        slots: int64[n] on the pool's device.
        skip: entries of the first page that lie before the first key.
        count: keys.
    """

    slots: Tensor
    skip: int
    count: int

    def take(self, pages: Tensor, rows: Tensor) -> Tensor:
        """See `Read`."""
        taken = pages.index_select(0, self.slots).flatten(0, 1)
        return taken[self.skip : self.skip + self.count].unsqueeze(0)


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Several sequences, right-aligned. What pads a shorter one is its own newest entry, which
    the mask hides: bytes of a freed page (possibly NaN) never enter the arithmetic.

    Args:
        index: int64[batch * key_len] on the pool's device.
    """

    index: Tensor
    batch: int

    def take(self, pages: Tensor, rows: Tensor) -> Tensor:
        """See `Read`."""
        return rows.index_select(0, self.index).view(self.batch, -1, *rows.shape[1:])


@dataclass(frozen=True, slots=True)
class PagePlan:
    """One forward's reads and writes of a `Full` or `Window` component.

    Args:
        start: tokens before the new ones, of the longest sequence.
        new_len: new tokens per sequence.
        lengths: keys of each sequence, the new ones included.
        window: the component's window in tokens, or None.
        read: how to fetch `max(lengths)` keys per sequence, after the write.
        write: rows of the new entries, batch-major: a slice when they are one run.
        skip: leading new tokens whose entries are there already, and not written.
    """

    start: int
    new_len: int
    lengths: tuple[int, ...]
    window: int | None
    read: Read
    write: slice | Tensor
    skip: int = 0

    @property
    def key_len(self) -> int:
        """Keys per sequence after padding."""
        return max(self.lengths)

    @property
    def key_start(self) -> int:
        """Position of the first key of the longest sequence; the others are padded to it."""
        return self.start + self.new_len - self.key_len


@dataclass(frozen=True, slots=True)
class StatePlan:
    """One forward's reads and writes of a `Point` component.

    For a batch of one, `read` and `write` are ints (`read` None: no previous state); for more,
    int64[batch] on the pool's device, and `fresh` marks sequences that start from zeros.
    """

    read: int | Tensor | None
    write: int | Tensor
    fresh: Tensor | None = None


def plan_pages(
    seqs: Sequence[SeqInput],
    component: int,
    reach: Reach,
    page_size: int,
    device: torch.device,
) -> PagePlan:
    """Plan a page-shaped component.

    Args:
        seqs: one sequence with any number of new tokens, or several with one each.

    Raises:
        LeaseError: a table does not cover what the layers will read and write.

    Cost: O(batch * key_len) numpy work; one small copy to the device.
    """
    window = reach.size if isinstance(reach, Window) else None
    if len(seqs) == 1:
        return _plan_one(seqs[0], component, window, page_size, device)
    spans = [_visible(seq, component, window, page_size) for seq in seqs]
    lengths = tuple(seq.stop - first for seq, (first, _) in zip(seqs, spans, strict=True))
    rows = np.empty((len(seqs), max(lengths)), np.int64)
    for row, (first, slots), length in zip(rows, spans, lengths, strict=True):
        own = _rows(slots, page_size, first % page_size, length)
        row[:-length], row[-length:] = own[-1], own
    read = RowsRead(_to(rows.reshape(-1), device), len(seqs))
    write = _to(rows[:, -1].copy(), device)
    return PagePlan(max(seq.start for seq in seqs), 1, lengths, window, read, write)


def plan_states(seqs: Sequence[SeqInput], component: int, device: torch.device) -> StatePlan:
    """Plan a `Point` component.

    Raises:
        LeaseError: a table without a slot to write to, or with none to read at `start` > 0.
    """
    reads, writes = zip(*(_state_slots(seq, component) for seq in seqs), strict=True)
    if len(seqs) == 1:
        return StatePlan(reads[0], writes[0])
    fresh = [slot is None for slot in reads]
    read = np.array([w if r is None else r for r, w in zip(reads, writes, strict=True)], np.int64)
    return StatePlan(
        _to(read, device),
        _to(np.array(writes, np.int64), device),
        torch.tensor(fresh, device=device) if any(fresh) else None,
    )


def _visible(
    seq: SeqInput, component: int, window: int | None, page_size: int
) -> tuple[int, npt.NDArray[np.int32]]:
    """First position that the new tokens see, and the slots from its page through the last."""
    table = seq.tables[component]
    first = 0 if window is None else max(0, seq.start - window + 1)
    first_page, last_page = first // page_size, (seq.stop - 1) // page_size
    if not isinstance(table, PageTable):
        raise LeaseError(f"component {component} needs a page table, got {type(table).__name__}")
    if table.first_page > first_page or table.stop_page <= last_page:
        raise LeaseError(
            f"component {component}: the table covers pages [{table.first_page}, "
            f"{table.stop_page}), the forward needs [{first_page}, {last_page + 1})"
        )
    offset = table.first_page
    return first, table.slots[first_page - offset : last_page + 1 - offset]


def _plan_one(
    seq: SeqInput, component: int, window: int | None, page_size: int, device: torch.device
) -> PagePlan:
    """Plan one sequence; slices wherever its slots are an ascending run."""
    first, slots = _visible(seq, component, window, page_size)
    skip, new_len = first % page_size, len(seq.tokens)
    length = seq.stop - first
    there = min(max(0, seq.present - seq.start), new_len) if component == 0 else 0
    fresh = new_len - there
    past = skip + length - fresh
    read: Read
    write: slice | Tensor
    if _is_run(slots):
        at = int(slots[0]) * page_size
        read = RunRead(at + skip, at + skip + length)
        write = slice(at + past, at + past + fresh)
    elif not fresh:
        read = PagesRead(_to(slots.astype(np.int64), device), skip, length)
        write = slice(0, 0)
    else:
        read = PagesRead(_to(slots.astype(np.int64), device), skip, length)
        new_slots = slots[past // page_size :]
        if _is_run(new_slots):
            at = int(new_slots[0]) * page_size + past % page_size
            write = slice(at, at + fresh)
        else:
            write = _to(_rows(new_slots, page_size, past % page_size, fresh), device)
    return PagePlan(seq.start, new_len, (length,), window, read, write, there)


def _is_run(slots: npt.NDArray[np.int32]) -> bool:
    """Whether the slots ascend by one."""
    steps = len(slots) - 1
    if int(slots[-1]) - int(slots[0]) != steps:
        return False
    return steps < 2 or bool((slots[1:] - slots[:-1] == 1).all())


def _rows(slots: npt.NDArray[np.int32], page_size: int, skip: int, count: int) -> Rows:
    """Rows of `count` consecutive tokens, the first being entry `skip` of the first slot's page."""
    pages = slots.astype(np.int64)[:, None] * page_size + np.arange(page_size)
    return pages.reshape(-1)[skip : skip + count]


def _state_slots(seq: SeqInput, component: int) -> tuple[int | None, int]:
    table = seq.tables[component]
    if not isinstance(table, StateTable) or table.write is None:
        raise LeaseError(f"component {component} has no state slot to write to")
    if (table.read is None) != (seq.start == 0):
        raise LeaseError(f"component {component}: read slot {table.read} at token {seq.start}")
    return table.read, table.write


def _to(index: Rows, device: torch.device) -> Tensor:
    return torch.from_numpy(index).to(device)
