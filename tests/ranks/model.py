"""The toy model of one rank, which checks every entry that it reads against the tokens themselves.

An entry is the hash of the prefix that ends there, xor a salt of its buffer and of the rank that
holds it: bytes of another slot, another layer or another rank are wrong, and so is anything older.
Buffers that are equal on all ranks have rank 0's salt.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from banyan.engine.plans import SeqInput
from banyan.lease import PageTable, StateTable
from banyan.pools.assembler import PoolStack
from banyan.spec import Buffer, Window
from tests.support.toy_model import ToyModel, mix

_EMPTY = 7
_MOST = 256
"""Tokens that a history of the simulation has at most."""

_MASK = (1 << 31) - 1

Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Held:
    """A buffer's memory on this rank.

    Args:
        rows: int32[slots * entries, width], a view.
    """

    buffer: Buffer
    salt: int
    rows: Array


class _History:
    """The hashes of a request's growing prefix: `hashes[n]` is that of its first n tokens."""

    __slots__ = ("count", "hashes", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.hashes = np.empty(_MOST + 1, np.int32)
        self.hashes[0], self.count = _EMPTY, 0

    def upto(self, stop: int) -> Array:
        """Hashes of at least the prefixes up to `stop` tokens. Cost: O(new tokens)."""
        if self.count < stop:
            value = int(self.hashes[self.count])
            for at in range(self.count, stop):
                value = mix(value, self.tokens[at])
                self.hashes[at + 1] = value
            self.count = stop
        return self.hashes


class RankModel(ToyModel):
    """Implements `banyan.engine.ports.Model` on one rank's pools.

    Args:
        wrong: told of bytes that do not belong where they were found; does not return.
        picky: see `Scenario`.
    """

    def __init__(
        self, stack: PoolStack, rank: int, wrong: Callable[[str], None], picky: bool
    ) -> None:
        super().__init__(stack)
        self._rank, self._wrong, self._picky = rank, wrong, picky
        self._page = stack.spec.page_size
        self._in_page = np.arange(self._page)
        self._histories: dict[int, _History] = {}
        self._parts = [
            (component.reach, [self._held(c, buffer) for buffer in component.buffers])
            for c, component in enumerate(stack.spec.components)
        ]

    def _held(self, component: int, buffer: Buffer) -> _Held:
        data = self._stack.device[component].buffers[buffer.layer, buffer.name].numpy()
        owner = 0 if buffer.replicated else self._rank
        salt = zlib.crc32(f"{buffer.layer}/{buffer.name}/{owner}".encode()) & _MASK
        return _Held(buffer, salt, data.reshape(-1, data.shape[-1]))

    def _one(self, seq: SeqInput) -> int:
        if seq.ticket is not None:
            for layer in range(self._stack.spec.num_layers):
                seq.ticket.wait_layer(layer)
            if getattr(seq.ticket, "failed", False):
                if self._picky:
                    raise RuntimeError("the bytes to read have not come")
                return 0  # no rank will use it
        hashes = self._history(seq).upto(seq.stop)
        for c, (reach, buffers) in enumerate(self._parts):
            table = seq.tables[c]
            if isinstance(table, StateTable):
                self._state(seq, table, buffers, hashes)
            else:
                low = max(0, seq.start - (reach.size - 1)) if isinstance(reach, Window) else 0
                self._pages(seq, table, buffers, hashes, low, 0 if c else seq.present)
        return int(hashes[seq.stop])

    def _history(self, seq: SeqInput) -> _History:
        known = self._histories.get(id(seq.history))
        if known is None:
            known = self._histories[id(seq.history)] = _History(seq.history)
        return known

    def _state(self, seq: SeqInput, table: StateTable, buffers: list[_Held], hashes: Array) -> None:
        assert table.write is not None and (table.read is None) == (seq.start == 0)
        for held in buffers:
            if table.read is not None:
                self._compare(held, held.rows[table.read], hashes[seq.start], seq.start)
            held.rows[table.write] = int(hashes[seq.stop]) ^ held.salt

    def _pages(
        self,
        seq: SeqInput,
        table: PageTable,
        buffers: list[_Held],
        hashes: Array,
        low: int,
        present: int,
    ) -> None:
        """Check positions [low, start), write [start, stop) but for what is `present`."""
        base = table.first_page * self._page
        if low < base and low < seq.start:
            self._wrong(f"rank {self._rank}: no page for position {low} of {seq.start}")
        rows = (table.slots[:, None] * self._page + self._in_page).ravel()
        read = rows[low - base : seq.start - base]
        first = max(seq.start, present)
        write = rows[first - base : seq.stop - base] if first < seq.stop else None
        wanted, made = hashes[low + 1 : seq.start + 1], hashes[first + 1 : seq.stop + 1]
        for held in buffers:
            if len(read):
                self._compare(held, held.rows[read], wanted, seq.start)
            if write is not None:
                held.rows[write] = (made ^ held.salt)[:, None]

    def _compare(self, held: _Held, found: Array, wanted: Array | np.int32, at: int) -> None:
        expected = wanted ^ held.salt
        same = expected == found.T
        if not same.all():
            self._wrong(
                f"rank {self._rank}, layer {held.buffer.layer}, {held.buffer.name}: wrong bytes "
                f"under a forward at {at}: {(found.T ^ held.salt).tolist()} where "
                f"{np.asarray(wanted).tolist()} belongs"
            )
