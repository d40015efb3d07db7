"""One small config per model family, with random weights: what the parity matrix serves.

Owns the configs and their weights. Each is shaped like its family where caching is concerned
(layer types, windows, shared keys, indexers, states), and small everywhere else.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from banyan.engine.models import LoadedModel
from banyan.engine.presets import (
    BOS_ID,
    EOS_ID,
    MAX_LENGTH,
    SEED,
    VOCAB_SIZE,
    build_tokenizer,
    randomize,
)

WINDOW = 24

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HEADS = {"head_dim": 16}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GATED_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DSA = {
    **_MLA,
    **_MOE,
    "q_lora_rank": 48,
    "index_topk": 32,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MAMBA1 = {
    "state_size": 8,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": 8,
    "use_mambapy": False,
}
_TWO_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {**_HEADS},
    "mistral": {**_HEADS, "sliding_window": WINDOW},
    "gemma3_text": {
        **_HEADS,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
    "gemma4_text": {
        **_HEADS,
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma3n_text": {
        **_HEADS,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "llama4_text": {
        **_HEADS,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention"] * 2 + ["full_attention", "chunked_attention"],
        "no_rope_layers": [1, 1, 0, 1],
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
    },
    "gpt_oss": {
        **_HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_5_text": {**_HEADS, **_GATED_DELTA, **_TWO_LINEAR},
    "qwen3_next": {
        **_HEADS,
        **_GATED_DELTA,
        **_MOE,
        **_TWO_LINEAR,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {**_HEADS, **_MAMBA2, "mamba_d_ssm": 128},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        **_HEADS,
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **_MLA,
        **_MOE,
        **_TWO_LINEAR,
        "num_local_experts": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "bailing_hybrid": {
        **_MLA,
        **_MOE,
        **_TWO_LINEAR,
        "head_dim": 16,
        "num_local_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "mamba": {**_MAMBA1},
    "falcon_mamba": {**_MAMBA1},
    "mamba2": {
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm3": {
        **_HEADS,
        "sliding_window": WINDOW,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
    "olmo_hybrid": {**_GATED_DELTA, **_TWO_LINEAR, "linear_num_value_heads": 2},
    "deepseek_v3": {
        **_MLA,
        **_MOE,
        "q_lora_rank": 48,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "deepseek_v32": {**_DSA},
    "glm_moe_dsa": {**_DSA, "n_group": 1},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 0,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 8,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        **_HEADS,
        **_MOE,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "minimax": {**_HEADS, **_TWO_LINEAR, "num_local_experts": 4, "block_size": 16},
    "mimo_v2_flash": {
        **_MOE,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": WINDOW,
        "n_routed_experts": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}

PAGES = (1, 16, 64)
PAGES_OF: dict[str, tuple[int, ...]] = {"deepseek_v4": (16, 32, 64)}
"""Page sizes of families that compress tokens: a page holds whole groups of them."""


QUICK_FAMILIES = ("gemma3_text", "qwen3_5_text", "lfm3", "deepseek_v32", "deepseek_v4")
"""Those whose every test runs each time: they have all kinds of buffers among them."""

_ZEROS = (
    "there a chunk of several tokens starts its states from zeros; the engine goes on from them"
)
CHUNKS_DIFFER = {
    "jamba": _ZEROS,
    "mamba": _ZEROS,
    "falcon_mamba": _ZEROS,
    "minimax": "there the length of the cache is that of layer 0, which keeps no keys, so the masks"
    " of later chunks are wrong; the engine's are right",
}
"""Families for which `transformers` itself, fed a prompt in chunks, gives other logits, and why."""


def config_of(family: str) -> Any:
    """The family's small config."""
    return AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family]})


@cache
def model_of(family: str, dtype: str = "float32") -> Any:
    """The family's small model on CPU, in eval mode; the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=getattr(torch, dtype))
    randomize(model)
    return model.eval()


@cache
def loaded_family(family: str, dtype: str = "float32") -> LoadedModel:
    """`model_of` with what an engine wants to know of it."""
    model = model_of(family, dtype)
    config = model.config.get_text_config()
    return LoadedModel(model, build_tokenizer(), config, family, frozenset({EOS_ID}), "0" * 32)


def pages_of(family: str) -> tuple[int, ...]:
    """The page sizes that the family is tried with; 16 is among them."""
    return PAGES_OF.get(family, PAGES)
