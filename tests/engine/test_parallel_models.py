"""A model divided between ranks answers as the whole one, and says what its ranks keep alike."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from banyan.engine.build import build_core
from banyan.engine.exchange import sum_of_ranks
from banyan.engine.models import LoadedModel, load_model
from banyan.engine.parallel import mark_replicated, replicated_buffers
from banyan.engine.presets import PRESETS, build_preset, build_tokenizer, randomize
from banyan.engine.runner import Runner
from banyan.engine.selftest import batches_alike, check_continuation
from banyan.engine.sharding import WHOLE_BELOW, check_ranks, shard
from banyan.errors import ConfigError, SpecError
from banyan.observe import observe_model
from banyan.options import ServeOptions
from banyan.spec import CacheSpec
from tests.engine.model_rig import Sequencer, make_stack, prompt_of
from tests.support.families import FAMILIES, config_of, model_of
from tests.support.ranks import RankPool, RanksError, gather

PAGE = 16
SLOTS = 64
PROMPT = prompt_of(70)
NEW = 4
CHUNKS = (70, 13)
CPU = torch.device("cpu")
MIB = 1 << 20
NO_PLAN = {"zamba2", "mamba", "falcon_mamba", "mamba2"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


# ---- what a rank does; the tests below call these in every process -------------------------------


SHAPES: dict[str, dict[str, Any]] = {
    "one-key-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
}


def whole_model(name: str) -> Any:
    """A preset, a family's model, or one of a kind of its own, in a copy that may be changed."""
    if name in PRESETS:
        return build_preset(name)
    if name in FAMILIES:
        return copy.deepcopy(model_of(name))
    if name == "longest-position":
        return ignore_positions(whole_model("qwen3"))
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        **SHAPES[name],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model.eval()


def ignore_positions(model: Any) -> Any:
    """Give all sequences of a forward the positions of the longest."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, ids: forward(x, ids.amax(0, keepdim=True).expand_as(ids))
    return model


def run_model(model: Any, spec: CacheSpec) -> dict[str, Any]:
    """Greedy answers, one for each way to cut the prompt, and the logits after the prompt."""
    found: dict[str, Any] = {"tokens": [], "logits": []}
    for chunk in CHUNKS:
        stack = make_stack(spec, SLOTS)
        order = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
        rig = Sequencer(Runner(model, spec, stack), stack, order)
        tables = rig.new_tables()
        logits = rig.prefill(tables, PROMPT, chunk)
        found["logits"].append(logits.numpy())
        found["tokens"].append([int(logits.argmax())])
        for at in range(len(PROMPT), len(PROMPT) + NEW):
            logits = rig.step(tables, found["tokens"][-1][-1:], at)
            found["tokens"][-1].append(int(logits.argmax()))
        found["keys"] = {
            b.layer: stack.device[i].buffers[b.layer, b.name].sum().item()
            for i, c in enumerate(spec.components)
            for b in c.buffers
            if b.name == "k"
        }
    return found


def spec_of(model: Any) -> CacheSpec:
    return CacheSpec.from_layers(observe_model(model), PAGE)


def serve_part(rank: int, ranks: int, name: str, whole_below: int | None) -> dict[str, Any]:
    """This rank's part of the model: what it answers, keeps, and keeps as all do."""
    if whole_below is None and name in PRESETS:
        loaded = load_model(name, ranks=ranks, rank=rank)
        model, fingerprint = loaded.model, loaded.fingerprint
    else:
        model = shard(whole_model(name), ranks, rank, CPU, whole_below=whole_below or 0)
        fingerprint = ""
    spec = spec_of(model)
    alike = replicated_buffers(model, spec, gather)
    return {
        **run_model(model, mark_replicated(spec, alike)),
        "spec": spec,
        "alike": alike,
        "fingerprint": fingerprint,
    }


def full_weights(rank: int, ranks: int, name: str) -> dict[str, torch.Tensor]:
    """By name, each weight put together again from its parts."""
    model = shard(whole_model(name), ranks, rank, CPU, whole_below=0)
    parameters = model.state_dict()
    whole = {key: getattr(p, "full_tensor", lambda p=p: p)() for key, p in parameters.items()}
    return {key: tensor.clone() for key, tensor in whole.items()}


