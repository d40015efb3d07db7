"""Who starts when: sharing a prefill, waiting for a load-back, order, fairness, budgets."""

from __future__ import annotations

import pytest

from banyan.tree import encode_tokens
from tests.support.toy_engine import KINDS, A, B, ToyEngine
from tests.support.toy_model import answer

# ---- who waits for whom --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_of_two_requests_with_one_prefix_waits_for_the_first(kind: str):
    e = ToyEngine(kind, chunk=16)
    first, second = A[:40] + B[:6], A[:40] + B[50:56]
    e.submit(first, 3)
    e.submit(second, 3)
    e.run()
    assert e.tokens("r0") == answer(first, 3) and e.tokens("r1") == answer(second, 3)
    assert e.last("r1").usage.device == 40
    assert e.scheduler.counters.prefill_tokens == 46 + 6
    assert e.scheduler.counters.sharing_waits == 1


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_come_together_share_even_one_long_chunk(kind: str):
    """The first one's only chunk would run past the point where the others part from it."""
    e = ToyEngine(kind, chunk=64)
    prompts = [A[:40] + B[9 * i : 9 * i + 6] for i in range(3)]
    for prompt in prompts:
        e.submit(prompt, 3)
    e.run()
    assert [e.tokens(f"r{i}") for i in range(3)] == [answer(p, 3) for p in prompts]
    assert [e.last(f"r{i}").usage.device for i in range(3)] == [0, 40, 40]


def test_a_request_that_comes_later_asks_the_one_in_prefill_for_a_checkpoint():
    e = ToyEngine("full+state", chunk=8)
    e.submit(A[:60], 3)
    e.step()
    e.submit(A[:30] + B[:6], 3)
    e.run()
    assert e.last("r1").usage.device == 28
    assert e.scheduler.counters.prefill_tokens == 60 + 8


def test_it_does_not_wait_when_no_checkpoint_can_come_any_more():
    e = ToyEngine("full+state", chunk=64)
    e.submit(A[:60], 3)
    e.submit(B[:60], 3)
    e.step()  # r0 is computed; r1 has its first chunk planned, which runs to 56
    assert e.roster.prefilling
    e.submit(B[:30] + A[:6], 3)
    e.step()
    assert e.scheduler.counters.sharing_waits == 0
    e.run()
    assert e.tokens("r2") == answer(B[:30] + A[:6], 3)


def test_waiting_ends_with_the_prefill_it_waits_for():
    e = ToyEngine(chunk=8)
    e.submit(A[:40], 3, name="leader")
    e.step()
    e.submit(A[:40], 3, name="follower")
    e.step()
    assert [r.request_id for r in e.roster.waiting.nearest()] == ["follower"]
    e.roster.abort("leader")
    e.run()
    assert e.last("follower").usage.device == 16
    assert e.tokens("follower") == answer(A[:40], 3)


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": (("salt", "x"),)},
        {"use_cache": False},
    ],
)
def test_nobody_waits_for_a_prefix_that_it_could_not_use(other: dict):
    e = ToyEngine(chunk=8)
    e.submit(A[:40], 3)
    e.step()
    e.submit(A[:40], 3, **other)
    e.step()
    assert e.roster.running == 2
    e.run()


def test_others_pass_a_request_that_waits_for_a_prefill():
    e = ToyEngine(chunk=8)
    e.submit(A[:60], 3, name="leader")
    e.step()
    e.submit(A[:60], 3, name="follower")
    e.submit(B[:6], 3, name="other")
    e.step()
    assert e.roster.running == 2
    assert [r.request_id for r in e.roster.waiting.nearest()] == ["follower"]
    e.run()


def test_a_load_back_of_the_same_prefix_is_waited_for_but_not_for_ever():
    e = ToyEngine(host=[96], chunk=8)
    e.ask(A[:40])
    e.evict_device()
    e.auto_copy = False
    load = e.cache.acquire(e.cache.match(encode_tokens(A[:41])))
    e.submit(A[:40], 2)
    e.step()
    assert not e.roster.running and len(e.load_backs()) == 1
    e.now = 10.0
    e.step()
    assert e.roster.running == 1 and len(e.load_backs()) == 1
    e.run()
    assert e.last("r1").usage.host == 0
    assert e.tokens("r1") == answer(A[:40], 2)
    e.cache.release(load)
    e.auto_copy = True
    e.assert_idle()


def test_a_load_back_of_the_same_prefix_is_used_when_it_is_there():
    e = ToyEngine(host=[96], chunk=8)
    e.ask(A[:40])
    e.evict_device()
    e.auto_copy = False
    load = e.cache.acquire(e.cache.match(encode_tokens(A[:41])))
    e.submit(A[:40], 2)
    e.step()
    e.cache.release(load)
    e.auto_copy = True
    e.run()
    assert e.last("r1").usage.computed == 4
    assert e.tokens("r1") == answer(A[:40], 2)


# ---- order and budgets ---------------------------------------------------------------------------


def started(e: ToyEngine) -> list[str]:
    """Names in the order of their first token."""
    return list(e.outputs)


def test_fcfs_starts_requests_in_order_of_arrival():
    e = ToyEngine(max_running=1)
    e.ask(A[:40], name="warm")
    for name, prompt in [("x", B[:20]), ("y", A[:40]), ("z", B[40:50])]:
        e.submit(prompt, name=name)
    e.run()
    assert started(e) == ["warm", "x", "y", "z"]


