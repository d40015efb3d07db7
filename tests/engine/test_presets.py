"""The built-in models: what they are shaped like, and that their answers prove something."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from model_rig import prompt_of, reference_generate, tiny_model

from banyan.engine.presets import EOS_ID, MAX_LENGTH, PRESETS, build_preset, build_tokenizer
from banyan.spec import CacheSpec

TEXTS = ["hello", "  two  spaces\n\ttab", "naïve café ¿ 北京 🙂", "\x00\x7f", ""]


def _digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("name", "reaches"),
    [
        ("tiny-full", ["full"]),
        ("tiny-swa", ["full", "window(64)"]),
        ("tiny-linear", ["full", "point"]),
    ],
)
def test_a_preset_has_about_a_million_parameters_and_its_reaches(
    name: str, reaches: list[str]
) -> None:
    model = tiny_model(name)
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    spec = CacheSpec.from_config(model.config)
    assert [str(c.reach) for c in spec.components] == reaches
    assert all(c.buffers for c in spec.components)
    assert model.config.max_position_embeddings == MAX_LENGTH == 32768
    assert not model.training


@pytest.mark.parametrize("name", PRESETS)
def test_weights_come_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    first = build_preset(name)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state moved"
    torch.manual_seed(7)
    assert _digest(build_preset(name)) == _digest(first)


@pytest.mark.parametrize("name", PRESETS)
def test_greedy_answers_vary_and_are_printable(name: str) -> None:
    answers = [reference_generate(tiny_model(name), prompt_of(60, seed), 48) for seed in range(3)]
    for answer in answers:
        assert len(set(answer)) >= 15, "the model loops"
        assert all(32 <= token < 127 or token == EOS_ID for token in answer)
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("position", [0, 150, 290])
def test_logits_depend_on_the_whole_prompt(name: str, position: int) -> None:
    """Else a cache could lose any part of it and no parity test would notice."""
    prompt, model = prompt_of(300), tiny_model(name)
    other = list(prompt)
    other[position] = 33 if prompt[position] != 33 else 34
    with torch.inference_mode():
        first, second = (model(torch.tensor([p])).logits[0, -1] for p in (prompt, other))
    assert (first - second).abs().max() > 1e-3 * first.std()


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_is_a_token(text: str) -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_all_bytes_decode() -> None:
    tokenizer = build_tokenizer()
    text = "".join(chr(i) for i in range(0x800))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"


def test_the_chat_template_opens_the_answer() -> None:
    tokenizer = build_tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>hi<|end|><|assistant|>yo<|end|><|assistant|>"
    tokens = tokenizer.encode(text)
    assert tokens.count(EOS_ID) == 2 and len(tokens) == 9
    assert tokenizer.eos_token_id == EOS_ID
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "hiyo"
