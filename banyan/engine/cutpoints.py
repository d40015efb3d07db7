"""Where a prefill chunk ends: a pure function of the request and the spec.

Owns the choice of cut points. Knows no cache, no queue and no other request, so that the same
prompt with the same boundary is always cut alike, whatever runs beside it. Usable from any thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from banyan.spec import CacheSpec, Full


@dataclass(frozen=True, slots=True)
class CutPolicy:
    """The cut points of one engine.

    Args:
        page_size: tokens per page. A chunk ends at a page boundary, or at the prompt's end, or
            inside a page where it is smaller than one.
        chunk: most tokens of one chunk.
        state_interval: None, or tokens between checkpoints of a long prompt; rounded up to pages.
        checkpoints: False where every boundary can be resumed at anyway (all data is `Full`): then
            chunks are cut by size alone.
    """

    page_size: int
    chunk: int
    state_interval: int | None
    checkpoints: bool

    @staticmethod
    def for_spec(spec: CacheSpec, chunk: int, state_interval: int | None) -> CutPolicy:
        """The policy of a model: checkpoints matter where a component is not `Full`."""
        checkpoints = any(not isinstance(c.reach, Full) for c in spec.components)
        return CutPolicy(spec.page_size, chunk, state_interval, checkpoints)

    def floor(self, position: int) -> int:
        """The last page boundary at or below `position`."""
        return position - position % self.page_size

    def next_cut(
        self, start: int, stop: int, *, branch: int = 0, hints: Collection[int] = ()
    ) -> int:
        """End of the chunk that starts at `start`: the earliest cut point beyond it.

        Args:
            start: tokens already computed, less than `stop`.
            stop: length of the prompt (tokens).
            branch: where `Full` data of an earlier prompt leaves this one, or 0; a checkpoint there
                is what the next prompt of that kind will need.
            hints: further positions worth a checkpoint.

        Returns:
            Half-open end of the chunk: no further than `chunk`, and at the last page boundary
            within that, if there is one.

        Cost: O(hints).
        """
        cut = start + self.chunk
        if self.floor(cut) > start:
            cut = self.floor(cut)
        if self.checkpoints:
            marks = self._marks(start, stop, branch, hints)
            cut = min([cut, *(mark for mark in marks if mark > start)])
        return min(cut, stop)

    def is_checkpoint(
        self, start: int, cut: int, stop: int, *, branch: int = 0, hints: Collection[int] = ()
    ) -> bool:
        """Whether the chunk [start, cut) ends where a later prompt is likely to resume.

        False where only its size ended it. The arguments are those of `next_cut`. Cost: O(hints).
        """
        return not self.checkpoints or cut == stop or cut in self._marks(start, stop, branch, hints)

    def _marks(self, start: int, stop: int, branch: int, hints: Collection[int]) -> set[int]:
        marks = {self.floor(mark) for mark in (branch, stop - 1, *hints)}
        if self.state_interval is not None:
            interval = -(-self.state_interval // self.page_size) * self.page_size
            marks.add(start - start % interval + interval)
        return marks

    def cuts(
        self, start: int, stop: int, *, branch: int = 0, hints: Collection[int] = ()
    ) -> list[int]:
        """All cut points from `start` to `stop`, the last one `stop` itself."""
        found: list[int] = []
        while start < stop:
            start = self.next_cut(start, stop, branch=branch, hints=hints)
            found.append(start)
        return found
