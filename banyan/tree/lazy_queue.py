"""A queue ordered by key: a sorted run for what comes in order, a heap for the rest.

Under LRU nearly all data becomes evictable in the order of its stamps, so it is appended to the run
and popped from its front in O(1), touching memory in order; only what comes late costs O(log n).
Knows nothing of what it queues; entries that stand for nothing are the caller's to skip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from banyan.tree.node import Node, OrderKey

Entry = tuple[OrderKey, int, Node]


class LazyQueue:
    """Entries by ascending (key, order of arrival)."""

    __slots__ = ("_arrivals", "_heap", "_run")

    def __init__(self) -> None:
        self._run: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._run) + len(self._heap)

    def push(self, key: OrderKey, node: Node) -> None:
        """Cost: O(1) when `key` is not below the last one that came in order, else O(log n)."""
        self._arrivals += 1
        entry = (key, self._arrivals, node)
        if not self._run or self._run[-1][0] <= key:
            self._run.append(entry)
        else:
            heappush(self._heap, entry)

    def pop(self) -> Entry | None:
        """Take the first entry off; None when there is none."""
        if self._heap and (not self._run or self._heap[0] < self._run[0]):
            return heappop(self._heap)
        return self._run.popleft() if self._run else None

    def keep(self, wanted: Callable[[Entry], bool]) -> None:
        """Drop the entries not `wanted`. Cost: O(n)."""
        self._run = deque(entry for entry in self._run if wanted(entry))
        self._heap = [entry for entry in self._heap if wanted(entry)]
        heapify(self._heap)
