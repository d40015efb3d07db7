"""Retraction, failures, and every way a request can end: all is given back, nothing said twice."""

from __future__ import annotations

import pytest

from banyan.engine.request import Phase
from tests.support.toy_engine import HOST, KINDS, A, B, ToyEngine
from tests.support.toy_model import answer, letter_of

# ---- retraction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("cache", [True, False])
def test_retracted_requests_answer_as_if_they_had_run_alone(kind, seed, cache):
    sizes = [16, 20, 9][: len(KINDS[kind])]
    e = ToyEngine(kind, device=sizes, max_running=4, cache=cache)
    prompts = [[i, *A[:9]] for i in range(4)]
    for prompt in prompts:
        e.submit(prompt, 30, seed=seed)
    e.run()
    assert e.scheduler.counters.retractions > 0
    for i, prompt in enumerate(prompts):
        want = answer(prompt, 30, seed)
        assert e.tokens(f"r{i}") == want
        assert e.text(f"r{i}") == "".join(map(letter_of, want))
        assert e.last(f"r{i}").usage.completion_tokens == 30
    e.assert_idle()


def test_the_newest_of_the_lowest_priority_is_retracted():
    e = ToyEngine(device=[16])
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1)]:
        e.submit([ord(name), *A[:11]], 30, name=name, priority=priority)
    while not e.scheduler.counters.retractions:
        e.step()
    assert [r.request_id for r in e.roster.waiting.nearest()] == ["c"]
    while e.scheduler.counters.retractions < 2:
        e.step()
    assert [r.request_id for r in e.roster.waiting.nearest()] == ["a", "c"]
    e.run()


def test_what_a_retracted_request_computed_is_reused_if_it_is_still_there():
    e = ToyEngine(device=[12], chunk=64)
    e.submit(A[:12], 30, name="a")
    e.submit(B[:12], 30, name="b")
    while not e.scheduler.counters.retractions:
        e.step()
    assert e.scheduler.counters.prefill_tokens == 24
    e.roster.abort("a")
    e.run()
    assert e.tokens("b") == answer(B[:12], 30)
    assert e.scheduler.counters.prefill_tokens < 24 + 12


def test_the_receipt_of_a_retracted_request_is_that_of_its_first_token():
    e = ToyEngine(device=[14], chunk=64)
    e.ask(B[:8], 1)
    e.submit(A[:12], 30, name="a")
    e.submit(B[:12], 30, name="b")
    e.run()
    assert e.scheduler.counters.retractions > 0
    usage = e.last("b").usage
    assert (usage.prompt_tokens, usage.computed, usage.device) == (12, 4, 8)
    assert e.scheduler.counters.prompt_tokens == {"computed": 8 + 12 + 4, "device": 8, "host": 0}


def test_a_request_that_runs_alone_and_finds_no_slot_ends_with_an_error():
    e = ToyEngine(device=[4])
    e.submit(A[:12], 30)
    e.run()
    last = e.last("r0")
    assert (last.finish_reason, last.error_code) == ("error", "out_of_slots")
    assert e.tokens("r0") == answer(A[:12], 5)
    e.assert_idle()


def test_a_first_chunk_that_can_never_fit_ends_with_an_error_and_the_next_one_runs():
    e = ToyEngine(device=[4], chunk=64)
    e.submit(A[:30], 1, name="big")
    e.submit(B[:6], 2, name="small")
    e.run()
    assert e.last("big").error_code == "out_of_slots"
    assert e.tokens("small") == answer(B[:6], 2)
    e.assert_idle()


def test_a_request_sits_out_while_a_transfer_holds_the_slots_it_needs():
    e = ToyEngine(device=[8], host=[64], write_policy="write_back", auto_copy=False, chunk=64)
    e.ask(A[:24], 1)
    e.submit(B[:24], 2)
    for _ in range(3):
        e.step()
    assert e.tokens("r1") == [] and e.copies.pending
    assert len(e.cache.leases) == 1  # it keeps its place
    e.auto_copy = True
    e.run()
    assert e.tokens("r1") == answer(B[:24], 2)
    assert e.scheduler.counters.retractions == 0
    e.assert_idle()


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_back_that_fails_is_recomputed_and_nothing_is_said_twice(kind: str):
    e = ToyEngine(kind, host=HOST[kind], chunk=8)
    e.ask(A[:40])
    e.evict_device()
    e.auto_copy = False
    e.submit(A[:40], 6, seed=4)
    fail = e.copies.submit

    def failing(job):
        ticket = fail(job)
        e.copies.finish(job.op_id, ok=False)
        return ticket

    e.copies.submit = failing
    e.step()
    e.copies.submit = fail
    e.auto_copy = True
    e.run()
    assert e.tokens("r1") == answer(A[:40], 6, seed=4)
    assert e.scheduler.counters.load_failures == 1
    assert e.last("r1").usage.host == 0
    assert e.scheduler.counters.prompt_tokens["host"] == 0
    e.assert_idle()


