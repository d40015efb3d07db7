"""`EngineCore`: what it accepts, what it answers, and a whole engine on the built-in models."""

from __future__ import annotations

import msgspec
import pytest

from banyan.engine.build import build_core
from banyan.engine.core import EngineCore, Limits
from banyan.engine.messages import GenerateRequest, Output, Sampling
from banyan.engine.models import LoadedModel, load_model
from banyan.errors import ConfigError, InvariantError, RequestError
from banyan.options import ServeOptions
from tests.support.toy_engine import A, B, ToyEngine
from tests.support.toy_model import VOCAB, answer

LIMITS = Limits(vocab_size=VOCAB, model_tokens=100, pool_tokens=64, open_requests=3)


def toy_core(limits: Limits = LIMITS, **kwargs) -> tuple[EngineCore, ToyEngine]:
    e = ToyEngine("full+state", device=[16, 6], chunk=16, **kwargs)
    return EngineCore(e.scheduler, e.cache, limits, {"model": "toy"}), e


def request(prompt: list[int], name: str = "x", **kwargs) -> GenerateRequest:
    more = {k: kwargs.pop(k) for k in ("timeout_s", "use_cache") if k in kwargs}
    return GenerateRequest(request_id=name, prompt=prompt, sampling=Sampling(**kwargs), **more)


def drain(core: EngineCore) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "param", "code"),
    [
        (request([]), "prompt", "empty_prompt"),
        (request([1, VOCAB]), "prompt", "invalid_token"),
        (request([1, -1]), "prompt", "invalid_token"),
        (request(A[:60], max_tokens=5), "max_tokens", "context_length_exceeded"),
        (request(A[:70], max_tokens=5), "prompt", "context_length_exceeded"),
        (request(A[:5], max_tokens=200), "max_tokens", "context_length_exceeded"),
        (request([1], max_tokens=0), "max_tokens", "invalid_request"),
        (request([1], temperature=-1.0), "temperature", "invalid_request"),
        (request([1], temperature=float("nan")), "temperature", "invalid_request"),
        (request([1], top_p=0.0), "top_p", "invalid_request"),
        (request([1], top_p=1.1), "top_p", "invalid_request"),
        (request([1], top_k=-1), "top_k", "invalid_request"),
        (request([1], seed=2**63), "seed", "invalid_request"),
        (request([1], logprobs=21), "logprobs", "invalid_request"),
        (request([1], timeout_s=0.0), "timeout_s", "invalid_request"),
    ],
)
def test_what_can_never_be_served_is_refused_with_field_and_code(bad, param, code):
    core, e = toy_core()
    with pytest.raises(RequestError) as caught:
        core.submit(bad)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not core.has_work and not len(e.roster)
    assert core.stats()["engine"]["refused"] == {code: 1}
    core.submit(request(A[:9], "x", max_tokens=2))
    assert drain(core)["x"][-1].finish_reason == "length"


def test_the_longest_request_that_is_accepted_is_served():
    core, _ = toy_core()
    core.submit(request(A[:50], max_tokens=14))
    outputs = drain(core)["x"]
    assert [t for o in outputs for t in o.tokens] == answer(A[:50], 14)


def test_a_refusal_says_how_much_would_be_accepted():
    core, _ = toy_core()
    with pytest.raises(RequestError, match=r"60 prompt tokens .* 64; ask for at most 4"):
        core.submit(request(A[:60], max_tokens=5))
    with pytest.raises(RequestError, match="shorten the prompt to at most 59"):
        core.submit(request(A[:70], max_tokens=5))


def test_an_open_name_and_a_full_queue_are_refused():
    core, _ = toy_core()
    for name in "abc":
        core.submit(request(A[:9], name))
    with pytest.raises(RequestError) as caught:
        core.submit(request(A[:9], "a"))
    assert caught.value.code == "duplicate_id"
    with pytest.raises(RequestError) as caught:
        core.submit(request(A[:9], "d"))
    assert caught.value.code == "queue_full"
    assert set(drain(core)) == {"a", "b", "c"}
    core.submit(request(A[:9], "d"))


# ---- what it answers -----------------------------------------------------------------------------


def test_an_abort_is_said_with_the_next_step():
    core, e = toy_core()
    core.abort("nobody")
    assert not core.has_work
    core.submit(request(A[:40], max_tokens=9))
    core.step()
    core.abort("x")
    assert core.has_work
    (output,) = core.step()
    assert output.finish_reason == "abort" and output.usage.prompt_tokens == 40
    assert not core.has_work
    e.assert_idle()


