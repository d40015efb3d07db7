"""Cases C043 to C049: splits while operations run."""

from __future__ import annotations

import pytest

from tests.cases.scene import (
    DEVICE,
    HOST,
    OK,
    A,
    B,
    demote,
    end,
    evict,
    evict_all,
    free,
    held,
    insert,
    node_at,
)
from tests.support.reference import survey
from tests.support.rig import Rig


@pytest.mark.parametrize("ok", [True, False])
def test_c043_a_half_is_not_backed_up_before_it_is(ok: bool) -> None:
    rig = Rig(page_size=1, device=[400], host=[400])
    insert(rig, A[0:375], settle=False)
    reader = rig.acquire(A[0:375])
    assert reader.boundary == 374 and node_at(rig, A[0:374]).end == 374
    assert held(rig, HOST, "full") == []
    rig.check()
    (op,) = rig.engine.pending
    rig.engine.finish(op, ok=ok)
    rig.cache.poll()
    rig.check()
    assert held(rig, HOST, "full") == (list(range(1, 376)) if ok else [])
    assert free(rig, HOST) == [25 if ok else 400]
    end(rig, reader)


def test_c044_both_halves_reach_the_host_in_their_order() -> None:
    rig = Rig()
    insert(rig, A[0:16], settle=False)
    insert(rig, [*A[0:8], *B[0:8]], settle=False)
    assert sorted(node.end for node in rig.cache.tree.nodes()) == [8, 16, 16]
    attached: list[int] = []
    real = rig.cache.tree.attach

    def attach(node, component, tier, slots):  # type: ignore[no-untyped-def]
        real(node, component, tier, slots)
        if tier is HOST:
            assert node.parent.parent is None or node.parent.has(0, HOST)
            attached.append(node.end)

    rig.cache.tree.attach = attach  # type: ignore[method-assign]
    rig.settle()
    assert attached == [8, 16, 16]
    places = survey(rig.cache.tree)[1][0]
    assert sorted(len(key) // 4 for _, key in places) == [4, 8, 12, 12, 16, 16]
    demote(rig)
    for tokens in (A[0:17], [*A[0:8], *B[0:9]]):
        lease = rig.acquire(tokens)
        assert lease.host_len + lease.device_len == 16
        rig.read(lease, tokens)
        rig.cache.release(lease)
        rig.settle()
    end(rig)


def test_c046_a_child_is_not_backed_up_while_its_parent_is_not() -> None:
    rig = Rig("full+window")
    lease = rig.acquire(A[0:26])
    for stop in (16, 24):
        assert rig.compute(lease, A[0:26], stop) is OK
        rig.commit(lease, A[0:26])
    parent, child = rig.engine.pending
    rig.engine.finish(parent, ok=False, reason="no memory")
    rig.engine.finish(child)
    rig.cache.poll()
    rig.check()
    assert held(rig, HOST, "full") == []
    assert rig.cache.controller.backup(node_at(rig, A[0:24])), "and again"
    rig.settle()
    rig.check()
    assert held(rig, HOST, "full") == [4, 8, 12, 16, 20, 24]
    rig.cache.release(lease)
    demote(rig)
    assert rig.hit(A[0:24]) == (0, 24)
    end(rig)


def test_c046_a_parent_that_finds_no_room_on_host_keeps_its_child_away_too() -> None:
    rig = Rig(device=[32], host=[3])
    lease = rig.acquire(A[0:26])
    assert rig.compute(lease, A[0:26], 16) is OK
    rig.commit(lease, A[0:26])
    assert rig.cache.stats()["misses"]["host_full"] == 1, "three slots for four pages"
    assert rig.compute(lease, A[0:26], 24) is OK
    rig.commit(lease, A[0:26])
    rig.settle()
    assert held(rig, HOST, "full") == [], "the child alone would have fitted"
    rig.cache.release(lease)
    assert evict(rig, F=8) is not None and rig.hit(A[0:24]) == (16, 16)
    end(rig)


def test_c049_a_leaf_split_while_it_waits_in_the_host_s_queue() -> None:
    rig = Rig(device=[32], host=[16])
    for stream in (A, B):
        insert(rig, stream[0:32])
    demote(rig)
    for at in (24, 8, 16):
        lease = rig.acquire(A[0 : at + 1])
        rig.cache.release(lease)
        rig.settle()
        rig.check()
    demote(rig)
    assert sorted(node.end for node in rig.cache.tree.nodes()) == [8, 16, 24, 32, 32]
    for left in range(15, -1, -1):
        assert evict(rig, HOST, F=4) is not None
        assert sum(len(node.parts[HOST][0].slots) for node in rig.cache.tree.nodes()) == left  # type: ignore[arg-type]
    assert evict_all(rig, DEVICE, "full") == 0
    assert not list(rig.cache.tree.nodes())
    end(rig)
