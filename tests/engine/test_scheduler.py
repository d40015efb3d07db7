"""The scheduler on a real cache with the toy model: answers, chunks, figures.

The toy model's answers depend on every byte it should read, and all invariants are checked after
every step, so each test also tests that nothing leaks and nothing is read from a wrong slot.
"""

from __future__ import annotations

import random

import pytest

from banyan.cache import PrefixCache
from banyan.engine.counters import SOURCES
from tests.support.toy_engine import HOST, KINDS, A, B, ToyEngine
from tests.support.toy_model import answer, letter_of

# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_cold_from_device_and_from_host(kind: str):
    e = ToyEngine(kind, host=HOST[kind])
    prompt = A[:39]
    cold = e.ask(prompt, 6)
    device = e.ask(prompt, 6)
    e.evict_device()
    host = e.ask(prompt, 6)
    assert [e.tokens(n) for n in ("r0", "r1", "r2")] == [answer(prompt, 6)] * 3
    sources = [(o.usage.computed, o.usage.device, o.usage.host) for o in (cold, device, host)]
    assert sources == [(39, 0, 0), (3, 36, 0), (3, 0, 36)]
    e.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_resumes_at_the_last_page_crossed_while_decoding(kind: str):
    e = ToyEngine(kind)
    prompt = A[:22]
    e.ask(prompt, 13)
    history = prompt + e.tokens("r0")
    out = e.ask([*history, 7, 8, 9], 5)
    assert out.usage.device == 32  # 34 tokens were computed: the answer's last one never was
    assert e.tokens("r1") == answer([*history, 7, 8, 9], 5)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_run_together_and_decode_in_one_forward(kind: str):
    e = ToyEngine(kind)
    prompts = [A[:19], B[:30], A[40:47]]
    for prompt in prompts:
        e.submit(prompt, 8)
    e.run()
    assert [e.tokens(f"r{i}") for i in range(3)] == [answer(p, 8) for p in prompts]
    assert max(len(f) for f in e.model.forwards) == 3
    e.assert_idle()


def test_news_comes_once_per_token_and_the_last_carries_usage():
    e = ToyEngine()
    e.submit(A[:10], 3, logprobs=0)
    e.run()
    outputs = e.outputs["r0"]
    assert [len(o.tokens) for o in outputs] == [1, 1, 1]
    assert [len(o.logprobs) for o in outputs] == [1, 1, 1]
    assert [o.finish_reason for o in outputs] == [None, None, "length"]
    assert [o.usage is None for o in outputs] == [True, True, False]
    assert e.text("r0") == "".join(map(letter_of, answer(A[:10], 3)))


def test_a_namespace_of_its_own_shares_nothing():
    e = ToyEngine()
    e.ask(A[:20])
    assert e.ask(A[:20], namespace=(("salt", "x"),)).usage.device == 0
    assert e.ask(A[:20], namespace=(("salt", "x"),)).usage.device == 16


def test_equal_submissions_give_equal_steps():
    def run() -> list[list[tuple[int, int]]]:
        e = ToyEngine("full+window+state", device=[20, 16, 6], order="longest_prefix")
        rng = random.Random(5)
        for _ in range(12):
            e.submit(A[: rng.randrange(5, 30)], rng.randrange(1, 9), seed=rng.randrange(9))
            e.step()
        e.run()
        return e.model.forwards

    assert run() == run()


# ---- prefill -------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_while_others_decode():
    e = ToyEngine(chunk=8)
    e.submit(B[:6], 12)
    e.step()
    e.submit(A[:40], 2)
    for _ in range(3):
        e.step()
        lengths = [stop - start for forward in e.model.forwards[-2:] for start, stop in forward]
        assert lengths == [8, 1]
    e.run()
    assert e.tokens("r1") == answer(A[:40], 2)


def test_a_step_computes_at_most_a_chunk_of_prompts_and_never_cuts_a_chunk_short():
    e = ToyEngine(chunk=16)
    for i in range(6):
        e.submit([i, *A[:6]], 1)
    e.submit(A[:50], 1)
    seen = 0
    while e.roster.busy:
        e.step()
        forwards, seen = e.model.forwards[seen:], len(e.model.forwards)
        assert sum(stop - start for f in forwards for start, stop in f) <= 16
    chunks = [f[0] for f in e.model.forwards if f[0][1] > 7]
    assert chunks == [(0, 16), (16, 32), (32, 48), (48, 50)]


@pytest.mark.parametrize("beside", [False, True])
def test_c083_states_are_kept_at_each_requests_own_positions(beside: bool):
    """C083: a batch of 19 and 45 tokens with K=16 keeps states at 16, 16 and 32, as alone."""
    e = ToyEngine("full+state", chunk=64, state_interval=16)
    e.submit(A[:19], 1)
    if not beside:
        e.run()
    e.submit(B[:45], 1)
    e.run()
    found = [[n for n in range(4, 46, 4) if e.hit(p[:n]) == n] for p in (A[:19], B[:45])]
    assert found == [[16], [16, 32, 44]]
    assert e.ask(B[:33], 3).usage.device == 32
    assert e.tokens("r2") == answer(B[:33], 3)


