"""Agreement between ranks: one answer from what each knows, and what happens when they differ.

Ranks are coroutines of a `SimulatedFabric`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from banyan.errors import RankError
from banyan.ranks import REPORTED, AgreedCopies, Agreement, Fabric, StepClock
from banyan.tiers import journal as history
from banyan.tiers.journal import Entry, Journal, Mutation
from banyan.tiers.ops import CopyBlock, CopyDone, CopyJob, CopyKind, CopyTicket, OpId
from tests.ranks.manual import RECORD_BYTES, Copies, on_ranks
from tests.support.stacks import slots


class Group:
    """Agreed copies of several ranks, which report and agree when the test says so."""

    def __init__(self, ranks: int = 3) -> None:
        self.inner = [Copies() for _ in range(ranks)]
        self.copies = [AgreedCopies(engine, RECORD_BYTES) for engine in self.inner]

    def submit(self, *numbers: int) -> list[list[CopyTicket]]:
        """The same jobs on all ranks: two slots of component 0, one of component 1."""
        blocks = CopyBlock(0, slots(1, 2), slots(3, 4)), CopyBlock(1, slots(5), slots(6))
        jobs = [CopyJob(OpId(n), CopyKind.LOAD_BACK, blocks) for n in numbers]
        return [[copies.submit(job) for job in jobs] for copies in self.copies]

    def agree(self) -> list[CopyDone]:
        """All report; what all were then given must be the same."""
        least = np.stack([copies.report() for copies in self.copies]).min(axis=0)
        for copies in self.copies:
            copies.agree(least)
        given = [copies.poll() for copies in self.copies]
        assert all(done == given[0] for done in given)
        return given[0]


# ---- completions ---------------------------------------------------------------------------------


def test_a_completion_waits_for_the_last_rank() -> None:
    group = Group()
    group.submit(1, 2)
    group.inner[0].end(1)
    group.inner[1].end(1)
    assert group.agree() == [] and group.copies[0].outstanding == 2
    group.inner[2].end(1)
    assert [done.op_id for done in group.agree()] == [1]
    assert [copies.outstanding for copies in group.copies] == [1, 1, 1]
    assert group.agree() == []


def test_what_ends_out_of_order_is_given_when_all_have_it() -> None:
    group = Group()
    group.submit(1, 2, 3)
    for engine, order in zip(group.inner, ((3, 1), (2, 3), (3, 2)), strict=True):
        for number in order:
            engine.end(number)
    assert [done.op_id for done in group.agree()] == [3]
    group.inner[0].end(2)
    assert [done.op_id for done in group.agree()] == [2]
    group.inner[1].end(1)
    group.inner[2].end(1)
    assert [done.op_id for done in group.agree()] == [1]


@pytest.mark.parametrize(
    ("reasons", "worst"),
    [
        (("", "", ""), ""),
        (("", "cancelled", ""), "cancelled"),
        (("cancelled", "timeout", ""), "timeout"),
        (("timeout", "cancelled", "copy_error"), "copy_error"),
        (("copy_error", "checksum", ""), "checksum"),
        (("", "", "of another kind"), "copy_error"),
    ],
)
def test_the_worst_outcome_is_that_of_all(reasons: Sequence[str], worst: str) -> None:
    group = Group()
    group.submit(1)
    for engine, reason in zip(group.inner, reasons, strict=True):
        engine.end(1, reason)
    [done] = group.agree()
    assert (done.ok, done.reason) == (not worst, worst)
    assert done.moved_bytes == (0 if worst else 2 * 100 + 7), "by the agreed sizes of a record"


def test_the_duration_is_that_of_the_slowest_rank() -> None:
    group = Group()
    group.submit(1)
    for engine, seconds in zip(group.inner, (0.25, 0.75, 0.5), strict=True):
        engine.end(1, seconds=seconds, moved_bytes=1)
    [done] = group.agree()
    assert (done.seconds, done.moved_bytes) == (0.75, 207)


def test_what_a_rank_has_verified_is_its_own() -> None:
    group = Group(2)
    group.submit(1)
    group.inner[0].end(1, verified=3)
    group.inner[1].end(1, "checksum", verified=2, mismatched=1)
    least = np.stack([copies.report() for copies in group.copies]).min(axis=0)
    for copies, own in zip(group.copies, ((3, 0), (2, 1)), strict=True):
        copies.agree(least)
        [done] = copies.poll()
        assert (done.verified, done.mismatched, done.reason) == (*own, "checksum")


def test_more_transfers_than_one_report_can_tell_of() -> None:
    group = Group(2)
    numbers = list(range(1, 2 * REPORTED + 6))
    group.submit(*numbers)
    for number in numbers:
        group.inner[0].end(number)
        group.inner[1].end(number, "copy_error" if number == REPORTED + 2 else "")
    first, second, third, fourth = (group.agree() for _ in range(4))
    assert [len(part) for part in (first, second, third, fourth)] == [REPORTED, REPORTED, 5, 0]
    assert [done.op_id for done in (*first, *second, *third)] == numbers
    assert [done.op_id for done in (*first, *second, *third) if not done.ok] == [REPORTED + 2]


def test_an_unfinished_transfer_does_not_hide_those_behind_it() -> None:
    group = Group(2)
    group.submit(*range(1, REPORTED + 2))
    for engine in group.inner:
        engine.end(REPORTED + 1)
    assert group.agree() == [], "it is beyond what a report tells of"
    for engine in group.inner:
        engine.end(1)
    assert [done.op_id for done in group.agree()] == [1]
    assert [done.op_id for done in group.agree()] == [REPORTED + 1]


def test_cancelling_and_closing_reach_the_engine_and_decide_nothing() -> None:
    group = Group(2)
    group.submit(1)
    assert group.copies[0].cancel(OpId(1)) is False
    assert group.inner[0].cancelled == [1] and group.copies[0].outstanding == 1
    group.inner[0].end(1, "cancelled")
    group.inner[1].end(1)
    assert [done.reason for done in group.agree()] == ["cancelled"]
    group.copies[1].close()
    assert group.inner[1].closed


# ---- tickets -------------------------------------------------------------------------------------


def test_a_ticket_never_raises_and_remembers() -> None:
    group = Group(1)
    [[ticket]] = group.submit(1)
    own = group.inner[0].tickets[OpId(1)]
    ticket.wait_layer(0)
    assert not ticket.failed and own.waits == 1  # type: ignore[attr-defined]
    own.fails = True
    ticket.wait_layer(1)
    own.fails = False
    ticket.wait_layer(2)
    assert ticket.failed and own.waits == 2  # type: ignore[attr-defined]


def test_a_ticket_fails_when_another_rank_s_copy_has() -> None:
    """The slots that were loaded here are given back then, and may be another request's."""
    group = Group(2)
    [[first, second], [_, _]] = group.submit(1, 2)
    for engine, reason in zip(group.inner, ("", "copy_error"), strict=True):
        engine.end(1, reason)
        engine.end(2)
    group.agree()
    first.wait_layer(0)
    second.wait_layer(0)
    assert (first.failed, second.failed) == (True, False)  # type: ignore[attr-defined]
    assert group.inner[0].tickets[OpId(1)].waits == 0


