"""`PrefixCache`: the six verbs, what each changes and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.cache import AllocateOutcome
from banyan.errors import InvariantError, LeaseError
from banyan.lease import Lease
from banyan.tree import Tier, encode_namespace, encode_tokens
from tests.support.rig import KINDS, Rig

OK, FULL = AllocateOutcome.OK, AllocateOutcome.FULL


def seq(n: int, stream: int = 1) -> list[int]:
    """n tokens of a stream."""
    return [stream * 1_000 + i for i in range(n)]


def free(rig: Rig) -> list[int]:
    """Free device slots by component."""
    return [pool.free_count for pool in rig.stack.device_slots]


def all_free(rig: Rig) -> bool:
    """Whether every slot of both tiers is free."""
    pools = [pool for pools in rig.cache.controller.allocators for pool in pools]
    return all(pool.free_count == pool.capacity for pool in pools)


def index_of(rig: Rig, name: str) -> int:
    """The component of that name."""
    return [c.name for c in rig.spec.components].index(name)


# ---- the whole way -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [1, 2, 4, 16])
def test_a_returning_prompt_is_answered_by_device_and_then_by_host(kind: str, page: int) -> None:
    device, host = _slots(kind, 160 // page), _slots(kind, 320 // page)
    rig = Rig(kind, page_size=page, device=device, host=host)
    n = 66
    last = (n - 1) // page * page
    cold = rig.run(seq(n))
    assert (cold.device_len, cold.host_len) == (0, 0)
    warm = rig.run(seq(n))
    assert (warm.device_len, warm.host_len) == (last, 0)
    rig.evict_device()
    cool = rig.run(seq(n))
    assert (cool.device_len, cool.host_len) == (0, last)
    again = rig.run(seq(n))
    assert (again.device_len, again.host_len) == (last, 0)
    rig.check()
    rig.cache.flush()
    assert all_free(rig)


def _slots(kind: str, pages: int) -> list[int]:
    return [pages if name != "state" else 8 for name in kind.split("+")]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_keeps_a_snapshot_for_the_next_turn(kind: str) -> None:
    rig = Rig(kind)
    tokens = seq(10)
    lease = rig.acquire(tokens)
    for stop in (8, 10):
        assert rig.compute(lease, tokens, stop) is OK
    for i in range(20):
        tokens.append(500 + i)
        assert rig.compute(lease, tokens, len(tokens)) is OK
        rig.check()
    assert rig.hit(tokens) == (0, 0), "nothing is published before the commit"
    rig.commit(lease, tokens)
    rig.check()
    rig.cache.release(lease)
    rig.settle()
    assert rig.hit(tokens) == (28, 28)
    turn = rig.acquire([*tokens, 7])
    rig.read(turn, tokens)
    rig.cache.release(turn)
    rig.check()


def test_a_state_takes_two_slots_however_long_it_decodes() -> None:
    rig = Rig("full+state", device=[64, 2], host=[])
    tokens = seq(5)
    lease = rig.acquire(tokens)
    assert rig.compute(lease, tokens, 5) is OK
    for i in range(60):
        tokens.append(i)
        assert rig.compute(lease, tokens, len(tokens)) is OK
    assert lease.states(1).kept_at == 64
    assert len(lease.states(1).owned) == 2
    rig.commit(lease, tokens)
    rig.cache.release(lease)
    assert rig.hit(tokens) == (64, 64)
    rig.check()


def test_a_window_takes_its_reach_however_long_it_decodes() -> None:
    rig = Rig("full+window", device=[64, 4], host=[])
    tokens = seq(5)
    lease = rig.acquire(tokens)
    assert rig.compute(lease, tokens, 5) is OK
    for i in range(120):
        tokens.append(i)
        assert rig.compute(lease, tokens, len(tokens)) is OK
        assert len(lease.pages(1).slots) <= 3
    rig.cache.release(lease)
    rig.check()


# ---- acquire -------------------------------------------------------------------------------------


def test_acquire_takes_no_slot_and_starts_nothing_on_a_device_hit() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(33))
    before, jobs = free(rig), len(rig.engine.submitted)
    leases = [rig.acquire(seq(33)) for _ in range(20)]
    assert free(rig) == before and len(rig.engine.submitted) == jobs
    for lease in leases:
        rig.read(lease, seq(33))
        rig.cache.release(lease)
    rig.check()


def test_device_only_leaves_host_data_where_it_is() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(33))
    rig.evict_device()
    lease = rig.acquire(seq(33), device_only=True)
    assert lease.boundary == 0 and lease.ticket is None and not rig.engine.pending
    rig.cache.release(lease)
    rig.check()


def test_a_match_made_before_the_tree_changed_is_made_again() -> None:
    rig = Rig()
    rig.run(seq(33))
    match = rig.cache.match(encode_tokens(seq(33)))
    rig.evict_device()
    rig.cache.flush()
    lease = rig.cache.acquire(match)
    assert lease.boundary == 0
    rig.cache.release(lease)
    rig.check()


def test_only_the_part_on_host_is_loaded() -> None:
    rig = Rig()
    rig.run(seq(33))
    keeper = rig.acquire(seq(17))
    rig.evict_device()
    rig.cache.release(keeper)
    lease = rig.acquire(seq(33))
    assert (lease.device_len, lease.host_len) == (16, 16)
    assert [len(block.src) for block in rig.engine.submitted[-1].blocks] == [4]
    rig.read(lease, seq(33))
    rig.cache.release(lease)
    rig.settle()
    rig.check()


# ---- allocate and advance ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_allocate_is_all_or_nothing(kind: str) -> None:
    rig = Rig(kind, device=_slots(kind, 12), host=[])
    holder = rig.acquire(seq(33))
    assert rig.compute(holder, seq(33), 32) is OK
    rig.run(seq(9, 2))
    lease = rig.acquire(seq(33, 3))
    before, nodes = free(rig), len(list(rig.cache.tree.nodes()))
    assert rig.cache.allocate(lease, 32) is FULL
    assert free(rig) == before and len(list(rig.cache.tree.nodes())) == nodes
    assert rig.cache.allocate(lease, 8) is OK
    for one in (lease, holder):
        rig.cache.release(one)
    rig.check()


def test_allocate_twice_takes_slots_once() -> None:
    rig = Rig("full+window+state")
    lease = rig.acquire(seq(33))
    assert rig.cache.allocate(lease, 16) is OK
    before = free(rig)
    assert rig.cache.allocate(lease, 16) is OK
    assert rig.cache.allocate(lease, 13) is OK
    assert free(rig) == before
    assert rig.cache.allocate(lease, 17) is OK
    assert free(rig)[0] == before[0] - 1
    rig.cache.release(lease)
    rig.check()


def test_a_checkpoint_is_skipped_rather_than_a_request_stopped() -> None:
    rig = Rig("full+state", device=[32, 2], host=[])
    one, two = rig.acquire(seq(40)), rig.acquire(seq(40, 2))
    for lease, stream in ((one, 1), (two, 2)):
        assert rig.compute(lease, seq(40, stream), 16) is OK
    for lease, stream in ((one, 1), (two, 2)):
        assert rig.compute(lease, seq(40, stream), 32) is OK, "without the state of 16"
        assert lease.states(1).kept_at == 32
    assert rig.cache.stats()["counts"]["checkpoints_skipped"] == 2
    rig.commit(one, seq(40))
    assert rig.hit(seq(16)) == (0, 0) and rig.hit(seq(32)) == (32, 32)
    for lease in (one, two):
        rig.cache.release(lease)
    rig.check()


def test_a_request_that_has_no_state_slot_at_all_is_told_so() -> None:
    rig = Rig("full+state", device=[32, 1], host=[])
    one, two = rig.acquire(seq(9)), rig.acquire(seq(9, 2))
    assert rig.compute(one, seq(9), 8) is OK
    assert rig.cache.allocate(two, 8) is FULL
    rig.cache.release(one)
    assert rig.cache.allocate(two, 8) is OK
    rig.cache.release(two)
    rig.check()


@pytest.mark.parametrize("kind", KINDS)
def test_advance_beyond_what_was_allocated_is_refused_whole(kind: str) -> None:
    rig = Rig(kind)
    lease = rig.acquire(seq(20))
    with pytest.raises(LeaseError, match="allocate"):
        rig.cache.advance(lease, 4)
    assert rig.cache.allocate(lease, 6) is OK
    with pytest.raises(LeaseError, match="from 0 to 9"):
        rig.cache.advance(lease, 9)
    assert lease.length == 0
    rig.write(lease, seq(20), 0, 6)
    rig.cache.advance(lease, 6)
    with pytest.raises(LeaseError, match="from 6 to 5"):
        rig.cache.advance(lease, 5)
    rig.check()
    rig.read(lease, seq(20))
    rig.cache.release(lease)
    rig.check()


def test_a_key_shorter_than_what_was_computed_is_refused_whole() -> None:
    rig = Rig("full+window+state")
    lease = rig.acquire(seq(20))
    assert rig.compute(lease, seq(20), 16) is OK
    with pytest.raises(LeaseError, match="15 tokens for 16"):
        rig.commit(lease, seq(15))
    assert not list(rig.cache.tree.nodes())
    rig.commit(lease, seq(16))
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_a_matched_state_is_never_written() -> None:
    rig = Rig("full+state")
    rig.run(seq(17))
    (node,) = [n for n in rig.cache.tree.nodes() if n.has(1, Tier.DEVICE) and n.end == 16]
    slots = node.parts[0][1].slots
    assert slots is not None
    before = rig.stack.device[1].read_records(slots)
    for stream in (2, 3):
        tokens = [*seq(16), *seq(9, stream)]
        lease = rig.acquire(tokens)
        assert lease.boundary == 16 and lease.states(1).read == slots[0]
        for stop in (18, 20, 25):
            assert rig.compute(lease, tokens, stop) is OK
            assert lease.states(1).write != slots[0]
        rig.cache.release(lease)
    assert np.array_equal(rig.stack.device[1].read_records(slots), before)
    rig.check()


# ---- commit --------------------------------------------------------------------------------------


def test_commit_publishes_whole_pages_only() -> None:
    rig = Rig("full+window")
    lease = rig.acquire(seq(20))
    rig.compute(lease, seq(20), 18)
    rig.commit(lease, seq(20))
    assert rig.hit(seq(18)) == (16, 16)
    rig.check()
    rig.cache.release(lease)
    assert rig.hit(seq(18)) == (16, 16)
    rig.settle()
    rig.check()


@pytest.mark.parametrize("kind", KINDS)
def test_commit_twice_is_commit_once(kind: str) -> None:
    rig = Rig(kind)
    lease = rig.acquire(seq(20))
    rig.compute(lease, seq(20), 18)
    rig.commit(lease, seq(20))
    before = (rig.cache.tree.epoch, free(rig), len(rig.engine.submitted))
    rig.commit(lease, seq(20))
    assert (rig.cache.tree.epoch, free(rig), len(rig.engine.submitted)) == before
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_duplicates_are_freed_and_the_table_names_the_trees_slots() -> None:
    rig = Rig("full+window+state")
    one, two = rig.acquire(seq(20)), rig.acquire(seq(20))
    for lease in (one, two):
        rig.compute(lease, seq(20), 16)
    mine = two.pages(0).slots.tolist()
    rig.commit(one, seq(20))
    before = free(rig)
    rig.commit(two, seq(20))
    assert two.pages(0).slots.tolist() == one.pages(0).slots.tolist() != mine
    assert [a - b for a, b in zip(free(rig), before, strict=True)][:2] == [4, 4]
    assert rig.cache.stats()["counts"]["duplicate_slots"] == 8
    rig.check()
    rig.read(two, seq(20))
    assert rig.compute(two, seq(20), 20) is OK
    for lease in (one, two):
        rig.cache.release(lease)
    rig.settle()
    rig.check()


def test_a_commit_revives_what_is_on_host_only() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(33))
    rig.evict_device()
    lease = rig.acquire(seq(33), device_only=True)
    assert rig.compute(lease, seq(33), 32) is OK
    jobs = len(rig.engine.submitted)
    rig.commit(lease, seq(33))
    assert rig.hit(seq(32)) == (32, 32) and len(rig.engine.submitted) == jobs, "host has it all"
    rig.check()
    rig.cache.release(lease)
    rig.check()


@pytest.mark.parametrize("what", ["window", "state"])
def test_a_commit_heals_a_tombstone(what: str) -> None:
    rig = Rig("full+window+state", host=[])
    rig.run(seq(33))
    component = index_of(rig, what)
    need = [0, 0, 0]
    need[component] = rig.cache.tree.device.evictable[component]
    freed = rig.cache.tree.evict(Tier.DEVICE, need)
    assert freed is not None
    rig.cache.controller.give_back(freed)
    assert rig.hit(seq(32)) == (0, 0)
    lease = rig.acquire(seq(33))
    assert rig.compute(lease, seq(33), 32) is OK
    rig.commit(lease, seq(33))
    rig.cache.release(lease)
    assert rig.hit(seq(32)) == (32, 32)
    rig.check()
    rig.read(rig.acquire(seq(33)), seq(33))


def test_nothing_of_a_request_that_does_not_publish_is_found() -> None:
    rig = Rig("full+window+state")
    lease = rig.acquire(seq(33), publish=False)
    for stop in (16, 32):
        assert rig.compute(lease, seq(33), stop) is OK
        rig.commit(lease, seq(33))
    assert not list(rig.cache.tree.nodes()) and not rig.engine.submitted
    rig.cache.release(lease)
    assert all_free(rig)


def test_namespaces_share_nothing() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(33), namespace="a")
    assert rig.hit(seq(32), "a") == (32, 32)
    assert rig.hit(seq(32), "b") == (0, 0) and rig.hit(seq(32)) == (0, 0)
    rig.evict_device()
    assert rig.run(seq(33), namespace="b").boundary == 0
    assert rig.run(seq(33), namespace="a").host_len == 32
    rig.check()


# ---- release -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["acquired", "allocated", "computed", "committed", "decoding"])
def test_every_exit_gives_everything_back(kind: str, when: str) -> None:
    rig = Rig(kind)
    rig.run(seq(17))
    before = free(rig)
    lease = rig.acquire(seq(40))
    if when != "acquired":
        assert rig.cache.allocate(lease, 30) is OK
    if when in ("computed", "committed", "decoding"):
        assert rig.compute(lease, seq(40), 30) is OK
    if when in ("committed", "decoding"):
        rig.commit(lease, seq(40))
    if when == "decoding":
        assert rig.compute(lease, seq(40), 33) is OK
    rig.cache.release(lease)
    rig.check()
    rig.settle()
    if when in ("acquired", "allocated", "computed"):
        assert free(rig) == before
    rig.cache.flush()
    assert all_free(rig)


def test_a_lease_is_released_exactly_once_and_not_used_after() -> None:
    rig, other = Rig("full+state"), Rig("full+state")
    lease = rig.acquire(seq(9))
    with pytest.raises(LeaseError):
        other.cache.release(lease)
    with pytest.raises(LeaseError):
        other.cache.allocate(lease, 4)
    rig.cache.release(lease)
    uses = (
        lambda: rig.cache.release(lease),
        lambda: rig.cache.allocate(lease, 8),
        lambda: rig.cache.advance(lease, 8),
        lambda: rig.cache.commit(lease, b""),
    )
    for use in uses:
        with pytest.raises(LeaseError):
            use()
    rig.check()


# ---- questions -----------------------------------------------------------------------------------


def test_stats_add_up() -> None:
    rig = Rig("full+window+state")
    rig.run(seq(33))
    lease = rig.acquire(seq(33))
    rig.compute(lease, seq(33), 33)
    stats = rig.cache.stats()
    for tier in ("device", "host"):
        for part in stats["tiers"][tier].values():
            parts = [part[name] for name in ("free", "evictable", "protected", "other")]
            assert sum(parts) == part["capacity"] and min(parts) >= 0
    assert stats["leases"] == 1 and stats["operations"] == 0 and stats["page_size"] == 4
    assert stats["counts"]["hit_tokens_device"] == 32
    backup = stats["copies"]["backup"]
    assert backup["bytes"] == sum(
        part["record_bytes"] * (part["capacity"] - part["free"])
        for part in stats["tiers"]["host"].values()
    )
    rig.cache.release(lease)


def test_hits_are_counted_by_tier() -> None:
    rig = Rig()
    rig.run(seq(33))
    rig.run(seq(33))
    rig.evict_device()
    rig.run(seq(33))
    counts = rig.cache.stats()["counts"]
    assert counts["hit_tokens_device"] == 32 and counts["hit_tokens_host"] == 32


def test_capacity_is_what_one_request_can_use() -> None:
    rig = Rig("full", device=[8], host=[])
    most = rig.cache.capacity_tokens()
    assert most == 32
    lease = rig.acquire(seq(40))
    assert rig.cache.allocate(lease, most + 1) is FULL
    assert rig.cache.allocate(lease, most) is OK
    rig.cache.release(lease)


def leak_a_slot(rig: Rig, lease: Lease) -> None:
    rig.stack.device_slots[0].allocate(1)


def give_one_slot_two_owners(rig: Rig, lease: Lease) -> None:
    lease.pages(0).replace(lease.pages(0).stop_page - 1, lease.pages(0).slots[-2:-1])


def forget_a_lock(rig: Rig, lease: Lease) -> None:
    rig.cache.tree.device.unlock_path(lease.node)


def lose_a_state(rig: Rig, lease: Lease) -> None:
    lease.states(index_of(rig, "state")).write = None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (leak_a_slot, "leaked"),
        (give_one_slot_two_owners, "INV-02"),
        (forget_a_lock, "INV-03"),
        (lose_a_state, "leaked"),
    ],
)
def test_check_names_what_is_wrong(damage: object, named: str) -> None:
    rig = Rig("full+window+state")
    rig.run(seq(17))
    lease = rig.acquire(seq(40))
    rig.cache.allocate(lease, 40)
    rig.check()
    damage(rig, lease)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=named):
        rig.check()


def test_an_empty_key_can_be_asked_for_and_computed() -> None:
    rig = Rig("full+window+state")
    lease = rig.acquire([])
    assert lease.boundary == 0
    rig.cache.release(lease)
    space = encode_namespace([("adapter", "x")])
    match = rig.cache.match(b"", space)
    assert match.boundary == match.full_len == 0
    rig.check()
