"""The oracle's hands on the pools: compares what a forward pass reads, writes what it adds.

Owns one view per buffer of the device pools, and the arithmetic from tables to rows. Knows no
scheduler. Used on the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from banyan.engine.oracle_hash import Words
from banyan.engine.oracle_ledger import Code, Lanes, Ledger
from banyan.engine.plans import SeqInput
from banyan.errors import BanyanError, LeaseError
from banyan.lease import PageTable, StateTable
from banyan.spec import Buffer, Reach, Window


class WrongBytes(BanyanError):
    """A forward pass read bytes that its prefix did not leave there.

    Args:
        position: of the entry in its sequence; of a state, the tokens it should have consumed.
        length: tokens before the new ones.
        slot: where it was read.
    """

    def __init__(self, position: int, length: int, buffer: Buffer, rank: int, slot: int) -> None:
        self.position, self.length, self.slot = position, length, slot
        self.layer, self.buffer, self.rank = buffer.layer, buffer.name, rank
        super().__init__(
            f"rank {rank}, layer {buffer.layer}, buffer {buffer.name}: wrong bytes for position "
            f"{position} in slot {slot}, read by a sequence at {length} tokens"
        )


class _Read(NamedTuple):
    """Positions [first, stop) of a sequence, in `slots` from entry `skip` on."""

    row: int
    first: int
    stop: int
    skip: int
    slots: npt.NDArray[np.int32]


class _PagePlan(NamedTuple):
    """What one forward reads and writes in any page-shaped buffer of one component.

    Args:
        rows: int64[n], of the pool, to be written.
        new: index into the ledger's entries of what is written there.
    """

    reads: list[_Read]
    rows: npt.NDArray[np.int64]
    new: tuple[Any, Any]


class Work:
    """One forward pass: its sequences, their rows in the ledger, and plans shared by all buffers.

    Attributes:
        at: int64[n], tokens before the new ones. stop: int64[n], with them.
    """

    def __init__(self, seqs: Sequence[SeqInput], rows: list[int], ledger: Ledger) -> None:
        self.seqs, self.rows, self.ledger = seqs, rows, ledger
        self.row_index = np.array(rows, np.int64)
        self.at = np.array([seq.start for seq in seqs], np.int64)
        self.stop = np.array([seq.stop for seq in seqs], np.int64)
        self._plans: dict[int, _PagePlan] = {}
        self._slots: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    @cached_property
    def hashes_at_start(self) -> Words:
        """uint64[n]: of what comes before the new tokens."""
        return self.ledger.hashes[self.row_index, self.at]

    @cached_property
    def hashes_at_stop(self) -> Words:
        """uint64[n]: of each whole prefix."""
        return self.ledger.hashes[self.row_index, self.stop]

    def plan(self, component: int, reach: Reach, page_size: int) -> _PagePlan:
        """The reads and writes of a page-shaped component, made once.

        Raises:
            LeaseError: a table does not cover them.
        """
        if component not in self._plans:
            self._plans[component] = self._make_plan(component, reach, page_size)
        return self._plans[component]

    def _make_plan(self, component: int, reach: Reach, page: int) -> _PagePlan:
        back = reach.size - 1 if isinstance(reach, Window) else None
        if len(self.seqs) == 1:
            return self._plan_one(component, back, page)
        reads: list[_Read] = []
        lasts: list[int] = []
        for seq, row in zip(self.seqs, self.rows, strict=True):
            start = seq.start
            first = 0 if back is None else max(0, start - back)
            low, high = first // page, start // page + 1
            slots = _covering(seq.tables[component], component, low, high)
            reads.append(_Read(row, first, start, first - low * page, slots))
            lasts.append(slots[-1])
        rows = np.array(lasts, np.int64) * page + self.at % page
        return _PagePlan(reads, rows, (self.row_index, self.at))

    def _plan_one(self, component: int, back: int | None, page: int) -> _PagePlan:
        """The plan of a batch of one, of which some new tokens may be there already."""
        seq, row = self.seqs[0], self.rows[0]
        first = 0 if back is None else max(0, seq.start - back)
        there = min(max(seq.start, seq.present), seq.stop) if component == 0 else seq.start
        low = first // page
        slots = _covering(seq.tables[component], component, low, -(-seq.stop // page))
        past = slots[: -(-there // page) - low]
        own = slots[there // page - low :].astype(np.int64)
        own = (own[:, None] * page + np.arange(page)).reshape(-1)
        rows = own[there % page : there % page + seq.stop - there]
        read = _Read(row, first, there, first - low * page, past)
        return _PagePlan([read], rows, (row, slice(there, seq.stop)))

    def state_slots(self, component: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """int64[n] slots to read (-1: start from nothing), and int64[n] to write.

        Raises:
            LeaseError: a sequence has no slot to write to, or to read from.
        """
        if component not in self._slots:
            tables = [_states(seq, component) for seq in self.seqs]
            read = [-1 if table.read is None else table.read for table in tables]
            write = [-1 if table.write is None else table.write for table in tables]
            self._slots[component] = np.array(read, np.int64), np.array(write, np.int64)
        return self._slots[component]


class PageBuffer:
    """One buffer of a page-shaped component.

    Args:
        data: [slots, page_size, ...], the pool's own memory.
        index: of its entries in the ledger.
    """

    def __init__(
        self,
        component: int,
        reach: Reach,
        buffer: Buffer,
        code: Code,
        data: npt.NDArray[Any],
        rank: int,
        index: int,
    ) -> None:
        self.layer = buffer.layer
        self._component, self._reach, self._buffer, self._code = component, reach, buffer, code
        self._rank, self._index = rank, index
        self._page_size = data.shape[1]
        lanes: Lanes = data.reshape(len(data), -1).view(code.dtype)
        self._pages = lanes
        self._rows = lanes.reshape(len(data) * self._page_size, code.lanes)

    def check(self, work: Work) -> int:
        """Compare all that the sequences read; returns the bytes compared.

        Raises:
            WrongBytes: at the first difference.
        """
        lanes = self._code.lanes
        total = 0
        entries = work.ledger.entries[self._index]
        for read in work.plan(self._component, self._reach, self._page_size).reads:
            count = read.stop - read.first
            if not count:
                continue
            taken = self._pages.take(read.slots, axis=0).reshape(-1, lanes)
            found = taken[read.skip : read.skip + count]
            wanted = entries[read.row, read.first : read.stop]
            if not (found == wanted).all():
                raise self._wrong(work, read, found, wanted)
            total += count
        return total * lanes * self._code.dtype.itemsize

    def write(self, work: Work) -> None:
        """Write the entries of the new tokens. Mutates: their rows of the pool."""
        plan = work.plan(self._component, self._reach, self._page_size)
        self._rows[plan.rows] = work.ledger.entries[self._index][plan.new]

    def _wrong(self, work: Work, read: _Read, found: Lanes, wanted: Lanes) -> WrongBytes:
        at = int(np.flatnonzero((found != wanted).any(axis=1))[0])
        slot = int(read.slots[(read.skip + at) // self._page_size])
        length = int(work.at[work.rows.index(read.row)])
        return WrongBytes(read.first + at, length, self._buffer, self._rank, slot)


class StateBuffer:
    """One buffer of a `Point` component; `data` is the pool's own memory, [slots, ...]."""

    def __init__(
        self, component: int, buffer: Buffer, code: Code, data: npt.NDArray[Any], rank: int
    ) -> None:
        self.layer = buffer.layer
        self._component, self._buffer, self._code, self._rank = component, buffer, code, rank
        self._states: Lanes = data.reshape(len(data), -1).view(code.dtype)

    def check(self, work: Work) -> int:
        """Compare the states that the sequences go on from; returns the bytes compared.

        Raises:
            WrongBytes: at the first difference.
        """
        slots, _ = work.state_slots(self._component)
        from_state = slots >= 0
        found = self._states[slots[from_state]]
        wanted = self._code.encode(work.hashes_at_start[from_state])
        if not np.array_equal(found, wanted):
            at = np.flatnonzero(from_state)[(found != wanted).any(axis=1)][0]
            length = int(work.at[at])
            raise WrongBytes(length, length, self._buffer, self._rank, int(slots[at]))
        return found.nbytes

    def write(self, work: Work) -> None:
        """Write the states after the new tokens. Mutates: the write slots."""
        _, slots = work.state_slots(self._component)
        self._states[slots] = self._code.encode(work.hashes_at_stop)


def _covering(
    table: PageTable | StateTable, component: int, low: int, high: int
) -> npt.NDArray[np.int32]:
    """The slots of pages [low, high)."""
    if not isinstance(table, PageTable):
        raise LeaseError(f"component {component} needs a page table, got {type(table).__name__}")
    if table.first_page > low or table.stop_page < high:
        raise LeaseError(
            f"component {component}: the table covers pages [{table.first_page}, "
            f"{table.stop_page}), the forward needs [{low}, {high})"
        )
    offset = table.first_page
    return table.slots[low - offset : high - offset]


def _states(seq: SeqInput, component: int) -> StateTable:
    table = seq.tables[component]
    if not isinstance(table, StateTable) or table.write is None:
        raise LeaseError(f"component {component} has no state slot to write to")
    if (table.read is None) != (seq.start == 0):
        raise LeaseError(f"component {component}: read slot {table.read} at token {seq.start}")
    return table
