"""`CacheSpec.from_config` against what transformers' own cache holds, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    FalconH1Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)

from banyan.errors import SpecError
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

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


def test_head_size_and_kv_heads_default_to_those_of_the_queries() -> None:
    class Text:
        layer_types = ("sliding_attention", "full_attention")
        num_attention_heads, hidden_size, sliding_window = 4, 64, 32

    spec = CacheSpec.from_config(Text())
    assert [c.name for c in spec.components] == ["full", "window"]
    assert {b.shape for c in spec.components for b in c.buffers} == {(4, 16)}


def test_a_missing_field_is_named() -> None:
    class Text:
        model_type = "odd"
        layer_types = ("sliding_attention",)
        num_attention_heads, hidden_size = 4, 64

    with pytest.raises(SpecError, match="'odd': sliding layer 0 needs the config field 'sliding_w"):
        CacheSpec.from_config(Text())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DeepseekV3Config(), r"deepseek_v3.*latent attention \(MLA\) \(kv_lora_rank=512\)"),
        (Llama4TextConfig(), "llama4_text.*chunked attention"),
        (Gemma3nTextConfig(), "gemma3n_text.*share another layer's KV"),
        (T5Config(), "t5.*encoder-decoder"),
        (MambaConfig(), "'mamba': linear-attention layer 0 needs the config field"),
        (Mamba2Config(), "'mamba2': linear-attention layer 0 needs the config field"),
        (FalconH1Config(), "layer 0 of 'falcon_h1' has type 'hybrid', which no component holds"),
    ],
)
def test_what_no_component_holds_is_refused_with_what_and_why(config: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CacheSpec.from_config(config)


def test_an_unknown_layer_type_is_named() -> None:
    class Text:
        model_type = "novel"
        layer_types = ("full_attention", "psychic_attention")
        num_attention_heads, hidden_size = 4, 64

    with pytest.raises(SpecError, match="layer 1 of 'novel' has type 'psychic_attention'"):
        CacheSpec.from_config(Text())


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