def test_a_load_back_that_fails_before_its_turn_is_recomputed_too():
    e = ToyEngine(host=[96], chunk=8)
    e.ask(A[:40])
    e.evict_device()
    e.auto_copy = False
    e.submit(B[:40], 2, name="first")
    e.submit(A[:40], 2, name="second")
    e.step()
    e.copies.finish(e.load_backs()[0].op_id, ok=False)
    e.auto_copy = True
    e.run()
    assert e.tokens("second") == answer(A[:40], 2) and e.tokens("first") == answer(B[:40], 2)
    assert e.scheduler.counters.load_failures == 1
    e.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_raises_ends_its_request_and_no_other(kind: str):
    e = ToyEngine(kind)
    e.submit(A[:20], 8, name="good")
    e.step()

    def fault(seqs):
        if any(200 in seq.tokens for seq in seqs):
            raise ValueError("not this one")

    e.model.fault = fault
    e.submit([200, *B[:10]], 8, name="bad")
    e.run()
    assert e.last("bad").error_code == "model_failed"
    assert "not this one" in e.last("bad").error
    assert e.tokens("good") == answer(A[:20], 8)
    assert e.scheduler.counters.forward_failures == 1
    e.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_batch_that_raises_only_the_one_to_blame_ends(kind: str):
    e = ToyEngine(kind)
    prompts = {name: [ord(name), *A[:13]] for name in "xyz"}
    for name, prompt in prompts.items():
        e.submit(prompt, 12, name=name, seed=1)
    e.step()

    def fault(seqs):
        held = [r.lease.tables for r in e.roster.holders() if r.request_id == "y"]
        if any(s.tables in held and s.start >= 20 and len(s.tokens) == 1 for s in seqs):
            raise RuntimeError("row y")

    e.model.fault = fault
    e.run()
    assert e.last("y").finish_reason == "error"
    assert e.tokens("y") == answer(prompts["y"], 12, seed=1)[: len(e.tokens("y"))]
    for name in "xz":
        assert e.tokens(name) == answer(prompts[name], 12, seed=1)
    assert e.scheduler.counters.forward_failures == 2
    e.assert_idle()


def test_sampling_that_raises_ends_its_request():
    e = ToyEngine()

    def fault(logits):
        raise RuntimeError("no distribution")

    e.model.sample_fault = fault
    e.submit(A[:9], 3)
    e.run()
    assert e.last("r0").finish_reason == "error"
    e.assert_idle()


# ---- every way out -------------------------------------------------------------------------------


def stop_token(e: ToyEngine, prompt: list[int], at: int) -> None:
    """Make the answer's token number `at` an end-of-text token."""
    object.__setattr__(e.scheduler.options, "eos_ids", frozenset({answer(prompt, at + 1)[at]}))