def test_info_stats_flush_and_check_are_plain_data():
    core, e = toy_core(host=[32, 12])
    core.submit(request(A[:20], max_tokens=2))
    core.step()
    assert core.check() == {"ok": True, "leases": 1}
    stats = core.stats()
    assert (stats["engine"]["running"], stats["engine"]["waiting"]) == (1, 0)
    drain(core)
    e.settle()
    flushed = core.flush()
    for answer_of in (core.info, stats, flushed, core.check()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer_of))
    assert core.info == {"model": "toy", "max_model_len": 64, "vocab_size": VOCAB}
    assert flushed["freed_slots"]["device"]["full"] == 5
    assert flushed["freed_slots"]["host"]["full"] == 5
    assert e.hit(A[:20]) == 0


def test_check_finds_a_lease_that_no_request_holds():
    core, e = toy_core()
    e.cache.acquire(e.cache.match(b""))
    with pytest.raises(InvariantError, match="1 lease"):
        core.check()


def test_close_ends_everything():
    core, e = toy_core()
    for name, prompt in (("a", A[:40]), ("b", B[:40])):
        core.submit(request(prompt, name, max_tokens=9))
    core.step()
    core.close()
    assert not e.cache.leases and e.copies.closed


# ---- a whole engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny-full", "tiny-swa", "tiny-linear"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(request.param)


def options(model: str, **kwargs) -> ServeOptions:
    chosen = {"device_bytes": 6 << 20, "host_bytes": 32 << 20, "chunk": 32, "max_running": 4}
    made = ServeOptions(model=model, **(chosen | kwargs))
    made.validate()
    return made


def run(core: EngineCore, prompts: list[list[int]], **sampling) -> list[tuple[list[int], Output]]:
    for i, prompt in enumerate(prompts):
        core.submit(request(prompt, str(i), max_tokens=6, ignore_eos=True, **sampling))
    outputs = drain(core)
    return [
        ([t for o in outputs[str(i)] for t in o.tokens], outputs[str(i)][-1])
        for i in range(len(prompts))
    ]


def test_a_built_engine_answers_alike_from_nowhere_device_and_host(loaded: LoadedModel):
    """INV-27, briefly; the parity tests do it at length."""
    core = build_core(options(loaded.name, verify="all"), loaded)
    bare = build_core(options(loaded.name, cache=False, host_bytes=None), loaded)
    stem = [(7 * i) % 250 for i in range(70)]
    prompts = [[*stem, i, 9, 4 * i] for i in range(3)]
    want = [tokens for tokens, _ in run(bare, prompts)]
    cold, device = run(core, prompts), run(core, prompts)
    core._cache.poll()
    evict_device(core)
    host = run(core, prompts)
    for found in (cold, device, host):
        assert [tokens for tokens, _ in found] == want
    assert [last.usage.device for _, last in cold] == [0, 64, 64]
    assert all(last.usage.device == 64 for _, last in device)
    assert host[0][1].usage.host == 64
    copies = core.stats()["cache"]["copies"]["load_back"]
    assert copies["verified"] > 0 and copies["mismatched"] == 0
    assert core.check() == {"ok": True, "leases": 0}
    core.close()
    bare.close()


def evict_device(core: EngineCore) -> None:
    """Drop from the device all that is on host."""
    from banyan.tree import Tier

    cache = core._cache
    while cache.controller.operations:
        cache.poll()
    counts = [
        pool.free_count + cache.tree.device.evictable[c]
        for c, pool in enumerate(cache.stack.device_slots)
    ]
    got = cache.controller.reserve(Tier.DEVICE, counts)
    assert isinstance(got, list)
    cache.controller.free(Tier.DEVICE, got)


def test_a_seeded_answer_is_the_same_alone_and_in_company(loaded: LoadedModel):
    core = build_core(options(loaded.name), loaded)
    prompts = [[i, 2, 3, 40, 5] for i in range(4)]
    together = [tokens for tokens, _ in run(core, prompts, seed=11, temperature=0.8)]
    alone = [run(core, [prompt], seed=11, temperature=0.8)[0][0] for prompt in prompts]
    assert together == alone
    core.close()


def test_info_of_a_built_engine_can_be_sent(loaded: LoadedModel):
    core = build_core(options(loaded.name), loaded)
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(core.info))
    assert info["model"] == loaded.name and info["page_size"] == 16 and info["chunk"] == 32
    assert {row["tier"] for row in info["size_rows"]} == {"device", "host"}
    assert info["max_model_len"] <= loaded.max_length
    assert msgspec.msgpack.encode(core.stats())
    core.close()


def test_a_budget_too_small_is_refused_at_start(loaded: LoadedModel):
    with pytest.raises(ConfigError, match="--device-bytes"):
        build_core(options(loaded.name, device_bytes=8192), loaded)