def held_bytes(rank: int, ranks: int, name: str) -> tuple[int, int, bool]:
    """Bytes of weights before and after, and whether the tied weight is one tensor still."""
    model = whole_model(name)

    def held() -> int:
        local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        return sum(t.untyped_storage().nbytes() for t in local)

    before = held()
    shard(model, ranks, rank, CPU, whole_below=0)
    return before, held(), model.lm_head.weight is model.model.embed_tokens.weight


def divided_weights(rank: int, ranks: int, name: str, whole_below: int) -> set[str]:
    """Names of the modules whose weight this rank has a part of."""
    model = shard(whole_model(name), ranks, rank, CPU, whole_below=whole_below)
    parts = (key for key, p in model.named_parameters() if hasattr(p, "placements"))
    return {key.split(".")[-2] for key in parts}


def alike_without_keys(rank: int, ranks: int) -> set[str]:
    """Names of the buffers found alike where every key is zero."""
    model = whole_model("qwen3")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.k_proj.weight)
    shard(model, ranks, rank, CPU)
    return {name for _, name in replicated_buffers(model, spec_of(model), gather)}


def sum_parts(rank: int, ranks: int) -> torch.Tensor:
    """The sum of a part of each rank, of parts whose order of addition shows."""
    return sum_of_ranks(parts_of(ranks)[rank].t())


