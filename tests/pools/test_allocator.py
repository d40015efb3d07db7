"""The slot allocator: runs, ownership of what it returns, and the guard against double frees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.errors import PoolError
from banyan.pools.allocator import SlotAllocator
from tests.support.stacks import slots


def take(allocator: SlotAllocator, n: int) -> np.ndarray:
    taken = allocator.allocate(n)
    assert taken is not None
    return taken


def test_a_fresh_allocator_hands_out_ascending_runs() -> None:
    allocator = SlotAllocator(8)
    assert take(allocator, 3).tolist() == [0, 1, 2]
    assert take(allocator, 0).tolist() == []
    assert take(allocator, 4).tolist() == [3, 4, 5, 6]
    assert allocator.free_count == 1


def test_a_freed_run_comes_back_whole_and_first() -> None:
    allocator = SlotAllocator(8)
    first, second = take(allocator, 3), take(allocator, 3)
    allocator.free(first)
    allocator.free(second)
    assert take(allocator, 3).tolist() == second.tolist()
    assert take(allocator, 2).tolist() == [0, 1]


def test_a_shortage_changes_nothing() -> None:
    allocator = SlotAllocator(4)
    take(allocator, 2)
    assert allocator.allocate(3) is None
    assert allocator.free_count == 2
    assert take(allocator, 2).tolist() == [2, 3]


def test_what_it_returns_is_the_callers_own() -> None:
    """C034: freeing, or writing to a result, changes neither earlier results nor the free list."""
    allocator = SlotAllocator(16)
    x, y = take(allocator, 8), take(allocator, 4)
    allocator.free(y)
    assert x.tolist() == list(range(8))
    assert not np.shares_memory(x, allocator._stack)
    again = take(allocator, 4)
    assert not np.shares_memory(again, allocator._stack)
    again[:] = 0
    x_before = x.copy()
    x[:] = 99
    assert take(allocator, 4).tolist() == [12, 13, 14, 15]
    allocator.free(x_before)
    assert allocator.free_count == 8


def test_freed_arrays_are_not_kept() -> None:
    allocator = SlotAllocator(4)
    x = take(allocator, 4)
    allocator.free(x)
    x[:] = 7
    assert take(allocator, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (slots(5), "double free of slots \\[5\\]"),
        (slots(0, 5, 1), "double free of slots \\[5\\]"),
        (slots(1, 0, 1), "slots \\[1\\] repeated"),
        (slots(0, 8), "foreign slots \\[8\\]"),
        (slots(-1), "foreign slots \\[-1\\]"),
        (np.array([0.0, 1.0]), "must be int32"),
        (np.array([[0, 1]], np.int32), "must be int32"),
    ],
)
def test_a_bad_free_is_refused_whole(bad: np.ndarray, why: str) -> None:
    allocator = SlotAllocator(8, "device/window")
    take(allocator, 4)
    before = allocator.is_free()
    with pytest.raises(PoolError, match=f"device/window: .*{why}"):
        allocator.free(bad)
    assert allocator.free_count == 4
    assert (allocator.is_free() == before).all()
    assert take(allocator, 4).tolist() == [4, 5, 6, 7]


def test_a_long_bad_list_is_named_in_part() -> None:
    allocator = SlotAllocator(100)
    with pytest.raises(PoolError, match="0, 1, 2, 3, 4, 5, 6, 7, \\.\\.\\.\\] \\(100\\)"):
        allocator.free(np.arange(100, dtype=np.int32))


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(PoolError, match="capacity -1"):
        SlotAllocator(-1)
    with pytest.raises(PoolError, match="cannot allocate -2"):
        SlotAllocator(4).allocate(-2)


def test_an_empty_pool_and_an_empty_free() -> None:
    allocator = SlotAllocator(0)
    assert take(allocator, 0).tolist() == []
    assert allocator.allocate(1) is None
    allocator.free(np.empty(0, np.int32))
    assert allocator.is_free().tolist() == []


def test_is_free_is_a_copy() -> None:
    allocator = SlotAllocator(2)
    allocator.is_free()[:] = False
    take(allocator, 1)
    assert allocator.is_free().tolist() == [False, True]


def test_reset_equals_a_fresh_one() -> None:
    allocator = SlotAllocator(6)
    taken = take(allocator, 5)
    allocator.free(taken[2:4])
    allocator.reset()
    assert allocator.free_count == 6
    assert allocator.is_free().all()
    assert take(allocator, 6).tolist() == [0, 1, 2, 3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_slots_are_conserved(capacity: int, steps: list[tuple[bool, int]]) -> None:
    """INV-01, INV-02: against a set, whatever the order of allocations and partial frees."""
    allocator = SlotAllocator(capacity)
    held: list[int] = []
    for give, n in steps:
        if give:
            given, held = held[:n], held[n:]
            allocator.free(np.array(given, np.int32))
        else:
            taken = allocator.allocate(n)
            assert (taken is None) == (n > capacity - len(held))
            held += [] if taken is None else taken.tolist()
        assert len(set(held)) == len(held)
        assert allocator.free_count == capacity - len(held)
        assert set(np.flatnonzero(~allocator.is_free()).tolist()) == set(held)
