"""A queue ordered by key: a sorted run for what comes in order, a heap for the rest.

Under LRU nearly all data becomes evictable in the order of its stamps, so it is appended to the run
and popped from its front in O(1), touching memory in order; only what comes late costs O(log n).
Knows nothing of what it queues; entries that stand for nothing are the caller's to skip when they
come, and swept out before they are many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from banyan.tree.node import Node, OrderKey

Entry = tuple[OrderKey, int, Node]

_SLACK = 64
"""Pushes between two sweeps of a queue, beside half its length."""


class LazyQueue:
    """Entries by ascending (key, order of arrival).

    Args:
        is_live: whether an entry still stands for something; those that do not are swept out now
            and then, at amortised O(1) per push.
    """

    __slots__ = ("_arrivals", "_heap", "_is_live", "_run", "_sweep_at")

    def __init__(self, is_live: Callable[[Entry], bool]) -> None:
        self._run: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._arrivals = 0
        self._is_live = is_live
        self._sweep_at = _SLACK

    def __len__(self) -> int:
        return len(self._run) + len(self._heap)

    def push(self, key: OrderKey, node: Node) -> None:
        """Cost: O(1) when `key` is not below the last one that came in order, else O(log n)."""
        self._arrivals = arrivals = self._arrivals + 1
        run = self._run
        if not run or run[-1][0] <= key:
            run.append((key, arrivals, node))
        else:
            heappush(self._heap, (key, arrivals, node))
        if arrivals > self._sweep_at:
            self._sweep()

    def pop(self) -> Entry | None:
        """Take the first entry off; None when there is none."""
        if self._heap and (not self._run or self._heap[0] < self._run[0]):
            return heappop(self._heap)
        return self._run.popleft() if self._run else None

    def _sweep(self) -> None:
        """Drop the entries that stand for nothing. Cost: O(n), once in half as many pushes."""
        self._run = deque(filter(self._is_live, self._run))
        self._heap = list(filter(self._is_live, self._heap))
        heapify(self._heap)
        self._sweep_at = self._arrivals + _SLACK + len(self) // 2
