"""Writes small GGUF files as llama.cpp's converter would: a llama with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, LlamaFileType, TokenType

from banyan.engine.presets import BOS_ID, EOS_ID, SPECIALS, VOCAB_SIZE, build_tokenizer

MERGED = "he"
"""The one token of several bytes; its id comes after the special tokens."""
MERGED_ID = EOS_ID + len(SPECIALS) - 1
TEMPLATE = (
    "{%- for message in messages -%}{{ '[' + message['role'] + ']' + message['content'] }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '[answer]' }}{%- endif -%}"
)

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}


def write_gguf(
    model: Any,
    path: Path,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    without: str | None = None,
    extra: dict[str, Any] | None = None,
    extra_tensor: str | None = None,
) -> Path:
    """Write a transformers llama and a byte-level tokenizer with one merge into one file.

    Args:
        kind: of the matrices; vectors are always F32.
        without: a GGUF tensor to leave out.
        extra: more metadata, texts and integers.
        extra_tensor: name of one more tensor.

    Returns:
        `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, model.config, kind)
    _write_tokenizer(writer)
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, tensor in model.state_dict().items():
        target = _gguf_name(name)
        if target != without:
            _write_tensor(writer, target, _as_stored(name, tensor, model.config), kind)
    if extra_tensor:
        _write_tensor(writer, extra_tensor, torch.ones(8), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    writer.add_name("Tiny")
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    ids = build_tokenizer().get_vocab()
    tokens = [*sorted(ids, key=lambda token: ids[token]), MERGED]
    kinds = [TokenType.NORMAL] * BOS_ID + [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL]
    unused = VOCAB_SIZE - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + [f"[unused{i}]" for i in range(unused)])
    writer.add_token_types(kinds + [TokenType.UNUSED] * unused)
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def _as_stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each head's rows of queries and keys."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return tensor
    halves = tensor.reshape(heads[part], 2, -1, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _write_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    values = tensor.float().contiguous().numpy()
    stored = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
