"""Cases C074 to C106: matching, alignment, boundaries, policies and the cost of a step."""

from __future__ import annotations

import pytest

from tests.cases.scene import (
    DEVICE,
    OK,
    A,
    B,
    C,
    D,
    Stream,
    demote,
    end,
    evict,
    forget,
    held,
    insert,
    match,
    start,
)
from tests.support.rig import Rig


def test_c074_groups_that_end_elsewhere_agree_on_what_all_have() -> None:
    rig = Rig("full+state", page_size=16, device=[8, 4], host=[])
    insert(rig, A[0:65], cuts=[48, 64])
    assert match(rig, A[0:70]).boundary == 64
    assert evict(rig, F=16) is not None, "full has 3 blocks, the state of the fourth goes with it"
    assert match(rig, A[0:70]).boundary == 48
    end(rig)


def test_c074_a_state_further_on_does_not_count() -> None:
    rig = Rig("full+state", page_size=16, device=[8, 4], host=[])
    insert(rig, A[0:65], cuts=[48, 64])
    assert [match(rig, A[0:n]).boundary for n in (49, 64, 65)] == [48, 48, 64]
    end(rig)


@pytest.mark.parametrize(("hole", "hit"), [(None, 4), (4, 2), (2, 0)])
def test_c076_a_shorter_hit_needs_its_own_whole_window(hole: int | None, hit: int) -> None:
    rig = Rig("full+window", page_size=2, window=4, host=[])
    insert(rig, A[0:6], cuts=[2, 4])
    assert rig.hit(A[0:6]) == (6, 6)
    assert evict(rig, F=2) is not None
    if hole is not None:
        forget(rig, DEVICE, "window", A[0:hole])
    assert rig.hit(A[0:4]) == (hit, hit)
    end(rig)


def test_c077_a_state_is_stored_only_where_it_was_taken() -> None:
    rig = Rig("full+state")
    insert(rig, A[0:29], cuts=[13])
    assert held(rig, DEVICE, "state") == []
    assert match(rig, [*A[0:29], *B[0:3]]).boundary == 0
    end(rig)
    insert(rig, A[0:29], cuts=[13, 16])
    assert held(rig, DEVICE, "state") == [16]
    lease = start(rig, [*A[0:29], *B[0:3]])
    assert lease.boundary == 16, "and what was read there was the state of 16"
    end(rig, lease)


@pytest.mark.parametrize("kind", ["full+state", "full+window+state"])
def test_c079_a_branch_point_becomes_a_checkpoint(kind: str) -> None:
    sizes = {"full": 96, "window": 96, "state": 20}
    rig = Rig(kind, device=[sizes[name] for name in kind.split("+")])
    hits = []
    for number in range(8):
        tokens = [*A[0:40], *Stream(10 + number)[0:24]]
        found = match(rig, tokens)
        lease = start(rig, tokens, cuts=sorted({found.full_len, 60}))
        hits.append(lease.boundary)
        rig.cache.release(lease)
        rig.settle()
    assert hits == [0, 0] + [40] * 6
    end(rig)


def test_c080_a_divergence_inside_the_last_block_falls_back_one_boundary() -> None:
    rig = Rig("full+window", page_size=2, device=[64, 32], host=[])
    insert(rig, A[0:33], cuts=range(8, 33, 8))
    assert evict(rig, S=16) is not None
    assert held(rig, DEVICE, "window") == list(range(18, 33, 2))
    assert match(rig, [*A[0:31], *B[0:4]]).boundary == 30
    forget(rig, DEVICE, "window", A[0:32])
    assert match(rig, [*A[0:31], *B[0:4]]).boundary == 24, "the previous one, not 0"
    end(rig)


def test_c086_a_request_has_two_state_slots_and_gives_one() -> None:
    rig = Rig("full+state", device=[32, 4], host=[])
    lease = rig.acquire(A[0:40])
    for stop in (16, 32):
        assert rig.compute(lease, A[0:40], stop) is OK
    state = lease.states(1)
    assert len(state.owned) == 2 and state.kept_at == 32
    rig.commit(lease, A[0:40])
    rig.check()
    assert len(state.owned) == 1 and held(rig, DEVICE, "state") == [32]
    assert rig.compute(lease, A[0:40], 39) is OK
    rig.read(lease, A[0:40])
    end(rig, lease)


