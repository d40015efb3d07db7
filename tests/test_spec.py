"""`CacheSpec.from_config` against what transformers' own cache holds, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPTextConfig,
    DeepseekV4Config,
    DynamicCache,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
    cache_utils,
    xLSTMConfig,
)

from banyan.errors import SpecError
from banyan.observe import Held, LayerData, observe_config, observe_model
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window
from tests.support.families import FAMILIES, config_of

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE, num_hidden_layers=2),
    "qwen3": lambda: Qwen3Config(**SHAPE, num_hidden_layers=2),
    "mistral": lambda: MistralConfig(**SHAPE, num_hidden_layers=2, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, num_hidden_layers=7, sliding_window=8),
    "gpt-oss": lambda: GptOssConfig(
        **SHAPE,
        num_hidden_layers=4,
        sliding_window=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**SHAPE, **LINEAR, num_hidden_layers=4),
    "qwen3-next": lambda: Qwen3NextConfig(**SHAPE, **LINEAR, **EXPERTS, num_hidden_layers=4),
}


def _held_by_transformers(model: Any) -> dict[tuple[int, str], tuple[tuple[int, ...], str]]:
    """By (layer, buffer): shape per token or state, and dtype, after a forward of 20 tokens."""
    held = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.arange(20)[None], cache=held, use_cache=True)
    found = {}
    for i, layer in enumerate(held.layers):
        if getattr(layer, "keys", None) is not None:
            for name, tensor in (("k", layer.keys), ("v", layer.values)):
                found[i, name] = ((tensor.shape[1], tensor.shape[3]), tensor.dtype)
        if hasattr(layer, "conv_states"):
            for name, tensor in (
                ("conv", layer.conv_states[0]),
                ("recurrent", layer.recurrent_states[0]),
            ):
                found[i, name] = (tuple(tensor.shape[1:]), tensor.dtype)
    return {key: (shape, str(d).removeprefix("torch.")) for key, (shape, d) in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_are_those_that_transformers_caches(name: str, dtype: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=getattr(torch, dtype)).eval()
    spec = CacheSpec.from_config(model.config, dtype=dtype)
    derived = {(b.layer, b.name): (b.shape, b.dtype) for c in spec.components for b in c.buffers}
    assert derived == _held_by_transformers(model)
    assert spec.num_layers == model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [(Full(), (0, 1))]),
        ("mistral", [(Full(), ()), (Window(8), (0, 1))]),
        ("gemma3", [(Full(), (5,)), (Window(8), (0, 1, 2, 3, 4, 6))]),
        ("gpt-oss", [(Full(), (1, 3)), (Window(8), (0, 2))]),
        ("qwen3.5", [(Full(), (3,)), (Point(), (0, 1, 2))]),
        ("qwen3-next", [(Full(), (3,)), (Point(), (0, 1, 2))]),
    ],
)
def test_layers_are_grouped_by_reach(name: str, expected: list[Any]) -> None:
    spec = CacheSpec.from_config(CONFIGS[name](), page_size=4)
    assert [(c.reach, c.layers) for c in spec.components] == expected
    assert spec.page_size == 4


def test_the_dtype_is_the_configs_own_unless_given() -> None:
    config = LlamaConfig(**SHAPE, num_hidden_layers=1, dtype="bfloat16")
    assert CacheSpec.from_config(config).components[0].buffers[0].dtype == "bfloat16"
    given = CacheSpec.from_config(config, dtype="float16")
    assert given.components[0].buffers[0].dtype == "float16"
    linear = CacheSpec.from_config(CONFIGS["qwen3.5"](), dtype="bfloat16")
    assert {b.name: b.dtype for b in linear.components[1].buffers} == {
        "conv": "bfloat16",
        "recurrent": "float32",
    }


def test_a_multimodal_config_gives_its_text_part() -> None:
    text = CONFIGS["gemma3"]()
    whole = Gemma3Config(text_config=text.to_dict())
    assert CacheSpec.from_config(whole) == CacheSpec.from_config(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_keeps_what_the_real_model_keeps(family: str, dtype: str) -> None:
    """The config alone and the model with weights give the same spec."""
    config = config_of(family)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    assert observe_model(model) == observe_config(config, dtype)


def test_a_minimax_whose_last_layers_keep_states_is_read_to_its_end() -> None:
    config = config_of("minimax")
    config.layer_types = ["full_attention", "linear_attention"] * 2
    full, state = CacheSpec.from_config(config).components
    assert (full.layers, state.layers) == ((0, 2), (1, 3))


def test_a_config_is_not_changed() -> None:
    config = config_of("qwen3_next")
    before = config.to_json_string(use_diff=False)
    CacheSpec.from_config(config)
    assert config.to_json_string(use_diff=False) == before


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("deepseek_v32", {"full": {"k": (1, 32), "v": (1, 8), "indexer": (32,)}}),
        ("mimo_v2_flash", {"full": {"k": (2, 24), "v": (2, 16)}}),
        ("lfm2", {"full": {"k": (2, 16), "v": (2, 16)}, "state": {"conv": (64, 3)}}),
        ("minimax", {"full": {"k": (2, 16), "v": (2, 16)}, "state": {"recurrent": (4, 16, 16)}}),
        ("mamba", {"full": {}, "state": {"conv": (96, 4), "recurrent": (96, 8)}}),
    ],
)
def test_shapes_by_component(family: str, expected: dict[str, Any]) -> None:
    spec = CacheSpec.from_config(config_of(family))
    got = {c.name: {b.name: b.shape for b in c.buffers} for c in spec.components}
    assert {name: got[name] for name in expected} == expected


def test_layers_that_use_another_layers_keys_keep_nothing() -> None:
    spec = CacheSpec.from_config(config_of("gemma4_text"))
    assert {c.name: c.layers for c in spec.components} == {"full": (2,), "window": (0, 1, 3)}


def test_a_layer_with_attention_and_state_is_in_both_components() -> None:
    spec = CacheSpec.from_config(config_of("falcon_h1"))
    assert [(c.name, c.layers) for c in spec.components] == [
        ("full", (0, 1, 2, 3)),
        ("state", (0, 1, 2, 3)),
    ]


def test_chunked_attention_looks_back_a_chunk() -> None:
    config = Llama4TextConfig(
        **SHAPE,
        num_hidden_layers=4,
        attention_chunk_size=24,
        num_local_experts=2,
        intermediate_size_mlp=32,
    )
    spec = CacheSpec.from_config(config)
    assert [(str(c.reach), c.layers) for c in spec.components] == [
        ("full", (3,)),
        ("window(24)", (0, 1, 2)),
    ]


def test_several_windows_are_components_of_their_own() -> None:
    def keys(layer: int, window: int | None) -> LayerData:
        return LayerData(window, (Held("k", (2, 4), "float32", True),))

    spec = CacheSpec.from_layers([keys(0, 8), keys(1, 32), keys(2, None), keys(3, 8)], 4)
    assert [(c.name, str(c.reach), c.layers) for c in spec.components] == [
        ("full", "full", (2,)),
        ("window8", "window(8)", (0, 3)),
        ("window32", "window(32)", (1,)),
    ]


def test_compressed_entries_are_full_data_with_a_stride() -> None:
    config = config_of("deepseek_v4")
    full, window = CacheSpec.from_config(config, page_size=32).components
    assert {(b.name, b.layer): b.stride for b in full.buffers if b.layer in (0, 1)} == {
        ("compressor_entry", 0): 16,
        ("compressor_entry", 1): 4,
        ("indexer_entry", 1): 4,
    }
    assert full.record_bytes(32) == 4 * 32 * (2 * (32 // 16) + 4 * (32 // 4))
    assert full.entry_bytes == 4 * 32 * (2 / 16 + 4 / 4)
    assert {b.name for b in window.buffers if b.layer == 0} == {
        "k", "compressor_kv", "compressor_gate",
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"page size 8 is no multiple of 16.*use a page size of 16"):
        CacheSpec.from_config(config, page_size=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "'t5' is an encoder-decoder model"),
        (RwkvConfig(num_hidden_layers=2, hidden_size=32), "no layer of this model caches"),
        (
            xLSTMConfig(num_hidden_layers=2, hidden_size=64, num_heads=2),
            "a trial run of 'xlstm' failed.*rnn_state",
        ),
        (
            DeepseekV4Config(
                num_hidden_layers=2,
                sliding_window=4,
                layer_types=["compressed_sparse_attention"] * 2,
                num_nextn_predict_layers=0,
            ),
            "layer 0 of 'deepseek_v4' looks back 8 tokens to compress them",
        ),
        (CLIPTextConfig(), "builds no causal language model of 'clip_text_model'"),
    ],
)
def test_what_no_component_holds_is_refused_with_what_and_why(config: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CacheSpec.from_config(config)


def test_a_cache_layer_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Novel(cache_utils.DynamicLayer):  # type: ignore[misc]
        """A layer class of a later transformers."""

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Novel)
    with pytest.raises(SpecError, match="layer 0 of 'llama' keeps its data in a Novel, which no"):
        CacheSpec.from_config(LlamaConfig(**SHAPE, num_hidden_layers=1, rms_norm_eps=0.125))


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(SpecError, match="unknown dtype 'float8'; use one of float64, float32"):
        CacheSpec.from_config(LlamaConfig(**SHAPE), dtype="float8")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CacheSpec((), 16), "first component must be Full"),
        (lambda: CacheSpec((Component("w", Window(4)),), 16), "first component must be Full"),
        (lambda: CacheSpec((Component("a", Full()), Component("b", Full())), 16), "several Full"),
        (lambda: CacheSpec((Component("a", Full()), Component("a", Point())), 16), "names repeat"),
        (lambda: CacheSpec((Component("a", Full()),), 0), "page size 0"),
        (lambda: Component("w", Window(1)), "keeps nothing"),
        (lambda: Buffer("k", 0, (1,), "complex64"), "unknown dtype 'complex64'"),
        (
            lambda: CacheSpec((Component("a", Full(), (Buffer("k", 0, (1,)),) * 2),), 16),
            "share one",
        ),
        (lambda: Buffer("k", 0, (1,), stride=0), "stride of 0"),
        (
            lambda: CacheSpec(
                (
                    Component("a", Full()),
                    Component("w", Window(4), (Buffer("k", 0, (1,), stride=2),)),
                )
            ),
            "only a Full component may have a stride",
        ),
        (lambda: CacheSpec.from_layers([LayerData(None, ())]), "no layer of this model caches"),
    ],
)
def test_specs_that_contradict_themselves_are_refused(build: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build()


@pytest.mark.parametrize(
    ("reach", "boundary", "page_size", "first"),
    [
        (Full(), 64, 4, 0),
        (Window(8), 64, 4, 56),
        (Window(9), 64, 4, 56),
        (Window(10), 64, 4, 52),
        (Window(8), 4, 4, 0),
        (Window(8), 64, 1, 57),
        (Point(), 64, 4, 64),
    ],
)
def test_reaches_need_what_the_layers_look_back_at(
    reach: Any, boundary: int, page_size: int, first: int
) -> None:
    assert reach.first_needed(boundary, page_size) == first


def test_bytes_per_record() -> None:
    spec = CacheSpec.from_config(CONFIGS["qwen3.5"](), page_size=4)
    full, state = spec.components
    assert full.record_bytes(4) == 4 * 2 * (2 * 20) * 4
    assert state.record_bytes(4) == 3 * 4 * ((2 * 2 * 8 + 4 * 12) * 3 + 4 * 8 * 12)
    assert spec.layer_components(3) == (0,)
    assert spec.layer_components(0) == (1,)
