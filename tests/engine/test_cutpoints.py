"""Cut points: where a prefill chunk ends, as a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.engine.cutpoints import CutPolicy
from tests.support.rig import toy_spec


def policy(page: int = 4, chunk: int = 16, interval: int | None = None, points: bool = True):
    return CutPolicy(page, chunk, interval, points)


def test_checkpoints_matter_only_where_a_component_is_not_full():
    kinds = ("full", "full+window", "full+state")
    found = [CutPolicy.for_spec(toy_spec(kind), 16, None).checkpoints for kind in kinds]
    assert found == [False, True, True]


def test_a_full_model_is_cut_by_size_alone():
    assert policy(points=False).cuts(0, 39, branch=8, hints={20}) == [16, 32, 39]


def test_the_last_page_boundary_before_the_last_token_is_a_cut():
    assert policy(chunk=64).cuts(0, 39) == [36, 39]
    assert policy(chunk=64).cuts(0, 40) == [36, 40]
    assert policy(chunk=64).cuts(0, 41) == [40, 41]
    assert policy(chunk=64).cuts(36, 39) == [39]


def test_the_branch_point_is_a_cut_when_it_lies_beyond_the_start():
    assert policy(chunk=64).cuts(8, 39, branch=22) == [20, 36, 39]
    assert policy(chunk=64).cuts(20, 39, branch=22) == [36, 39]
    assert policy(chunk=64).cuts(24, 39, branch=22) == [36, 39]


def test_hints_are_cuts_in_any_order():
    assert policy(chunk=64).cuts(0, 39, hints={30, 9, 200}) == [8, 28, 36, 39]


def test_state_interval_is_counted_from_the_prompts_beginning():
    assert policy(chunk=64, interval=12).cuts(4, 39) == [12, 24, 36, 39]


def test_an_interval_that_is_no_whole_number_of_pages_is_rounded_up():
    assert policy(chunk=64, interval=6).cuts(0, 30) == [8, 16, 24, 28, 30]


def test_a_chunk_smaller_than_a_page_still_stops_at_every_page_boundary():
    assert policy(page=16, chunk=5).cuts(0, 40) == [5, 10, 15, 16, 21, 26, 31, 32, 37, 40]
    assert policy(page=64, chunk=32).cuts(0, 130) == [32, 64, 96, 128, 130]


@pytest.mark.parametrize("length", [8, 24, 40])
def test_c094_the_same_checkpoints_with_chunking_on_and_off(length: int):
    """C094: K=16 and prompts of 8, 24 and 40 tokens; chunks of K or one chunk for all."""
    assert policy(chunk=16, interval=16).cuts(0, length) == policy(chunk=4096, interval=16).cuts(
        0, length
    )


def test_c085_a_chunk_smaller_than_the_interval_still_ends_at_every_multiple():
    """C085: C=8, K=16, prompt 64: checkpoints at 16, 32 and 48."""
    assert {16, 32, 48} <= set(policy(chunk=8, interval=16).cuts(0, 64))


@given(
    page=st.integers(1, 9),
    chunk=st.integers(1, 40),
    interval=st.none() | st.integers(1, 30),
    points=st.booleans(),
    start_page=st.integers(0, 10),
    more=st.integers(1, 90),
    branch=st.integers(0, 100),
    hints=st.sets(st.integers(0, 120), max_size=4),
)
def test_cuts_are_aligned_ascending_bounded_and_complete(
    page, chunk, interval, points, start_page, more, branch, hints
):
    cut_policy = policy(page, chunk, interval, points)
    start = start_page * page
    stop = start + more
    cuts = cut_policy.cuts(start, stop, branch=branch, hints=hints)
    assert cuts[-1] == stop
    for before, after in zip([start, *cuts], cuts, strict=False):
        assert 0 < after - before <= chunk
        assert after % page == 0 or after == stop or after // page == before // page
    if points:
        wanted = {m - m % page for m in (branch, stop - 1, *hints)}
        assert {m for m in wanted if start < m < stop} <= set(cuts)