# ---- talks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_values_are_reduced_on_all_ranks(size: int) -> None:
    def talk(fabric: Fabric) -> tuple[Any, ...]:
        agreement = Agreement(fabric, Journal())
        rank = fabric.rank
        found = agreement.least([rank, -rank]), agreement.most([rank, -rank])
        hits = agreement.hits([64 - rank, 16 + rank])
        fact = agreement.settle(fact=7 + rank)
        return found, hits, fact, agreement.talks, agreement.journal.tail(), agreement.is_leader

    last = size - 1
    entries = [Entry(0, Mutation.HITS, (64 - last, 16))]
    same = ([0, -last], [last, 0]), [64 - last, 16], 7, 8, entries
    assert on_ranks(size, talk) == [(*same, rank == 0) for rank in range(size)]


def test_a_report_brings_completions_to_all_ranks() -> None:
    def talk(fabric: Fabric) -> list[tuple[int, str]]:
        agreement = Agreement(fabric, Journal())
        assert agreement.outstanding == 0
        inner = Copies()
        copies = agreement.copies = AgreedCopies(inner, RECORD_BYTES)
        for number in (1, 2, 3):
            copies.submit(CopyJob(OpId(number), CopyKind.BACKUP, ()))
        inner.end(1)
        inner.end(3, "timeout" if fabric.rank == 1 else "")
        if fabric.rank != 2:
            inner.end(2)
        agreement.settle()
        assert agreement.outstanding == 1
        return [(done.op_id, done.reason) for done in copies.poll()]

    assert on_ranks(3, talk) == [[(1, ""), (3, "timeout")]] * 3