EXITS = [
    "length",
    "eos",
    "stop string",
    "abort while waiting",
    "abort in prefill",
    "abort before its first chunk",
    "abort in decode",
    "timeout while waiting",
    "timeout in prefill",
    "timeout in decode",
    "model failed",
    "out of slots",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", EXITS)
def test_every_way_out_gives_back_everything(kind: str, way: str):
    """INV-12: no lease, no lock, no request-owned slot, one last output."""
    e = ToyEngine(kind, chunk=8, max_running=1 if "waiting" in way else 8)
    prompt, name = A[:30], "it"
    if "waiting" in way:
        e.submit(B[:40], 30, name="other")
    stop: dict = {}
    if way == "eos":
        stop_token(e, prompt, 3)
    if way == "stop string":
        stop = {"stop": (letter_of(answer(prompt, 4)[3]),)}
    e.submit(prompt, 8, name=name, timeout_s=50.0 if "timeout" in way else None, **stop)
    phase = Phase.PREFILL if "prefill" in way else Phase.DECODE
    if "waiting" in way:
        for _ in range(3):
            e.step()
    elif "before" in way:
        e.submit(B[:30], 8, name="second")
        e.step()
        name = "second"
        assert e.roster.prefilling[1].length == 0
    elif "in prefill" in way or "in decode" in way:
        while not any(r.phase is phase and r.length > 8 for r in e.roster.holders()):
            e.step()
    if "abort" in way:
        e.roster.abort(name)
        e.cache.check()
    if "timeout" in way:
        e.now = 60.0
    if way == "model failed":
        e.step()
        e.model.fault = lambda seqs: 1 / 0
    if way == "out of slots":
        e.step()
        e.cache.allocate = lambda lease, stop: type(e.cache).allocate(e.cache, lease, 10_000)
    e.run()
    reason = {"eos": "stop", "model failed": "error", "out of slots": "error"}.get(
        way, way.split()[0]
    )
    last = e.last(name)
    assert last.finish_reason == reason
    assert e.scheduler.counters.finished[reason] == 1
    usage = last.usage
    assert usage.computed + usage.device + usage.host == usage.prompt_tokens == 30
    assert name not in e.roster and not e.roster.busy
    e.assert_idle()


def test_an_end_token_is_counted_but_is_no_text():
    e = ToyEngine()
    want = answer(A[:20], 4)
    stop_token(e, A[:20], 3)
    last = e.ask(A[:20], 8)
    assert last.finish_reason == "stop" and last.usage.completion_tokens == 4
    assert e.tokens("r0") == want
    assert e.text("r0") == "".join(map(letter_of, want[:3]))
    e.ask(A[:20], 8, ignore_eos=True)
    assert e.tokens("r1") == answer(A[:20], 8)


def test_a_stop_string_is_not_returned():
    e = ToyEngine()
    letters = [letter_of(t) for t in answer(A[:20], 12)]
    stop = letters[4]
    last = e.ask(A[:20], 12, stop=(stop,))
    assert last.finish_reason == "stop"
    assert e.text("r0") == "".join(letters[: letters.index(stop)])


def test_what_an_aborted_request_computed_is_kept():
    e = ToyEngine("full+state", chunk=8)
    e.submit(A[:30], 9)
    e.step()
    e.step()
    e.roster.abort("r0")
    assert e.ask(A[:30]).usage.device == 16


def test_an_unknown_abort_is_ignored_and_a_name_may_be_used_again():
    e = ToyEngine()
    e.roster.abort("nobody")
    e.ask(A[:9], name="x")
    e.roster.abort("x")
    e.outputs.clear()
    assert e.ask(A[:9], name="x").finish_reason == "length"


def test_a_flush_in_the_middle_changes_no_answer():
    e = ToyEngine("full+window+state", host=[96, 64, 20], chunk=8)
    prompts = [A[:30], A[:26] + B[:9], B[:12]]
    for prompt in prompts:
        e.submit(prompt, 10)
    for turn in range(40):
        e.step()
        if turn in (1, 4, 9):
            e.cache.flush()
            e.cache.check()
    e.run()
    assert [e.tokens(f"r{i}") for i in range(3)] == [answer(p, 10) for p in prompts]
    e.assert_idle()


def test_receipts_count_as_computed_just_what_the_model_ran_even_after_retraction():
    """INV-21: a request retracted in its prefill is charged for what it ran, not for what it had
    reckoned with when it was first admitted."""
    e = ToyEngine(device=[20], chunk=4)
    for i, prompt in enumerate((A[:24], A[:20] + B[:8], B[:24], A[:24])):
        e.submit(prompt, 12, name=f"r{i}")
    e.run()
    assert e.scheduler.counters.retractions > 0
    first = e.scheduler.counters.prompt_tokens["computed"]
    usages = [e.last(f"r{i}").usage for i in range(4)]
    assert sum(u.computed for u in usages) == first <= e.scheduler.counters.prefill_tokens
    assert all(u.computed + u.device + u.host == u.prompt_tokens for u in usages)
