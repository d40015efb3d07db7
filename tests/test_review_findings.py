"""Rare orders of events that broke the cache once, each named for what must hold."""

from __future__ import annotations

import pytest
import torch

from banyan.errors import CopyError
from banyan.lease import Lease
from banyan.tree import Tier
from tests.cases.scene import (
    OK,
    PENDING,
    A,
    B,
    Stream,
    demote,
    end,
    evict,
    forget,
    held,
    insert,
    node_at,
)
from tests.support.rig import KINDS, Rig, toy_spec


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cycle(rig: Rig, first: int, rounds: int) -> list[int]:
    """Twelve prompts of 16 tokens, again and again; tokens served from host, by round."""
    served = []
    for _ in range(rounds):
        leases = [insert(rig, Stream(first + i)[0:17]) for i in range(12)]
        served.append(sum(lease.host_len for lease in leases))
    return served


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_full_host_follows_the_prompts_of_today(write_policy: str) -> None:
    rig = Rig(device=[32], host=[64], write_policy=write_policy)
    assert cycle(rig, 10, 3)[-1] == 12 * 16, "they fit on host and not on device"
    assert cycle(rig, 40, 3)[-1] == 12 * 16, "others that fit alike, on a host that is full"
    rig.check()


def test_asking_again_while_a_victim_is_saved_saves_no_other() -> None:
    rig = Rig(device=[16], host=[64], write_policy="write_back")
    for number in range(4):
        insert(rig, Stream(10 + number)[0:16])
    assert rig.stack.device_slots[0].free_count == 0
    before = len(rig.engine.submitted)
    lease = rig.acquire(A[0:5])
    for _ in range(4):
        assert rig.cache.allocate(lease, 4) is PENDING
    assert len(rig.engine.submitted) == before + 1
    rig.settle()
    assert rig.cache.allocate(lease, 4) is OK
    assert len(held(rig, Tier.DEVICE, "full")) == 15, "just the page that was wanted went"
    rig.cache.release(lease)
    rig.check()


def test_two_that_wait_for_one_saved_victim_both_get_slots_in_the_end() -> None:
    rig = Rig(device=[8], host=[64], write_policy="write_back")
    insert(rig, A[0:16])
    insert(rig, B[0:16])
    leases = [rig.acquire(Stream(20 + i)[0:17]) for i in range(2)]
    waiting = list(leases)
    for _ in range(8):
        waiting = [lease for lease in waiting if rig.cache.allocate(lease, 16) is not OK]
        rig.settle()
    assert not waiting
    for lease in leases:
        rig.cache.release(lease)
    rig.check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_eviction_page_by_page_leaves_no_node_per_page(kind: str) -> None:
    rig = Rig(kind, device=[32] * len(toy_spec(kind).components))
    insert(rig, A[0:101], cuts=[100])
    before = len(list(rig.cache.tree.nodes()))
    for _ in range(25):
        assert evict(rig, F=4) is not None
        rig.check()
    nodes = list(rig.cache.tree.nodes())
    assert len(nodes) <= before and not any(node.has(0, Tier.DEVICE) for node in nodes)
    lease = rig.acquire(A[0:101])
    assert lease.host_len == 100 and rig.compute(lease, A[0:101], 101) is OK
    end(rig, lease)


def late(rig: Rig) -> tuple[Lease, Lease]:
    """Two load-backs: the first hangs, the second has been read and waits behind it."""
    insert(rig, A[0:32])
    insert(rig, B[0:32])
    demote(rig)
    stuck, lease = rig.acquire(A[0:40]), rig.acquire(B[0:40])
    assert stuck.loading is not None and lease.loading is not None
    rig.engine.start(stuck.loading.op_id)
    assert rig.compute(lease, B[0:40], 36) is OK
    return stuck, lease


@pytest.mark.parametrize("polled", [False, True])
def test_a_load_back_that_was_read_does_not_fail_for_being_late(polled: bool) -> None:
    rig = Rig()
    stuck, lease = late(rig)
    if polled:
        rig.commit(lease, B[0:40])
        assert rig.cache.counts["commits_deferred"] == 1
    rig.now = 31.0
    rig.cache.poll()
    assert stuck.broken and not lease.broken
    rig.commit(lease, B[0:40])
    rig.check()
    rig.cache.poll()
    rig.commit(lease, B[0:40])
    rig.check()
    assert rig.hit(B[0:36])[0] == 36, "applied once nothing waits for the one before it"
    for one in (stuck, lease):
        rig.cache.release(one)
    rig.settle()
    rig.check()


def test_a_commit_that_finds_its_load_back_failed_publishes_nothing() -> None:
    rig = Rig()
    insert(rig, A[0:32])
    demote(rig)
    lease = rig.acquire(A[0:40])
    assert lease.loading is not None
    assert rig.cache.allocate(lease, 36) is OK
    rig.write(lease, A[0:40], 32, 36)  # by an engine that has not waited for its bytes
    rig.cache.advance(lease, 36)
    rig.engine.finish(lease.loading.op_id, ok=False)
    with pytest.raises(CopyError):
        rig.commit(lease, A[0:40])
    rig.check()
    assert rig.hit(A[0:36]) == (0, 32)
    rig.cache.release(lease)
    rig.check()


def test_a_prefix_that_an_urgent_request_reads_is_kept_like_one_it_computed() -> None:
    rig = Rig(device=[12], host=[], evict_policy="priority")
    insert(rig, A[0:17])
    insert(rig, B[0:17])
    lease = rig.acquire(A[0:20], priority=5)
    assert lease.device_len == 16 and rig.compute(lease, A[0:20], 20) is OK
    rig.cache.release(lease)
    assert node_at(rig, A[0:16]).priority == 5
    insert(rig, Stream(30)[0:30])
    assert rig.hit(A[0:16])[0] == 16, "the other prompt is the older one, but less urgent"
    assert rig.hit(B[0:16])[0] < 16
    rig.check()


def test_a_boundary_whose_load_back_still_runs_is_not_saved_from_the_device() -> None:
    """The last page comes from host; of the page before it the window is on device alone. What a
    backup would pin of the boundary on device is not attached yet (INV-04)."""
    rig = Rig("full+window")
    insert(rig, A[0:16])
    insert(rig, A[0:20])
    evict(rig, F=4)
    forget(rig, Tier.HOST, "window", A[0:16])
    before = len(rig.engine.submitted)
    lease = rig.acquire(A[0:24])
    assert (lease.device_len, lease.host_len) == (16, 4)
    assert rig.compute(lease, A[0:24], 24) is OK
    assert lease.loading is not None, "its bytes have been read, and it is not applied"
    rig.check()
    assert len(rig.engine.submitted) == before + 1, "the load-back alone"
    rig.commit(lease, A[0:24])
    rig.check()
    rig.cache.release(lease)
    rig.settle()
    demote(rig)
    assert rig.hit(A[0:24]) == (0, 24), "all of its windows are on host by then"