def test_c088_a_state_that_has_seen_the_last_token_is_not_used_for_it() -> None:
    rig = Rig("full+state")
    insert(rig, A[0:16], cuts=[8])
    assert held(rig, DEVICE, "state") == [8, 16]
    lease = rig.acquire(A[0:16])
    assert lease.boundary == 8
    rig.read(lease, A[0:16])
    assert rig.compute(lease, A[0:16], 16) is OK
    end(rig, lease)


def test_c089_hits_of_32_and_33_tokens() -> None:
    for kind in ("full", "full+window"):
        slots = [8] * (1 + kind.count("+"))
        rig = Rig(kind, page_size=16, device=slots, host=[])
        insert(rig, A[0:64])
        hits = {n: match(rig, A[0:n]).boundary for n in (16, 17, 32, 33, 64, 65)}
        assert hits == {16: 0, 17: 16, 32: 16, 33: 32, 64: 48, 65: 64}
        end(rig)


def test_c091_publishing_twice_in_one_step_is_publishing_once() -> None:
    rig = Rig("full+window+state")
    lease = start(rig, A[0:18], cuts=[16])
    before = [n.edge for n in rig.cache.tree.nodes()]
    slots = [table.slots.tolist() for table in (lease.pages(0), lease.pages(1))]
    for _ in range(2):
        rig.commit(lease, A[0:18])
        rig.check()
    assert [n.edge for n in rig.cache.tree.nodes()] == before
    assert [table.slots.tolist() for table in (lease.pages(0), lease.pages(1))] == slots
    end(rig, lease)


@pytest.mark.parametrize("page", [1, 2, 4])
def test_c095_a_window_holds_the_last_tokens_at_every_length(page: int) -> None:
    """`compute` reads all that the next token looks back at, page by page and length by length."""
    rig = Rig("full+window", page_size=page, device=[64 // page, 32 // page], host=[])
    lease = rig.acquire(A[0:40])
    for length in range(1, 36):
        assert rig.compute(lease, A[0:40], length) is OK
        assert lease.length == lease.pages(0).stop_page * page - (-length % page)
        first = lease.pages(1).first_page * page
        assert first <= max(0, length - 7) and lease.pages(1).stop_page == lease.pages(0).stop_page
        rig.read(lease, A[0:40])
        rig.check()
    end(rig, lease)


def test_c097_every_use_counts_for_lfu() -> None:
    rig = Rig(evict_policy="lfu", host=[])
    insert(rig, A[0:8])
    for _ in range(5):
        rig.run(A[0:9])
    insert(rig, B[0:8])
    assert evict(rig, F=8) is not None
    assert rig.hit(A[0:8]) == (8, 8) and rig.hit(B[0:8]) == (0, 0)
    end(rig)


def test_c100_the_snapshot_that_is_kept_can_be_restored() -> None:
    rig = Rig("full+state", device=[32, 3], host=[])
    tokens = A[0:45]
    lease = start(rig, tokens)
    for token in B[0:5]:
        tokens.append(token)
        assert rig.compute(lease, tokens, len(tokens)) is OK
    rig.commit(lease, tokens)
    rig.cache.release(lease)
    assert len(tokens) == 50 and held(rig, DEVICE, "state") == [48]
    turn = rig.acquire([*tokens[:48], *C[0:10]])
    assert turn.boundary == 48
    rig.read(turn, tokens)
    rig.cache.release(turn)
    insert(rig, D[0:9], cuts=[8])
    assert match(rig, [*tokens[:48], *C[0:10]]).boundary == 48, "the one that is used stays"
    end(rig)


def test_c106_a_finished_transfer_is_usable_at_the_next_step() -> None:
    rig = Rig(device=[64], host=[128])
    insert(rig, A[0:33])
    demote(rig)
    waiting = [rig.acquire(Stream(10 + n)[0:9]) for n in range(100)]
    lease = rig.acquire(A[0:33])
    rig.engine.finish(rig.engine.pending[0])
    rig.cache.poll()
    assert lease.loading is None and rig.hit(A[0:32]) == (32, 32)
    rig.cache.release(lease)
    assert evict(rig, F=32) is not None
    end(rig, *waiting)
