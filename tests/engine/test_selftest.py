"""A model that cannot be resumed is refused before it serves anything, with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from banyan.engine.build import build_core
from banyan.engine.models import LoadedModel
from banyan.engine.presets import build_tokenizer
from banyan.errors import SpecError
from banyan.options import ServeOptions
from tests.support.families import model_of

MIB = 1 << 20


def build(model: Any, dtype: str = "float32", device_bytes: int = 16 * MIB) -> Any:
    config = model.config.get_text_config()
    loaded = LoadedModel(model, build_tokenizer(), config, "tiny", frozenset(), "0" * 32)
    options = ServeOptions(
        model="tiny", device_bytes=device_bytes, host_bytes=16 * MIB, max_running=2, chunk=32
    )
    return build_core(options, loaded)


class Forgetful(nn.Module):
    """A layer that mixes in a state of its own, which is in no cache."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.kept: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sums = hidden_states.cumsum(1)
        return self.layer(hidden_states + 0.2 * sums, *args, **kwargs)


def test_a_state_outside_the_cache_is_found() -> None:
    model = copy.deepcopy(model_of("qwen3"))
    build(model).close()
    model.model.layers[1] = Forgetful(model.model.layers[1])
    with pytest.raises(SpecError, match=r"standard deviations of its logits .* in pieces"):
        build(model)


@pytest.mark.parametrize("family", ["jamba", "deepseek_v4", "zamba2", "minimax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_families_that_go_on_pass_in_every_precision(family: str, dtype: str) -> None:
    model = copy.deepcopy(model_of(family)).to(getattr(torch, dtype))
    core = build(model, dtype)
    assert not any(core.cache.tree.nodes()), "it left nothing behind"
    slots = [pool.allocate(2) for pool in core.cache.stack.device_slots]
    assert all(s is not None and s.tolist() == [0, 1] for s in slots), "not even in their order"
    for pool, taken in zip(core.cache.stack.device_slots, slots, strict=True):
        pool.free(taken)
    assert all(p.free_count == p.capacity for p in core.cache.stack.device_slots)
    core.check()
    core.close()


def test_without_the_repair_of_scans_jamba_would_be_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("banyan.engine.cache_layers.hand_over", lambda state: None)
    with pytest.raises(SpecError, match="transformers does not carry all of its state"):
        build(model_of("jamba"))


def test_a_model_that_ignores_positions_gets_one_sequence_at_a_time() -> None:
    """Learned positions counted from the cache's length: the shorter of two sequences would get
    those of the longer one."""
    model = copy.deepcopy(model_of("qwen3"))
    core = build(model)
    assert core._scheduler._model._runner.batches
    core.close()
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def by_the_longest(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(x, position_ids.amax(0, keepdim=True).expand_as(position_ids))

    rotary.forward = by_the_longest
    core = build(model)
    assert not core._scheduler._model._runner.batches
    core.close()


def test_a_model_that_fails_on_the_trial_says_with_what() -> None:
    model = copy.deepcopy(model_of("qwen3"))
    norm = model.model.layers[2].input_layernorm
    forward = norm.forward

    def refuse(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[1] == 14:
            raise RuntimeError("no fourteen")
        return forward(hidden_states)

    norm.forward = refuse
    with pytest.raises(SpecError, match="computed in pieces: RuntimeError: no fourteen"):
        build(model)