def test_longest_prefix_starts_the_one_with_most_cached():
    e = ToyEngine(max_running=1, order="longest_prefix")
    e.ask(A[:40], name="warm")
    for name, prompt in [("none", B[:20]), ("some", A[:13]), ("most", A[:40]), ("few", A[:9])]:
        e.submit(prompt, name=name)
    e.run()
    assert started(e) == ["warm", "most", "some", "few", "none"]


def test_a_request_passed_over_too_often_goes_first():
    e = ToyEngine(max_running=1, order="longest_prefix", patience=3)
    e.ask(A[:40], name="warm")
    e.submit(B[:20], 1, name="none")
    for i in range(6):
        e.submit(A[:40], 1, name=f"hit{i}")
    e.run()
    assert started(e).index("none") == 4


def test_no_more_than_max_running_hold_a_lease():
    e = ToyEngine(max_running=2)
    for i in range(5):
        e.submit([i, *A[:6]], 5)
    most = 0
    while e.roster.busy:
        e.step()
        most = max(most, e.roster.running)
        assert len(e.cache.leases) == e.roster.running
    assert most == 2


def test_requests_are_admitted_at_most_one_chunk_ahead():
    e = ToyEngine(chunk=8)
    for i in range(4):
        e.submit([i, *A[:30]], 5)
    e.step()
    assert len(e.roster.prefilling) == 2 and len(e.roster.waiting) == 2
    e.run()


def test_a_step_asks_for_few_matches_however_long_the_queue():
    e = ToyEngine(max_running=1, order="longest_prefix", lookahead=8)
    calls = 0
    match = e.cache.match

    def counting(*args):
        nonlocal calls
        calls += 1
        return match(*args)

    e.cache.match = counting
    for i in range(500):
        e.submit([i % 250, i // 250, *A[:6]], 2)
    e.step()
    assert calls <= 10
    calls = 0
    e.step()
    assert calls <= 10
    e.roster.abort_all()
    e.step()


def attempts(e: ToyEngine) -> list[object]:
    """A list that grows by one with every lease asked for from now on."""
    tried: list[object] = []
    acquire = e.cache.acquire_if_ready

    def counting(match, **kwargs):
        tried.append(match)
        return acquire(match, **kwargs)

    e.cache.acquire_if_ready = counting
    return tried


@pytest.mark.parametrize("kind", ["full", "full+state"])
def test_c023_a_failed_admission_gives_back_everything(kind: str):
    """C023: admission that fails on full tokens holds nothing afterwards: ten times, then an
    abort. The engine beside it never sees the second request."""
    sizes = [12, 6][: len(KINDS[kind])]
    e, other = ToyEngine(kind, device=sizes, chunk=64), ToyEngine(kind, device=sizes, chunk=64)
    for each in (e, other):
        each.submit(A[:34], 12, name="big")
        each.step()
    e.submit(B[:30], 2, name="late")
    tried = attempts(e)
    for _ in range(10):
        e.scheduler._dry_since = None  # try again although nothing came free
        e.step()
        other.step()
        assert len(e.cache.leases) == 1
        assert e.cache.stats()["tiers"] == other.cache.stats()["tiers"]
    assert len(tried) == 10 and e.scheduler.counters.retractions == 0
    e.roster.abort("late")
    assert e.cache.stats()["tiers"] == other.cache.stats()["tiers"]
    e.run()
    assert e.tokens("big") == answer(A[:34], 12)
    e.assert_idle()


def test_admission_is_not_tried_again_before_slots_can_have_come_free():
    e = ToyEngine(device=[12], chunk=64)
    e.submit(A[:34], 9)
    e.step()
    e.submit(B[:30], 2)
    tried = attempts(e)
    for _ in range(6):
        e.step()
    assert len(tried) == 1
    e.run()
    assert e.tokens("r1") == answer(B[:30], 2)


def test_c061_a_checkpoint_without_a_slot_is_skipped_and_counted():
    """C061: every state slot is held by a running request when one reaches a checkpoint."""
    e = ToyEngine("full+state", device=[48, 3], chunk=8)
    prompts = [A[:3], B[:3]]
    for prompt in prompts:
        e.submit(prompt, 12)
    e.run()
    assert [e.tokens(f"r{i}") for i in range(2)] == [answer(p, 12) for p in prompts]
    assert e.cache.stats()["counts"]["checkpoints_skipped"] > 0
    e.assert_idle()


def test_what_runs_finds_its_slots_before_anything_is_admitted():
    e = ToyEngine(device=[5], chunk=64)
    e.submit(B[:16], 4, name="runs")
    e.step()
    e.submit([7, 7, 7], 1, name="later")  # the one free page would do for it
    e.run()
    assert e.scheduler.counters.retractions == 0
    assert e.tokens("runs") == answer(B[:16], 4) and e.tokens("later") == answer([7, 7, 7], 1)


def test_nothing_is_admitted_while_a_running_request_waits_for_slots():
    e = ToyEngine(device=[8], host=[64], write_policy="write_back", auto_copy=False, chunk=64)
    e.ask(A[:24], 1)
    e.submit(B[:24], 2, name="first")
    e.step()
    e.submit([7, 7, 7], 9, name="later")  # there is a free page, but not enough for both
    for _ in range(3):
        e.step()
    assert [r.request_id for r in e.roster.holders()] == ["first"]
    e.auto_copy = True
    e.run()
    assert e.tokens("first") == answer(B[:24], 2) and e.tokens("later") == answer([7, 7, 7], 9)
