"""The waiting queue: order, fairness, and cost that does not grow with its length."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from banyan.engine.waiting import WaitingQueue


@dataclass(eq=False)
class Waiter:
    """As much of a request as the queue looks at."""

    arrival: int
    reusable: int = 0
    passed: int = 0


def queue_of(order: str, reusable: list[int], **kwargs) -> tuple[WaitingQueue, list[Waiter]]:
    queue = WaitingQueue(order, **kwargs)
    waiters = [Waiter(i, n) for i, n in enumerate(reusable)]
    for waiter in waiters:
        queue.add(waiter)
    return queue, waiters


def ranked(queue: WaitingQueue) -> list[int]:
    return [w.arrival for w in queue.ranked(lambda w: w.reusable)]


def test_fcfs_asks_nobody_what_it_could_reuse():
    queue, _ = queue_of("fcfs", [1, 9, 4])
    assert [w.arrival for w in queue.ranked(lambda w: 1 // 0)] == [0, 1, 2]


def test_longest_prefix_ranks_by_what_can_be_reused_then_by_arrival():
    queue, _ = queue_of("longest_prefix", [4, 9, 4, 0])
    assert ranked(queue) == [1, 0, 2, 3]


def test_only_the_first_few_are_considered():
    queue, _ = queue_of("longest_prefix", [0, 1, 2, 99], lookahead=3)
    assert ranked(queue) == [2, 1, 0]


def test_one_passed_over_often_enough_goes_first():
    queue, waiters = queue_of("longest_prefix", [0, 5, 6], patience=2)
    for best in (waiters[2], waiters[1]):
        order = queue.ranked(lambda w: w.reusable)
        assert order[0] is best
        queue.start(best, order[1:])
    queue.add(Waiter(3, 50))
    assert waiters[0].passed == 2 and ranked(queue) == [0, 3]


def test_going_first_passes_over_nobody_that_came_later():
    queue, waiters = queue_of("longest_prefix", [9, 5])
    queue.start(waiters[0], [waiters[1]])
    assert waiters[1].passed == 0


@pytest.mark.parametrize("order", ["fcfs", "longest_prefix"])
def test_one_put_back_goes_first_whatever_others_could_reuse(order: str):
    queue, waiters = queue_of(order, [5, 3, 1])
    queue.start(waiters[2], [])
    queue.put_back(waiters[2])
    assert ranked(queue)[0] == 2


def test_requests_leave_once_and_unknown_ones_are_ignored():
    queue, waiters = queue_of("fcfs", [0, 0])
    queue.discard(waiters[0])
    queue.discard(waiters[0])
    assert len(queue) == 1 and ranked(queue) == [1]
