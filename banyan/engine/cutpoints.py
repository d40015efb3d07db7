"""Where a prefill takes checkpoints, and where its chunks end: pure functions of request and spec.

Owns the choice of both. Knows no cache, no queue and no other request, so that the same prompt with
the same boundary is always cut alike, whatever runs beside it. Usable from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from banyan.spec import CacheSpec, Full
from banyan.tree import Mark

DEFAULT_CHECKPOINTS = 8
"""Checkpoints of one prompt, where no option says otherwise."""

TEMPLATE_TAIL = 32
"""Tokens at a prompt's end that may be a template's call for an answer: what it writes there need
not be what it writes before the answer once that is part of the conversation."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where windows and states are kept for later prompts, within a budget.

    A checkpoint costs a cut in the prefill, a state, and a window's pages, so each has to be worth
    it. In the order of their worth:

    1. the last page boundary of the prompt, or of its last hint where only a template's tail
       follows: the conversation goes on from there, and the same prompt comes again;
    2. the points where earlier prompts (branch) and waiting ones (followers) part from this one;
    3. the first hint, the system prompt's end, which all conversations share;
    4. the other hints in tokens that are new, the latest first: edited turns are usually late ones;
    5. every `state_interval` tokens, thinned out evenly to what the budget leaves.

    Args:
        page_size: tokens per page; checkpoints stand at page boundaries.
        state_interval: None, or tokens between checkpoints of a long prompt; rounded up to pages.
        budget: most checkpoints of one prefill, at least 1. Followers do not count: they are
            waiting for theirs.
    """

    page_size: int
    state_interval: int | None = None
    budget: int = DEFAULT_CHECKPOINTS

    @staticmethod
    def for_spec(
        spec: CacheSpec, state_interval: int | None, budget: int
    ) -> CheckpointPolicy | None:
        """The policy of a model; None where all data is `Full`, to be resumed at any boundary."""
        if all(isinstance(c.reach, Full) for c in spec.components):
            return None
        return CheckpointPolicy(spec.page_size, state_interval, budget)

    def plan(
        self,
        start: int,
        stop: int,
        *,
        branch: int = 0,
        known: int = 0,
        hints: Collection[int] = (),
        followers: Collection[int] = (),
    ) -> dict[int, Mark]:
        """The checkpoints of a prefill, by position.

        Args:
            start: tokens of the prompt that need not be computed.
            stop: length of the prompt (tokens).
            branch: where `Full` data of an earlier prompt leaves this one, or 0.
            known: tokens of the prompt whose `Full` data is there: they had their checkpoints.
            hints: ends of messages, or whatever else the caller expects prompts to part at.
            followers: page boundaries where waiting requests part from this one.

        Cost: O(hints log hints + budget).
        """
        chosen = {at: Mark.KEEP for at in followers if start < at < stop}
        left = self.budget
        for at, mark in self._wanted(start, stop, branch, known, hints):
            if left == 0:
                break
            if start < at < stop and at not in chosen:
                chosen[at] = mark
                left -= 1
        for at in self._intervals(start, stop, left):
            chosen.setdefault(at, Mark.KEEP)
        return chosen

    def _wanted(
        self, start: int, stop: int, branch: int, known: int, hints: Collection[int]
    ) -> Iterator[tuple[int, Mark]]:
        ends = sorted({at for at in hints if 0 < at < stop})
        last = ends.pop() if ends and stop - ends[-1] <= TEMPLATE_TAIL else stop - 1
        yield self._floor(last), Mark.PROMPT
        yield self._floor(branch), Mark.KEEP
        if ends:
            yield self._floor(ends[0]), Mark.KEEP
        for at in reversed(ends[1:]):
            if at > known:
                yield self._floor(at), Mark.MESSAGE

    def _intervals(self, start: int, stop: int, most: int) -> Iterator[int]:
        """Multiples of the interval in (start, stop), at most `most` of them, evenly spaced."""
        if self.state_interval is None or not most:
            return
        interval = -(-self.state_interval // self.page_size) * self.page_size
        count = (stop - 1) // interval - start // interval
        step = -(-count // most) if count > most else 1
        first = start - start % interval + step * interval
        yield from range(first, stop, step * interval)

    def _floor(self, position: int) -> int:
        return position - position % self.page_size


@dataclass(frozen=True, slots=True)
class CutPolicy:
    """Where the chunks of a prefill end.

    Args:
        page_size: tokens per page. A chunk ends at a page boundary, or at the prompt's end, or
            inside a page where it is smaller than one.
        chunk: most tokens of one chunk.
    """

    page_size: int
    chunk: int

    def floor(self, position: int) -> int:
        """The last page boundary at or below `position`."""
        return position - position % self.page_size

    def next_cut(self, start: int, stop: int, marks: Collection[int] = ()) -> int:
        """End of the chunk that starts at `start`: the earliest cut point beyond it.

        Args:
            start: tokens already computed, less than `stop`.
            stop: length of the prompt (tokens).
            marks: where checkpoints are taken.

        Returns:
            Half-open end of the chunk: no further than `chunk`, and at the last page boundary
            within that, if there is one.

        Cost: O(marks).
        """
        cut = start + self.chunk
        if self.floor(cut) > start:
            cut = self.floor(cut)
        return min([cut, stop, *(mark for mark in marks if mark > start)])

    def cuts(self, start: int, stop: int, marks: Collection[int] = ()) -> list[int]:
        """All cut points from `start` to `stop`, the last one `stop` itself."""
        found: list[int] = []
        while start < stop:
            start = self.next_cut(start, stop, marks)
            found.append(start)
        return found
