"""Three ways for ranks to drift apart, put in on purpose: the simulation finds each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from banyan.engine import ranked
from banyan.ranks import AgreedCopies, Agreement, Words
from banyan.tiers.ops import CopyDone
from tests.ranks.copies import SimulatedCopies
from tests.ranks.engine import Parts

Patch = pytest.MonkeyPatch


class EagerCopies(AgreedCopies):
    """A completion is applied when this rank has it, whatever the others have."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._fresh: list[CopyDone] = []

    def report(self) -> Words:
        """As the real one; keeps what is new for `poll`."""
        known = set(self._mine)
        words = super().report()
        self._fresh += [done for op_id, done in self._mine.items() if op_id not in known]
        return words

    def agree(self, least: Words) -> None:
        """As the real one, whose result is not used."""
        super().agree(least)
        self._agreed.clear()

    def poll(self) -> list[CopyDone]:
        """What this rank has."""
        fresh, self._fresh = self._fresh, []
        return fresh


class OwnHits(Agreement):
    """What this rank's storage holds is used as it is."""

    def hits(self, lengths: Sequence[int]) -> list[int]:
        """`lengths`, unreduced."""
        return list(lengths)


def collective_skipped(patch: Patch) -> Parts:
    """A rank without copies of its own in the air takes no part in the report."""

    def report(self: ranked._Rank) -> bytes:
        agreement = self.context.agreement
        self.frames += 1
        copies = agreement.copies
        inner = None if copies is None else copies.inner
        assert isinstance(inner, SimulatedCopies)
        if not inner.unfinished and self.frames % ranked.COMPARE_EVERY:
            return b""
        least = agreement.collect()
        return b"" if least is None else np.asarray(least).tobytes()

    patch.setattr(ranked._Rank, "report", report)
    return Parts()


def completion_applied_early(patch: Patch) -> Parts:
    """A completion is applied before all ranks have it."""
    return Parts(copies=EagerCopies)


def hit_unreduced(patch: Patch) -> Parts:
    """A storage hit steers this rank's tree as it was found."""
    return Parts(agreement=OwnHits)


DEFECTS: list[Callable[[Patch], Parts]] = [
    collective_skipped,
    completion_applied_early,
    hit_unreduced,
]