def parts_of(ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.arange(ranks)[:, None, None]
    return torch.randn((ranks, 40, 30), generator=generator) * scales


def refused_plan(rank: int, ranks: int, module: str, style: str) -> str:
    """The refusal of a plan that does not fit the model."""
    model = whole_model("llama")
    model._tp_plan = {**model._tp_plan, module: style}
    try:
        shard(model, ranks, rank, CPU)
    except ConfigError as error:
        return str(error)
    return ""


def put_to_the_self_tests(model: Any, name: str) -> bool:
    """Whether its sequences may be decoded together; raises where it does not go on from a cut."""
    config = model.config.get_text_config()
    loaded = LoadedModel(model, build_tokenizer(), config, name, frozenset(), "0" * 32)
    options = ServeOptions(
        model=name, device_bytes=16 * MIB, host_bytes=16 * MIB, max_running=2, chunk=32
    )
    core = build_core(options, loaded)
    try:
        cache, vocab_size = core.cache, int(config.vocab_size)
        runner = Runner(model, cache.stack.spec, cache.stack)
        check_continuation(cache, runner, vocab_size, loaded.dtype)
        return batches_alike(cache, runner, vocab_size, loaded.dtype)
    finally:
        core.close()


def self_test_part(rank: int, ranks: int, name: str) -> bool:
    return put_to_the_self_tests(shard(whole_model(name), ranks, rank, CPU), name)


def die(rank: int, ranks: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(60.0)


def sleep(rank: int, ranks: int, seconds: float) -> int:
    time.sleep(seconds)
    return rank


# ---- one answer ----------------------------------------------------------------------------------

QUICK = (
    ("tiny-full", 2, None),
    ("tiny-full", 4, 0),
    ("tiny-swa", 4, None),
    ("tiny-linear", 2, 0),
    ("tiny-linear", 4, None),
    ("tiny-hybrid", 4, 0),
    ("deepseek_v32", 4, 0),
    ("one-key-head", 4, 0),
)
ALL_ALIKE = {"k", "v", "conv", "recurrent", "indexer"}
ALIKE = {
    "tiny-full": set(),
    "tiny-swa": set(),
    "tiny-linear": {"conv", "recurrent"},
    "tiny-hybrid": ALL_ALIKE,
    "deepseek_v32": ALL_ALIKE,
    "one-key-head": ALL_ALIKE,
}
"""By model, the names of the buffers that all ranks keep alike; buffers of other names are not."""


def check_answers(answers: list[dict[str, Any]], model: Any) -> None:
    """Every rank answers as the whole model does, and keeps one part of its heads."""
    one = run_model(model, spec_of(model))
    assert one["tokens"][0] == one["tokens"][1]
    assert one["logits"][0].std() > 0.1, (
        "tokens differ in their logits, so equal ones say something"
    )
    for rank in answers:
        assert rank["tokens"] == one["tokens"]
        for logits, expected in zip(rank["logits"], one["logits"], strict=True):
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        assert rank["alike"] == answers[0]["alike"]
        assert rank["spec"] == answers[0]["spec"]


def buffers_of(spec: CacheSpec) -> dict[tuple[int, str], tuple[int, ...]]:
    return {(b.layer, b.name): b.shape for c in spec.components for b in c.buffers}


@pytest.mark.parametrize(("name", "ranks", "whole_below"), QUICK)
def test_ranks_answer_as_one(
    pool: RankPool, name: str, ranks: int, whole_below: int | None
) -> None:
    answers = pool.run(ranks, serve_part, name, whole_below)
    model = whole_model(name)
    check_answers(answers, model)
    whole, part = buffers_of(spec_of(model)), buffers_of(answers[0]["spec"])
    assert whole.keys() == part.keys()
    assert answers[0]["alike"] == {place for place in whole if place[1] in ALIKE[name]}
    for place, shape in whole.items():
        if place[1] in ALIKE[name]:
            assert part[place] == shape
        else:
            assert part[place] == (max(1, shape[0] // ranks), *shape[1:])
    if whole_below is None:
        fingerprint = load_model(name).fingerprint
        assert all(rank["fingerprint"] == fingerprint for rank in answers)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NO_PLAN))
def test_every_family_answers_as_one(pool: RankPool, name: str, ranks: int) -> None:
    check_answers(pool.run(ranks, serve_part, name, 0), whole_model(name))


def test_ranks_that_share_a_key_head_keep_the_same_keys(pool: RankPool) -> None:
    answers = pool.run(4, serve_part, "tiny-full", 0)
    first = [rank["keys"][0] for rank in answers]
    assert first[0] == first[1] and first[2] == first[3]
    assert first[0] != first[2]


def test_the_parts_make_up_the_weights_of_the_whole(pool: RankPool) -> None:
    expected = build_preset("tiny-linear").state_dict()
    for found in pool.run(2, full_weights, "tiny-linear"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_sum_of_ranks_is_the_same_on_all_of_them(pool: RankPool) -> None:
    expected = parts_of(4).transpose(1, 2).double().sum(0)
    sums = pool.run(4, sum_parts)
    assert all(torch.equal(one, sums[0]) for one in sums)
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=1e-3)


def test_a_bias_is_added_once(pool: RankPool) -> None:
    check_answers(pool.run(4, serve_part, "biased", 0), whole_model("biased"))


def test_a_rank_holds_its_part_only_and_tied_weights_once(pool: RankPool) -> None:
    for before, after, tied in pool.run(4, held_bytes, "tied"):
        assert tied
        assert after < 0.5 * before  # a quarter of all matrices, all key heads doubled, the norms


@pytest.mark.parametrize(("name", "together"), [("tiny-linear", True), ("longest-position", False)])
def test_the_self_tests_run_on_all_ranks(pool: RankPool, name: str, together: bool) -> None:
    assert put_to_the_self_tests(whole_model(name), name) is together
    assert pool.run(2, self_test_part, name) == [together, together]


def test_small_weights_whose_output_is_gathered_stay_whole(pool: RankPool) -> None:
    matrices = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    linear = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    for found in pool.run(2, divided_weights, "tiny-linear", WHOLE_BELOW):
        assert found == matrices
    for found in pool.run(2, divided_weights, "tiny-linear", 0):
        assert found == matrices | linear | {"embed_tokens", "lm_head"}


# ---- what is alike -------------------------------------------------------------------------------


def test_equal_shape_without_equal_bytes_is_not_alike() -> None:
    model = model_of("qwen3")

    def other_rank_differs(data: bytes) -> list[bytes]:
        layout, digests = json.loads(data)
        digests["1 k"] = "0"
        del digests["2 v"]
        return [data, json.dumps([layout, digests]).encode()]

    spec = spec_of(model)
    everything = set(buffers_of(spec))
    assert replicated_buffers(model, spec, lambda data: [data, data]) == everything
    found = replicated_buffers(model, spec, other_rank_differs)
    assert found == everything - {(1, "k"), (2, "v")}


def test_heads_of_a_rank_are_not_alike_for_being_equal_in_the_trial(pool: RankPool) -> None:
    assert pool.run(2, alike_without_keys) == [set(), set()]


def test_the_digest_is_of_what_the_model_computed() -> None:
    sent = []

    def keep(data: bytes) -> list[bytes]:
        sent.append(json.loads(data)[1])
        return [data]

    model = copy.deepcopy(model_of("qwen3"))
    replicated_buffers(model, spec_of(model), keep)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0] += 1.0
    replicated_buffers(model, spec_of(model), keep)
    before, after = sent
    assert {key for key in before if before[key] != after[key]} == {"2 k", "3 k", "3 v"}


def test_ranks_that_keep_unlike_shapes_are_refused() -> None:
    model = model_of("qwen3")

    def other_rank_is_wider(data: bytes) -> list[bytes]:
        return [data, data.replace(b"float32[2, 16]", b"float32[1, 16]", 1)]

    with pytest.raises(SpecError, match="must have the same shapes"):
        replicated_buffers(model, spec_of(model), other_rank_is_wider)


def test_the_marks_are_on_what_was_found_and_on_nothing_else() -> None:
    spec = spec_of(model_of("qwen3_5_text"))
    marked = mark_replicated(spec, {(0, "conv"), (1, "k")})
    found = {(b.layer, b.name) for c in marked.components for b in c.buffers if b.replicated}
    assert found == {(0, "conv"), (1, "k")}
    assert buffers_of(marked) == buffers_of(spec)


# ---- refusals ------------------------------------------------------------------------------------


def test_a_model_without_a_plan_is_refused() -> None:
    check_ranks(config_of("mamba"), 1)
    with pytest.raises(ConfigError, match=r"--tp: .*no tensor-parallel plan for 'mamba'.*--tp 1$"):
        check_ranks(config_of("mamba"), 2)


@pytest.mark.parametrize(
    ("query", "key_value", "ranks", "fits"),
    [(4, 2, 3, "1 or 2 or 4"), (4, 2, 8, "1 or 2 or 4"), (12, 4, 6, "1 or 2 or 4 or 12")],
)
def test_heads_that_do_not_divide_are_refused(
    query: int, key_value: int, ranks: int, fits: str
) -> None:
    config = config_of("qwen3")
    config.num_attention_heads, config.num_key_value_heads = query, key_value
    with pytest.raises(ConfigError) as refusal:
        check_ranks(config, ranks)
    assert refusal.value.option == "--tp"
    assert f"{query} query heads and {key_value} key-value heads" in refusal.value.problem
    assert refusal.value.fix == f"Use --tp {fits}"
    for fit in map(int, fits.split(" or ")):
        check_ranks(config, fit)


def test_heads_that_no_rank_shares_need_not_divide() -> None:
    check_ranks(config_of("deepseek_v3"), 3)
    with pytest.raises(ConfigError, match=r"Use --tp 1 or 2 or 4$"):
        check_ranks(config_of("deepseek_v32"), 3)


def test_ranks_without_a_process_group_are_an_error() -> None:
    with pytest.raises(ValueError, match="not initialised as rank 1 of 2"):
        load_model("tiny-full", ranks=2, rank=1)


@pytest.mark.parametrize(
    ("module", "style", "why"),
    [
        ("model.norm", "all_reduce", "standard deviations of its logits"),
        ("model.layers.*.mlp.up_proj", "colwise_gather_output", "fails when it is divided"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    pool: RankPool, module: str, style: str, why: str
) -> None:
    for refusal in pool.run(2, refused_plan, module, style):
        assert refusal.startswith("--tp: ") and why in refusal


# ---- the processes themselves --------------------------------------------------------------------


def test_a_rank_that_dies_or_is_late_fails_the_test_and_leaves_no_process() -> None:
    for function, arguments, why in ((die, (), "rank 1 of 2 died"), (sleep, (60.0,), "in 1.0 s")):
        ranks = RankPool(2)
        assert ranks.run(2, sleep, 0.0) == [0, 1]
        processes = list(ranks.processes)
        started = time.monotonic()
        with pytest.raises(RanksError, match=why):
            ranks.run(2, function, *arguments, limit_s=5.0 if function is die else 1.0)
        assert time.monotonic() - started < 20.0
        assert not any(process.is_alive() for process in processes)
