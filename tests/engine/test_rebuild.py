"""Where only windows or states are missing, only those are computed again, and the receipt says so.

The full-attention pages of the prefix are the tree's: they are read, not stored a second time, and
the layers above the last one that keeps windows or states do not run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from banyan.engine.models import LoadedModel, load_model
from banyan.engine.presets import build_tokenizer
from banyan.tree import Tier, encode_tokens
from tests.parity.harness import Engine, plain_answers, prompts_of
from tests.support.families import model_of
from tests.support.toy_engine import ToyEngine
from tests.support.toy_model import answer


def loaded(name: str) -> LoadedModel:
    if name.startswith("tiny"):
        return load_model(name)
    model = model_of(name)
    config = model.config.get_text_config()
    return LoadedModel(model, build_tokenizer(), config, name, frozenset(), "0" * 32)


def evict_all_but_full(engine: Engine) -> None:
    """Windows and states go from the device; the full-attention pages stay."""
    index, pools = engine.cache.tree.device, engine.cache.stack.device_slots
    counts = [pool.free_count + index.evictable[c] for c, pool in enumerate(pools)]
    slots = engine.cache.controller.reserve(Tier.DEVICE, [0, *counts[1:]])
    assert isinstance(slots, list)
    engine.cache.controller.free(Tier.DEVICE, slots)


def full_bytes(engine: Engine, key: bytes) -> dict[int, bytes]:
    """Records of the pages that the tree has for a key, by slot."""
    match = engine.cache.match(key)
    slots = np.concatenate(
        [n.parts[0][0].slots for n in match.path if n.parts[0][0].slots is not None]
    )
    records = engine.cache.stack.device[0].read_records(slots)
    return {int(s): r.tobytes() for s, r in zip(slots, records, strict=True)}


@pytest.mark.parametrize("name", ["tiny-swa", "tiny-linear", "gemma4_text", "deepseek_v4", "lfm3"])
def test_only_what_is_missing_is_computed_again(name: str) -> None:
    model = loaded(name)
    prompt = prompts_of(range(32, 127), groups=1, each=1, shared=180, own=30)[0]
    asked = [*prompt, *range(60, 90)]
    wanted = plain_answers(model.model, [asked], 6)[0]
    layers = _layers(model.model)
    runs = [0] * len(layers)
    hooks = [
        layer.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
        for i, layer in enumerate(layers)
    ]
    try:
        with Engine(model, page_size=16, chunk=64, host_bytes=0, max_running=1) as engine:
            engine.answer([prompt], 4)
            evict_all_but_full(engine)
            before = full_bytes(engine, encode_tokens(asked))
            free = engine.cache.stack.device_slots[0].free_count
            runs[:] = [0] * len(layers)
            [(tokens, usage)] = engine.answer([asked], 6)
            assert tokens == wanted
            known = len(before) * 16
            assert (usage.device, usage.host) == (0, 0)
            assert usage.rebuilt == known > 100 and usage.computed == len(asked)
            after = full_bytes(engine, encode_tokens(asked))
            assert {s: after[s] for s in before} == before, "the tree's pages are never written"
            used = free - engine.cache.stack.device_slots[0].free_count
            assert used <= len(asked) // 16 + 2 - len(before), "no second copy of what was there"
            last = max(b.layer for part in engine.cache.spec.components[1:] for b in part.buffers)
            saved = known // 64
            assert runs[0] - runs[-1] == (saved if last < len(layers) - 1 else 0), runs
            assert runs[last] == runs[0]
    finally:
        for hook in hooks:
            hook.remove()


def _layers(model: Any) -> Any:
    count = model.config.get_text_config().num_hidden_layers
    return next(
        m for n, m in model.named_modules() if n.endswith("layers") and len(list(m)) == count
    )


def test_a_prefix_that_is_all_there_is_not_rebuilt() -> None:
    with Engine(loaded("tiny-linear"), page_size=16, host_bytes=0, max_running=1) as engine:
        prompt = prompts_of(range(32, 127), groups=1, each=1, shared=100, own=10)[0]
        engine.answer([prompt], 4)
        [(_, usage)] = engine.answer([prompt], 4)
    assert usage.device > 0 and usage.rebuilt == 0


@pytest.mark.parametrize("kind", ["full+window", "full+state", "full+window+state"])
def test_pages_stay_while_they_are_read_and_come_back_afterwards(kind: str) -> None:
    """A request that reads the tree's pages protects them until it has passed them, and an abort
    on the way leaves nothing locked."""
    prompt = list(range(1, 42))
    for ends in ("finish", "abort"):
        e = ToyEngine(kind, chunk=8)
        e.ask(prompt, 3)
        slots = e.cache.controller.reserve(
            Tier.DEVICE,
            [0]
            + [
                p.free_count + e.cache.tree.device.evictable[c]
                for c, p in enumerate(e.stack.device_slots)
                if c
            ],
        )
        assert isinstance(slots, list)
        e.cache.controller.free(Tier.DEVICE, slots)
        name = e.submit([*prompt, 7, 8, 9], 3)
        e.step()
        assert e.cache.tree.device.protected[0] >= 40 // 4
        if ends == "abort":
            e.roster.abort(name)
        e.run()
        if ends == "finish":
            assert e.tokens(name) == answer([*prompt, 7, 8, 9], 3)
            assert e.last(name).usage.rebuilt == 40
        assert e.cache.tree.device.protected == [0] * e.cache.tree.width
        e.assert_idle()
