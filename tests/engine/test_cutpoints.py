"""Checkpoints and cut points: where a prefill keeps states and where its chunks end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.engine.cutpoints import TEMPLATE_TAIL, CheckpointPolicy, CutPolicy
from banyan.tree import Mark
from tests.support.rig import toy_spec

KEEP, PROMPT, MESSAGE = Mark.KEEP, Mark.PROMPT, Mark.MESSAGE


def plan(
    start: int, stop: int, *, page: int = 4, interval: int | None = None, budget: int = 8, **at
):
    return CheckpointPolicy(page, interval, budget).plan(start, stop, **at)


def cuts(start: int, stop: int, *, page: int = 4, chunk: int = 16, **options):
    marks = plan(start, stop, page=page, **options)
    return CutPolicy(page, chunk).cuts(start, stop, marks)


def test_checkpoints_matter_only_where_a_component_is_not_full():
    kinds = ("full", "full+window", "full+state")
    found = [CheckpointPolicy.for_spec(toy_spec(kind), None, 8) for kind in kinds]
    assert [policy is not None for policy in found] == [False, True, True]


def test_without_checkpoints_a_prompt_is_cut_by_size_alone():
    assert CutPolicy(4, 16).cuts(0, 39) == [16, 32, 39]


def test_the_last_page_boundary_before_the_last_token_is_a_checkpoint():
    assert plan(0, 39) == {36: PROMPT}
    assert cuts(0, 39, chunk=64) == [36, 39]
    assert cuts(0, 40, chunk=64) == [36, 40]
    assert cuts(0, 41, chunk=64) == [40, 41]
    assert cuts(36, 39, chunk=64) == [39]


def test_the_branch_point_is_one_when_it_lies_beyond_the_start():
    assert plan(8, 39, branch=22) == {20: KEEP, 36: PROMPT}
    assert cuts(8, 39, chunk=64, branch=22) == [20, 36, 39]
    assert cuts(20, 39, chunk=64, branch=22) == [36, 39]
    assert cuts(24, 39, chunk=64, branch=22) == [36, 39]


def test_hints_are_checkpoints_in_any_order_and_those_out_of_range_are_not():
    assert plan(0, 99, hints=[50, 9, 200, 0]) == {8: KEEP, 48: MESSAGE, 96: PROMPT}


def test_later_hints_in_known_tokens_had_their_checkpoints():
    """Of the first message's end other conversations are reminded; the rest were this one's."""
    assert plan(0, 99, known=60, hints=[9, 30, 50]) == {8: KEEP, 96: PROMPT}
    assert plan(0, 99, known=40, hints=[9, 30, 50]) == {8: KEEP, 48: MESSAGE, 96: PROMPT}


def test_a_template_s_tail_is_left_out_of_the_prompt_s_checkpoint():
    """What follows the last message may be rendered otherwise in the next turn (C100)."""
    assert plan(0, 99, hints=[9, 99 - TEMPLATE_TAIL]) == {8: KEEP, 64: PROMPT}
    assert plan(0, 99, hints=[9, 98 - TEMPLATE_TAIL]) == {8: KEEP, 64: MESSAGE, 96: PROMPT}


def test_followers_get_theirs_whatever_the_budget():
    assert plan(0, 99, budget=1, followers=[12, 40]) == {12: KEEP, 40: KEEP, 96: PROMPT}


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (1, {96}),
        (2, {96, 80}),
        (3, {96, 80, 8}),
        (4, {96, 80, 8, 56}),
        (5, {96, 80, 8, 56, 40}),
        (9, {96, 80, 8, 56, 40, 24, 36, 72}),
    ],
)
def test_a_budget_keeps_what_is_worth_most(budget: int, kept: set[int]):
    """The prompt's end, the branch, the first hint, later hints from the last, then intervals: the
    three that are left go to every third of the eight multiples of 12."""
    found = plan(0, 99, budget=budget, interval=12, branch=81, hints=[8, 24, 40, 56])
    assert set(found) == kept


def test_state_interval_is_counted_from_the_prompts_beginning():
    assert cuts(4, 39, chunk=64, interval=12) == [12, 24, 36, 39]


def test_an_interval_that_is_no_whole_number_of_pages_is_rounded_up():
    assert cuts(0, 30, chunk=64, interval=6) == [8, 16, 24, 28, 30]


def test_a_chunk_smaller_than_a_page_still_stops_at_every_page_boundary():
    assert cuts(0, 40, page=16, chunk=5) == [5, 10, 15, 16, 21, 26, 31, 32, 37, 40]
    assert cuts(0, 130, page=64, chunk=32) == [32, 64, 96, 128, 130]


@pytest.mark.parametrize("length", [8, 24, 40])
def test_c094_the_same_checkpoints_with_chunking_on_and_off(length: int):
    """C094: K=16 and prompts of 8, 24 and 40 tokens; chunks of K or one chunk for all."""
    assert cuts(0, length, interval=16) == cuts(0, length, chunk=4096, interval=16)


def test_c085_a_chunk_smaller_than_the_interval_still_ends_at_every_multiple():
    """C085: C=8, K=16, prompt 64: checkpoints at 16, 32 and 48."""
    assert {16, 32, 48} <= set(cuts(0, 64, chunk=8, interval=16))


POSITIONS = st.sets(st.integers(0, 120), max_size=4)


@given(
    page=st.integers(1, 9),
    chunk=st.integers(1, 40),
    interval=st.none() | st.integers(1, 30),
    budget=st.integers(1, 12),
    start_page=st.integers(0, 10),
    more=st.integers(1, 90),
    branch=st.integers(0, 100),
    hints=POSITIONS,
)
def test_checkpoints_are_aligned_in_budget_and_every_one_is_a_cut(
    page, chunk, interval, budget, start_page, more, branch, hints
):
    start = start_page * page
    stop = start + more
    marks = plan(
        start, stop, page=page, interval=interval, budget=budget, branch=branch, hints=hints
    )
    assert len(marks) <= budget
    assert all(start < at < stop and at % page == 0 for at in marks)
    last = (stop - 1) // page * page
    if last > start and not hints:
        assert marks[last] is PROMPT
    found = CutPolicy(page, chunk).cuts(start, stop, marks)
    assert set(marks) <= set(found)
    assert found[-1] == stop
    for before, after in zip([start, *found], found, strict=False):
        assert 0 < after - before <= chunk
        assert after % page == 0 or after == stop or after // page == before // page
