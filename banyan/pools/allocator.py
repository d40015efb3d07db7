"""Slot ids of one pool: which are free, and a guard against freeing one twice.

Owns the free list and the bitmap of one component on one tier. Knows no tensor, no tree and no
request. Called from the scheduler thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from banyan.errors import PoolError

Slots = npt.NDArray[np.int32]

_SHOWN = 8
"""Slots named in an error message, at most."""


class SlotAllocator:
    """Hands out the slots `0 .. capacity - 1` and takes them back.

    A fresh allocator gives ascending contiguous runs. Freed slots are reused last in, first out,
    in the order in which they were freed, so a run given back comes out as the same run: copies
    coalesce it, and its bytes are the likeliest still in a processor cache.

    Args:
        capacity: number of slots, 0 or more.
        name: the pool's name in error messages, such as `device/full`.

    Cost: `allocate` and `free` are O(n) in the slots asked for, whatever the capacity.
    """

    def __init__(self, capacity: int, name: str = "pool") -> None:
        if capacity < 0:
            raise PoolError(f"{name}: capacity {capacity} is negative")
        self.capacity = capacity
        self.name = name
        self._stack: Slots = np.empty(capacity, np.int32)
        self._is_free: npt.NDArray[np.bool_] = np.empty(capacity, np.bool_)
        self._seen_at: Slots = np.zeros(capacity, np.int32)
        self._free_count = 0
        self.reset()

    @property
    def free_count(self) -> int:
        """Slots that `allocate` can give now."""
        return self._free_count

    def allocate(self, n: int) -> Slots | None:
        """Take `n` free slots.

        Returns:
            int32[n] that the caller owns (never a view of the free list); None, with nothing
            changed, when fewer than `n` are free.

        Raises:
            PoolError: `n` is negative.

        Upholds: INV-02.
        """
        if n < 0:
            raise PoolError(f"{self.name}: cannot allocate {n} slots")
        if n > self._free_count:
            return None
        rest = self._free_count - n
        slots = self._stack[rest : self._free_count][::-1].copy()
        self._is_free[slots] = False
        self._free_count = rest
        return slots

    def free(self, slots: Slots) -> None:
        """Give slots back; `slots` is read and not kept.

        Args:
            slots: int32[n], each allocated and named once.

        Raises:
            PoolError: a slot is out of range, already free, or repeated; nothing changed then.

        Upholds: INV-01, INV-02.
        """
        given = self._checked(slots)
        top = self._free_count + len(given)
        self._stack[self._free_count : top] = given[::-1]
        self._is_free[given] = True
        self._free_count = top

    def is_free(self) -> npt.NDArray[np.bool_]:
        """bool[capacity], a copy: True where the slot is in the free list. Cost: O(capacity)."""
        return self._is_free.copy()

    def reset(self) -> None:
        """Make every slot free again, in the order of a fresh allocator. Cost: O(capacity)."""
        self._stack[:] = np.arange(self.capacity - 1, -1, -1, dtype=np.int32)
        self._is_free[:] = True
        self._free_count = self.capacity

    def _checked(self, slots: Slots) -> Slots:
        given = np.asarray(slots)
        if given.size == 0:
            return np.empty(0, np.int32)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise PoolError(f"{self.name}: slots must be int32[n], got {given.dtype}{given.shape}")
        outside = (given < 0) | (given >= self.capacity)
        if outside.any():
            raise PoolError(
                f"{self.name}: foreign slots {_some(given[outside])}; capacity is {self.capacity}"
            )
        already = self._is_free[given]
        if already.any():
            raise PoolError(f"{self.name}: double free of slots {_some(given[already])}")
        order = np.arange(len(given), dtype=np.int32)
        self._seen_at[given] = order
        repeated = self._seen_at[given] != order
        if repeated.any():
            raise PoolError(f"{self.name}: slots {_some(given[repeated])} repeated in one free")
        return given


def _some(slots: npt.NDArray[np.integer]) -> str:
    shown = ", ".join(str(s) for s in slots[:_SHOWN])
    return f"[{shown}]" if len(slots) <= _SHOWN else f"[{shown}, ...] ({len(slots)})"
