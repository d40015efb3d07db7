"""What every byte of the running sequences must be, known from their tokens alone.

Owns, for a bounded number of sequences, the prefix hashes and the entries of every page-shaped
buffer, extended in O(new tokens). Knows no pool and no slot. Used on the thread that runs the
model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from banyan.engine.oracle_hash import EMPTY, Words, as_words, extended, followed, mixed, salts
from banyan.errors import SpecError
from banyan.spec import Buffer

Lanes = npt.NDArray[Any]
"""Entries as the widest unsigned integers that divide one, [..., lanes]."""

_GROWTH_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Code:
    """How the bytes of one buffer's entries follow from the hashes of their prefixes.

    Args:
        salts: uint64[w], one for each 8 bytes of an entry.
        dtype: of the lanes that entries are compared in.
        lanes: per entry.
    """

    salts: Words
    dtype: np.dtype[Any]
    lanes: int

    @staticmethod
    def of(buffer: Buffer, rank: int) -> Code:
        """The code of a buffer on a rank; what is replicated has the same on all.

        Raises:
            SpecError: an entry that stands for several tokens.
        """
        if buffer.stride != 1:
            raise SpecError(f"buffer {buffer.name}: the oracle knows no stride but 1")
        nbytes = buffer.entry_bytes
        width = next(w for w in (8, 4, 2, 1) if nbytes % w == 0)
        own = salts(buffer.layer, buffer.name, 0 if buffer.replicated else rank, -(-nbytes // 8))
        return Code(own, np.dtype(f"<u{width}"), nbytes // width)

    def encode(self, hashes: Words) -> Lanes:
        """Entries for the prefixes with these hashes: dtype[n, lanes]."""
        words = mixed(hashes, self.salts)
        return words.view(self.dtype)[:, : self.lanes]


class Ledger:
    """Hashes and entries by row, one row for each sequence; the longest unused row is given away.

    A sequence is the list that its tokens are in: the same list is the same sequence, and it may
    only grow.

    Args:
        codes: of the page-shaped buffers.
        rows: sequences known at a time, at least; a larger batch makes more.
        tokens: length that a sequence can have at first; a longer one makes all rows longer.

    Attributes:
        hashes: uint64[rows, tokens + 1]: of the prefix of so many tokens.
        entries: by buffer, dtype[rows, tokens, lanes]: of the token at a position.
    """

    def __init__(self, codes: Sequence[Code], rows: int, tokens: int) -> None:
        self._codes = list(codes)
        self._lists: OrderedDict[int, tuple[int, Sequence[int]]] = OrderedDict()
        self._known: list[int] = []
        self.hashes: Words = np.empty((0, 0), np.uint64)
        self.entries: list[Lanes] = []
        self._resize(max(1, rows), max(1, tokens))

    def rows_of(self, lists: Sequence[tuple[Sequence[int], int]]) -> list[int]:
        """The row of each sequence, with its first `stop` tokens known.

        Args:
            lists: (tokens so far, stop), all different.

        Raises:
            ValueError: a list is shorter than its stop.

        Cost: O(new tokens); for one new token of each of many sequences, a few numpy calls in all.
        """
        longest = max(stop for _, stop in lists)
        rows, length = len(self._known), self.hashes.shape[1] - 1
        if longest > length or len(lists) > rows:
            more = longest + _GROWTH_TOKENS if longest > length else length
            self._resize(max(rows, len(lists)), more)
        found = [self._row(tokens) for tokens, _ in lists]
        single: list[int] = []
        for index, (row, (tokens, stop)) in enumerate(zip(found, lists, strict=True)):
            if len(tokens) < stop:
                raise ValueError(f"{stop} tokens are to be known, the history has {len(tokens)}")
            if stop - self._known[row] == 1:
                single.append(index)
            elif stop > self._known[row]:
                self._extend(row, tokens, stop)
        if single:
            self._extend_each([(found[i], *lists[i]) for i in single])
        return found

    def _row(self, tokens: Sequence[int]) -> int:
        """The row of a sequence, new or known."""
        name = id(tokens)
        if name in self._lists:
            self._lists.move_to_end(name)
            return self._lists[name][0]
        if len(self._lists) < len(self._known):
            row = len(self._lists)
        else:
            row = self._lists.popitem(last=False)[1][0]
        self._lists[name] = (row, tokens)
        self._known[row] = 0
        return row

    def _extend(self, row: int, tokens: Sequence[int], stop: int) -> None:
        start = self._known[row]
        fresh = extended(int(self.hashes[row, start]), as_words(tokens[start:stop]))
        self.hashes[row, start + 1 : stop + 1] = fresh
        for code, entries in zip(self._codes, self.entries, strict=True):
            entries[row, start:stop] = code.encode(fresh)
        self._known[row] = stop

    def _extend_each(self, parts: list[tuple[int, Sequence[int], int]]) -> None:
        """One token more for each of several rows."""
        rows = np.array([row for row, _, _ in parts])
        at = np.array([stop - 1 for _, _, stop in parts])
        one = as_words([tokens[stop - 1] for _, tokens, stop in parts])
        fresh = followed(self.hashes[rows, at], one)
        self.hashes[rows, at + 1] = fresh
        for code, entries in zip(self._codes, self.entries, strict=True):
            entries[rows, at] = code.encode(fresh)
        for row, _, stop in parts:
            self._known[row] = stop

    def _resize(self, rows: int, tokens: int) -> None:
        """Make room, keeping what is known; all of it is touched, so that memory does not grow."""
        hashes, entries = self.hashes, self.entries
        self.hashes = np.full((rows, tokens + 1), EMPTY, np.uint64)
        self.entries = [np.full((rows, tokens, c.lanes), 1, c.dtype) for c in self._codes]
        if hashes.size:
            self.hashes[: len(hashes), : hashes.shape[1]] = hashes
            for old, new in zip(entries, self.entries, strict=True):
                new[: len(old), : old.shape[1]] = old
        self._known += [0] * (rows - len(self._known))