def test_c094_the_same_checkpoints_are_stored_with_chunking_on_and_off():
    """C094: prompts of 8, 24 and 40 tokens, K=16."""

    def stored(chunk: int) -> list[list[int]]:
        e = ToyEngine("full+state", device=[48, 16], chunk=chunk, state_interval=16)
        prompts = [A[:8], B[:24], A[40:80]]
        for prompt in prompts:
            e.ask(prompt, 1)
        return [[n for n in range(4, 41, 4) if e.hit(p[:n]) == n] for p in prompts]

    assert (
        stored(16)
        == stored(4096)
        == [
            [4, 8],
            [16, 20, 24],
            [16, 32, 36, 40],
        ]
    )


def test_c062_a_request_that_uses_no_cache_is_computed_in_chunks_and_leaves_nothing():
    """C062: C=16, prompt 48, caching off: three chunks and 12 pages, and it ends."""
    e = ToyEngine(chunk=16, device=[14])
    e.submit(A[:48], 4, use_cache=False)
    e.step()
    e.step()
    e.step()
    assert e.model.forwards == [[(0, 16)], [(16, 32)], [(32, 48)]]
    assert e.cache.stats()["tiers"]["device"]["full"]["free"] == 2
    e.run()
    assert e.tokens("r0") == answer(A[:48], 4)
    assert e.cache.stats()["tiers"]["device"]["full"]["free"] == 14
    assert e.hit(A[:48]) == 0


def test_a_request_that_uses_no_cache_computes_what_others_have_cached():
    e = ToyEngine("full+state")
    e.ask(A[:30])
    out = e.ask(A[:30], use_cache=False)
    assert (out.usage.computed, out.usage.device) == (30, 0)
    assert e.tokens("r1") == answer(A[:30], 4)


def test_an_engine_without_cache_publishes_nothing():
    e = ToyEngine("full+window+state", cache=False)
    assert e.ask(A[:30]).usage.computed == e.ask(A[:30]).usage.computed == 30
    e.assert_idle()


def test_the_branch_point_gets_a_checkpoint_so_the_third_request_resumes_there():
    """C079: requests that share 40 tokens; the second leaves the checkpoint that the third uses."""
    e = ToyEngine("full+state", chunk=64)
    cached = [e.ask(A[:40] + B[10 * i : 10 * i + 10], 1).usage.device for i in range(3)]
    assert cached == [0, 0, 40]


# ---- figures -------------------------------------------------------------------------------------


def test_c131_totals_not_ratios_are_exported():
    """C131: two batches of equal size, all hit and then none: half of all tokens were cached."""
    e = ToyEngine(page_size=1)
    e.ask(A[:20], 1)
    before = dict(e.scheduler.counters.prompt_tokens)
    e.ask(A[:20], 1)
    e.ask(B[:20], 1)
    total = {s: e.scheduler.counters.prompt_tokens[s] - before[s] for s in SOURCES}
    assert total == {"computed": 1 + 20, "device": 19, "host": 0}


def test_c133_every_counter_equals_what_happened():
    """C133: a known script on both tiers."""
    e = ToyEngine(host=[96], chunk=16)
    e.ask(A[:30], 4)  # computed 30
    e.ask(A[:30], 4)  # device 28, computed 2
    e.evict_device()
    e.ask(A[:30], 4)  # host 28, computed 2
    e.submit(B[:30], 4)
    e.submit(B[:30], 4)  # waits; device 28, computed 2
    e.run()
    e.submit(B[:5], 4)
    e.roster.abort("r5")
    steps = e.scheduler.counters.steps
    e.step()
    counters = e.scheduler.counters.as_dict()
    assert counters == {
        "steps": steps + 1,
        "finished": {"stop": 0, "length": 5, "abort": 1, "timeout": 0, "error": 0},
        "refused": {},
        "prompt_tokens": {"computed": 30 + 2 + 2 + 30 + 2, "device": 28 + 28, "host": 28},
        "prefill_tokens": 66,
        "generated_tokens": 20,
        "retractions": 0,
        "load_failures": 0,
        "forward_failures": 0,
        "sharing_waits": 1,
        "stalled": 0,
    }
    usages = [e.last(f"r{i}").usage for i in range(5)]
    for source in SOURCES:
        assert sum(getattr(u, source) for u in usages) == counters["prompt_tokens"][source]


def test_counters_never_fall():
    e = ToyEngine("full+state", device=[14, 6], host=[20, 8], chunk=8)
    rng = random.Random(1)
    before = e.scheduler.counters.as_dict()

    def flat(counters: dict) -> dict:
        return {
            (k, j): n
            for k, v in counters.items()
            for j, n in (v.items() if isinstance(v, dict) else [("", v)])
        }

    for i in range(60):
        if i % 3 == 0:
            e.submit(A[: rng.randrange(1, 30)], rng.randrange(1, 12))
        e.step()
        now = e.scheduler.counters.as_dict()
        assert all(n <= flat(now)[key] for key, n in flat(before).items())
        before = now


def test_the_speed_of_prefill_is_measured_without_load_backs(monkeypatch: pytest.MonkeyPatch):
    noted: list[int] = []
    monkeypatch.setattr(
        PrefixCache, "note_prefill", lambda self, tokens, seconds: noted.append(tokens)
    )
    e = ToyEngine(device=[64], host=[96], chunk=64)
    e.ask(A[:80], 1)
    assert noted == [64]  # the second chunk is too short to say anything
    e.evict_device()
    e.ask(A[:80], 1)
    assert noted == [64]
