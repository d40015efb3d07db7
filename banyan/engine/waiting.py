"""The requests that wait, and who is tried next.

Owns the order of admission and its fairness. Knows no cache: what a request could reuse is asked
through a function. Touched by the scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from banyan.engine.request import Request

Order = Literal["fcfs", "longest_prefix"]


class WaitingQueue:
    """Requests without a lease, in the order of arrival; put-back ones come first.

    Args:
        order: `fcfs`, or `longest_prefix`: among the first `lookahead` the one that can reuse most.
        lookahead: requests considered in one step; bounds the cost of a step whatever the length.
        patience: how often others may be preferred to a request before it goes first.
    """

    def __init__(self, order: Order, *, lookahead: int = 16, patience: int = 8) -> None:
        self.order, self.lookahead, self.patience = order, lookahead, patience
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Put a new request last."""
        self._requests[request.arrival] = request

    def put_back(self, request: Request) -> None:
        """Put a request that ran before first; nothing is preferred to it any more."""
        request.passed = self.patience
        self._requests[request.arrival] = request
        self._requests.move_to_end(request.arrival, last=False)

    def discard(self, request: Request) -> None:
        """Take a request out, if it is in."""
        self._requests.pop(request.arrival, None)

    def nearest(self) -> Iterator[Request]:
        """The first `lookahead` requests."""
        return islice(self._requests.values(), self.lookahead)

    def ranked(self, reusable: Callable[[Request], int]) -> list[Request]:
        """Who to try this step, best first.

        Args:
            reusable: tokens that a request would not have to compute.

        Cost: O(lookahead), with as many calls of `reusable` for `longest_prefix`.
        """
        nearest = list(self.nearest())
        if self.order == "fcfs" or len(nearest) < 2:
            return nearest
        first = [r for r in nearest if r.passed >= self.patience]
        rest = [r for r in nearest if r.passed < self.patience]
        return first + sorted(rest, key=reusable, reverse=True)

    def start(self, request: Request, untried: Iterable[Request]) -> None:
        """Take out a request that is admitted; earlier ones among `untried` were passed over."""
        del self._requests[request.arrival]
        for other in untried:
            if other.arrival < request.arrival:
                other.passed += 1