def drifting(size: int, wrong: int) -> list[Any]:
    """What ranks get that settle after one of them has done another operation."""

    def talk(fabric: Fabric) -> int:
        journal = Journal()
        journal.note(Mutation.ACQUIRE, 0, 0, 0)
        journal.note(Mutation.COMMIT, 0, 128 if fabric.rank == wrong else 64)
        journal.note(Mutation.RELEASE, 64, 64)
        return Agreement(fabric, journal).settle()

    return on_ranks(size, talk)


@pytest.mark.parametrize("wrong", [0, 2])
def test_drift_stops_all_ranks_and_names_the_first_difference(wrong: int) -> None:
    errors = drifting(3, wrong)
    assert all(isinstance(error, RankError) for error in errors)
    [told] = {str(error) for error in errors}
    assert "the first difference is operation 1:" in told
    for rank in range(3):
        assert f"rank {rank}: #1 commit(0, {128 if rank == wrong else 64})" in told
    assert drifting(3, wrong=9) == [0] * 3, "equal histories settle"


def test_a_rank_that_has_done_less_has_nothing_there() -> None:
    def talk(fabric: Fabric) -> int:
        journal = Journal()
        for length in range(3 - fabric.rank):
            journal.note(Mutation.RELEASE, length, 0)
        return Agreement(fabric, journal).settle()

    errors = on_ranks(2, talk)
    assert [type(error) for error in errors] == [RankError] * 2
    assert "operation 2: rank 0: #2 release(2, 0), rank 1: nothing" in str(errors[0])


def test_a_difference_that_is_forgotten_or_only_in_what_is_open_is_told_as_such() -> None:
    def forgotten(fabric: Fabric) -> int:
        journal = Journal()
        journal.note(Mutation.FLUSH, fabric.rank)
        for _ in range(history.KEPT):
            journal.note(Mutation.RELEASE, 1, 1)
        return Agreement(fabric, journal).settle()

    def open_here(fabric: Fabric) -> int:
        agreement = Agreement(fabric, Journal())
        agreement.copies = AgreedCopies(Copies(), RECORD_BYTES)
        if fabric.rank:
            agreement.copies.submit(CopyJob(OpId(1), CopyKind.BACKUP, ()))
        return agreement.settle()

    for talk, kept in ((forgotten, history.KEPT), (open_here, 0)):
        errors = on_ranks(2, talk)
        assert all(isinstance(error, RankError) for error in errors)
        assert f"older than the last {kept} operations, or in what is open" in str(errors[0])


def test_ranks_that_have_drifted_apart_still_understand_each_other() -> None:
    """However many transfers one rank has open, a report is as long as any other's."""

    def talk(fabric: Fabric) -> int:
        journal = Journal()
        agreement = Agreement(fabric, journal)
        agreement.copies = AgreedCopies(Copies(), RECORD_BYTES)
        for number in range(200 * fabric.rank):
            journal.note(Mutation.SUBMIT, number)
            agreement.copies.submit(CopyJob(OpId(number), CopyKind.BACKUP, ()))
        return agreement.settle()

    errors = on_ranks(2, talk)
    assert "operation 0: rank 0: nothing, rank 1: #0 submit(0,)" in str(errors[1])


def test_the_step_clock_stands_still() -> None:
    clock = StepClock(3.0)
    assert clock() == clock() == 3.0
    clock.now = 4.5
    assert clock() == 4.5
