"""Built-in models with random weights: small enough for tests, shaped like the real families.

Owns four configs, their weights (made from a fixed seed) and a byte-level tokenizer. Knows
nothing of caches. A preset is no use as a language model, but its greedy answers vary, depend on
the whole prompt, and are printable ASCII.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig

SEED = 20_240
MAX_LENGTH = 32_768
BYTES = 256
"""Token ids below this are the bytes themselves."""
SPECIALS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS_ID = BYTES
EOS_ID = BYTES + 1
VOCAB_SIZE = 288

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}


def _tiny_full() -> Any:
    """Qwen3's shape: dense, grouped-query, full attention in every layer."""
    return Qwen3Config(**_COMMON, num_hidden_layers=6)


def _tiny_swa() -> Any:
    """Gemma 3's shape: five layers of sliding attention to one of full attention."""
    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=6,
        sliding_window=64,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )


def _tiny_linear() -> Any:
    """Qwen3.5's shape: three layers of gated delta net to one of full attention."""
    return Qwen3_5TextConfig(
        **_COMMON,
        num_hidden_layers=8,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    )


def _tiny_hybrid() -> Any:
    """Falcon-H1's shape: attention and a Mamba-2 state side by side in every layer."""
    return FalconH1Config(
        **_COMMON,
        num_hidden_layers=4,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_chunk_size=64,
        pad_token_id=None,
    )


PRESETS: dict[str, Callable[[], Any]] = {
    "tiny-full": _tiny_full,
    "tiny-swa": _tiny_swa,
    "tiny-linear": _tiny_linear,
    "tiny-hybrid": _tiny_hybrid,
}


def build_preset(name: str) -> Any:
    """The preset's model, float32 on CPU, in eval mode; leaves torch's random state untouched.

    Args:
        name: a key of `PRESETS`.
    """
    config = PRESETS[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    return model.eval()


def randomize(model: Any, seed: int = SEED) -> None:
    """Give `model` weights under which greedy answers vary with every part of the prompt.

    Matrices get unit gain (a random net of lower gain repeats one token), norms of queries and
    keys get weights that sharpen attention (else it averages and forgets), and the decay of linear
    layers spans half-lives from some ten to some thousand tokens. Output rows of tokens that are
    neither printable nor end of sequence are zero.

    Mutates: every parameter of `model`, in a fixed order.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                steps = torch.linspace(math.log(0.0005), math.log(0.05), parameter.numel())
                parameter.copy_(steps.view_as(parameter))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(0.5)
            elif parameter.ndim >= 2:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=generator)
        silent = [t for t in range(VOCAB_SIZE) if not (32 <= t < 127 or t == EOS_ID)]
        model.get_output_embeddings().weight[silent] = 0.0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which token `b` is byte `b`, followed by the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def _byte_symbols() -> list[str]:
    """For each byte, the character that stands for it in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the rest are moved up from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x100 + BYTES))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(BYTES)]
