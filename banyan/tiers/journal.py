"""What was done to tree, slots and transfers, in order: the log that ranks compare.

Owns a running digest and the last entries. Numbers only, so that equal histories have equal digests
in every process. Knows no tree and no rank; written from the scheduler thread.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

KEPT = 4_096
"""Entries kept to explain a difference; the digest covers all that there ever were."""


class Mutation(IntEnum):
    """What an entry tells of; the numbers that follow it are those of the call."""

    ACQUIRE = 1
    RESERVE = 2
    EVICT = 3
    COMMIT = 4
    RELEASE = 5
    SUBMIT = 6
    APPLY = 7
    ABANDON = 8
    FLUSH = 9
    HITS = 10


class Entry(NamedTuple):
    """One operation: its place in the history, what it was, and its numbers."""

    place: int
    what: int
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        """For a report: `#12 commit(64, 128)`."""
        return f"#{self.place} {Mutation(self.what).name.lower()}{self.numbers}"


class Journal:
    """A history of operations.

    Attributes:
        count: operations so far.
        digest: of all of them; equal for equal histories, in any process.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._entries: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=KEPT)

    def note(self, what: Mutation, *numbers: int) -> None:
        """Add an operation. Cost: a hash of the numbers, some 0.3 us."""
        self.count += 1
        self.digest = hash((self.digest, int(what), numbers))
        self._entries.append((what, numbers))

    def tail(self) -> list[Entry]:
        """The last operations that are kept, oldest first."""
        first = self.count - len(self._entries)
        return [Entry(first + i, int(w), n) for i, (w, n) in enumerate(self._entries)]


def first_difference(histories: list[list[Entry]]) -> tuple[int, list[Entry | None]] | None:
    """Where histories part: the place, and each one's entry there (None: it has none).

    Args:
        histories: tails of journals, one per rank.

    Returns:
        None where all agree on what all of them still have.
    """
    by_index = [{entry.place: entry for entry in history} for history in histories]
    begin = max((history[0].place for history in histories if history), default=0)
    end = max((history[-1].place for history in histories if history), default=-1)
    for index in range(begin, end + 1):
        found = [entries.get(index) for entries in by_index]
        if any(entry != found[0] for entry in found):
            return index, found
    return None
