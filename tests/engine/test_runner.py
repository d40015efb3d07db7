"""The runner on Banyan's pools against transformers on its own cache, and what it may touch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from model_rig import (
    MODELS,
    Sequencer,
    bare_logits,
    make_stack,
    prompt_of,
    reference_generate,
    tiny_model,
)
from transformers import AutoModelForCausalLM, DynamicCache, FalconH1Config

from banyan.engine.cache_layers import BanyanCache, HybridLayer
from banyan.engine.presets import PRESETS, VOCAB_SIZE
from banyan.engine.runner import Runner, SeqInput
from banyan.errors import CopyError, LeaseError, SpecError
from banyan.lease import PageTable, StateTable
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

PAGE_SIZES = (1, 16, 64)
PROMPT_LEN = 150
NEW = 12


@cache
def _reference(name: str) -> list[int]:
    return reference_generate(tiny_model(name), prompt_of(PROMPT_LEN), NEW)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_generate(name: str, page_size: int) -> None:
    rig = Sequencer.of(tiny_model(name), page_size=page_size, slots=512)
    assert rig.generate(prompt_of(PROMPT_LEN), NEW, chunk=64) == _reference(name)
    assert len(set(_reference(name))) > 2, "a constant answer would prove nothing"


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_a_bare_loop_bit_for_bit(name: str) -> None:
    prompt, model = prompt_of(PROMPT_LEN), tiny_model(name)
    rig = Sequencer.of(model, page_size=16)
    tables = rig.new_tables()
    rig.prefill(tables, prompt[:140], 70)
    logits = rig.step(tables, prompt[140:141], 140)
    expected = bare_logits(model, [prompt[:70], prompt[70:140], prompt[140:141]])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", PRESETS)
def test_slots_and_page_size_do_not_change_a_bit(name: str) -> None:
    seen = []
    for page_size in PAGE_SIZES:
        for seed in (None, 3):
            rig = Sequencer.of(tiny_model(name), page_size=page_size, slots=512, seed=seed)
            tables = rig.new_tables()
            rig.prefill(tables, prompt_of(101), 37)
            seen.append(rig.step(tables, [65], 101))
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("name", MODELS)
def test_batched_decode_of_different_lengths_equals_single(name: str) -> None:
    """Lengths shorter and longer than the windows, and a prompt of one token."""
    model = tiny_model(name)
    batched, single = (Sequencer.of(model, page_size=16, slots=512, seed=s) for s in (0, 1))
    lengths = [0, 1, 17, 40, 131]
    held = [(batched.new_tables(), single.new_tables()) for _ in lengths]
    for seed, (length, pair) in enumerate(zip(lengths, held, strict=True)):
        for rig, tables in zip((batched, single), pair, strict=True):
            rig.prefill(tables, prompt_of(length, seed), 64)
    tokens = [40, 50, 60, 70, 80]
    for _ in range(5):
        seqs = []
        for token, start, (tables, _) in zip(tokens, lengths, held, strict=True):
            batched.prepare(tables, start, start + 1)
            seqs.append(SeqInput([token], start, tables))
        together = batched.runner.forward(seqs)
        alone = torch.stack([
            single.step(tables, [token], start)
            for token, start, (_, tables) in zip(tokens, lengths, held, strict=True)
        ])  # fmt: skip
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
        tokens = together.argmax(-1).tolist()
        assert tokens == alone.argmax(-1).tolist()
        lengths = [length + 1 for length in lengths]


def _clone_into_fresh_slots(rig: Sequencer, tables: list[Any]) -> list[Any]:
    """Tables whose slots hold the same bytes as those of `tables`, elsewhere."""
    moved: list[Any] = []
    for table, pool in zip(tables, rig.stack.device, strict=True):
        old = table.slots if isinstance(table, PageTable) else np.array([table.write], np.int32)
        new = rig.take(len(old))
        pool.write_records(new, pool.read_records(old))
        if isinstance(table, PageTable):
            copy = PageTable(table.first_page)
            copy.append(new)
            moved.append(copy)
        else:
            moved.append(StateTable(read=None, write=int(new[0]), spare=int(rig.take(1)[0])))
    return moved


@pytest.mark.parametrize("name", MODELS)
def test_logits_from_restored_slots_are_bit_equal(name: str) -> None:
    prompt = prompt_of(120)
    rig = Sequencer.of(tiny_model(name), page_size=16)
    tables = rig.new_tables()
    rig.prefill(tables, prompt[:96], 48)
    restored = _clone_into_fresh_slots(rig, tables)
    first = rig.step(tables, prompt[96:], 96)
    second = rig.step(restored, prompt[96:], 96)
    assert torch.equal(first, second)
    assert torch.equal(rig.step(tables, [70], 120), rig.step(restored, [70], 120))


@pytest.mark.parametrize("name", [*PRESETS, "gpt-oss", "qwen3-next"])
def test_every_buffer_is_really_read(name: str) -> None:
    """One changed element in any buffer, at a place the next token sees, changes its logits."""
    rig = Sequencer.of(tiny_model(name), page_size=16)
    tables = rig.new_tables()
    rig.prefill(tables, prompt_of(90), 45)
    rig.prepare(tables, 90, 91)
    expected = rig.runner.forward([SeqInput([65], 90, tables)])
    for part, table, pool in zip(rig.stack.spec.components, tables, rig.stack.device, strict=True):
        for buffer in part.buffers:
            tensor = pool.buffers[buffer.layer, buffer.name]
            if isinstance(table, PageTable):
                slot = table.slots[80 // 16 - table.first_page]
                entry = tensor[slot, 80 % 16]
            else:
                entry = tensor[table.read]
            before = entry.clone()
            entry.view(-1)[-1] += 3.0
            changed = rig.runner.forward([SeqInput([65], 90, tables)])
            assert not torch.equal(changed, expected), f"{part.name} {buffer}"
            entry.copy_(before)
    assert torch.equal(rig.runner.forward([SeqInput([65], 90, tables)]), expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*PRESETS, "gpt-oss", "qwen3-next"])
def test_only_own_slots_are_written(name: str, batch: int) -> None:
    """The read state keeps its bytes (it may be the tree's), and so does every other slot."""
    rig = Sequencer.of(tiny_model(name), page_size=16)
    seqs = []
    for i in range(batch):
        tables = rig.new_tables()
        rig.prefill(tables, prompt_of(30 + i), 64)
        rig.prepare(tables, 30 + i, 31 + i)
        seqs.append(SeqInput([65], 30 + i, tables))
    everything = np.arange(256, dtype=np.int32)
    before = [pool.read_records(everything) for pool in rig.stack.device]
    rig.runner.forward(seqs)
    for i, (part, pool) in enumerate(zip(rig.stack.spec.components, rig.stack.device, strict=True)):
        changed = set(np.flatnonzero((pool.read_records(everything) != before[i]).any(1)))
        last = [seq.tables[i] for seq in seqs]
        own = {int(t.slots[-1]) if isinstance(t, PageTable) else t.write for t in last}
        assert changed == (own if part.buffers else set())


@pytest.mark.parametrize("name", MODELS)
def test_stale_bytes_in_pages_never_reach_a_result(name: str) -> None:
    """Whatever a slot's former owner left behind, even NaN, other requests answer as ever."""
    answers = []
    for poison in (0.0, float("nan")):
        rig = Sequencer.of(tiny_model(name), page_size=16)
        for pool in rig.stack.device:
            for tensor in pool.buffers.values():
                tensor.fill_(poison)
        seqs = []
        for length in (0, 21, 50):
            tables = rig.new_tables()
            rig.prefill(tables, prompt_of(length), 32)
            rig.prepare(tables, length, length + 1)
            seqs.append(SeqInput([65], length, tables))
        answers.append(rig.runner.forward(seqs))
    assert torch.equal(answers[0], answers[1])


class LateBytes:
    """A load-back that fills layer `i`'s bytes when layer `i` asks for them, not before."""

    def __init__(self, rig: Sequencer, tables: list[Any]) -> None:
        self.asked: list[int] = []
        self._missing: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for part, table, pool in zip(
            rig.stack.spec.components, tables, rig.stack.device, strict=True
        ):
            slots = table.slots if isinstance(table, PageTable) else [table.write]
            for buffer in part.buffers:
                for slot in slots:
                    place = pool.buffers[buffer.layer, buffer.name][int(slot)]
                    self._missing.setdefault(buffer.layer, []).append((place, place.clone()))
                    place.fill_(9.0)

    def wait_layer(self, layer: int) -> None:
        self.asked.append(layer)
        for place, content in self._missing.pop(layer, []):
            place.copy_(content)


class Failing:
    """A load-back that fails at a layer."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def wait_layer(self, layer: int) -> None:
        if layer == self._layer:
            raise CopyError("load-back 7 failed: checksum")


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_waits_for_its_own_bytes(name: str) -> None:
    prompt = prompt_of(100)
    rig = Sequencer.of(tiny_model(name), page_size=16)
    tables = rig.new_tables()
    rig.prefill(tables, prompt[:64], 64)
    restored = _clone_into_fresh_slots(rig, tables)
    expected = rig.step(tables, prompt[64:], 64)
    ticket = LateBytes(rig, restored)
    assert torch.equal(rig.step(restored, prompt[64:], 64, ticket), expected)
    assert sorted(set(ticket.asked)) == list(range(rig.stack.spec.num_layers))
    assert ticket.asked == sorted(ticket.asked)


@pytest.mark.parametrize("name", PRESETS)
def test_a_failed_load_back_surfaces_and_the_runner_goes_on(name: str) -> None:
    rig = Sequencer.of(tiny_model(name), page_size=16)
    tables = rig.new_tables()
    rig.prefill(tables, prompt_of(64), 64)
    with pytest.raises(CopyError, match="checksum"):
        rig.step(tables, prompt_of(20, 2), 64, Failing(layer=2))
    fresh = rig.new_tables()
    again = rig.prefill(fresh, prompt_of(80), 40)
    assert torch.equal(
        again, bare_logits(tiny_model(name), [prompt_of(80)[:40], prompt_of(80)[40:]])
    )


def test_several_sequences_take_one_token_each() -> None:
    rig = Sequencer.of(tiny_model("tiny-full"), page_size=16)
    seqs = []
    for tokens in ([1, 2], [3]):
        tables = rig.new_tables()
        rig.prepare(tables, 0, len(tokens))
        seqs.append(SeqInput(tokens, 0, tables))
    with pytest.raises(ValueError, match="one new token each"):
        rig.runner.forward(seqs)
    with pytest.raises(ValueError, match="one new token each"):
        rig.runner.forward([])


def test_a_table_that_does_not_cover_the_forward_is_refused() -> None:
    rig = Sequencer.of(tiny_model("tiny-swa"), page_size=16)
    tables = rig.new_tables()
    rig.prefill(tables, prompt_of(100), 100)
    with pytest.raises(LeaseError, match=r"covers pages \[0, 7\).*needs \[0, 8\)"):
        rig.runner.forward([SeqInput([1] * 20, 100, tables)])
    tables[1].drop_before(4)
    with pytest.raises(LeaseError, match=r"covers pages \[4, 7\).*needs \[2, 7\)"):
        rig.runner.forward([SeqInput([1], 100, tables)])


def test_a_state_that_does_not_fit_the_position_is_refused() -> None:
    rig = Sequencer.of(tiny_model("tiny-linear"), page_size=16)
    tables = rig.new_tables()
    rig.prepare(tables, 0, 16)
    for table in (StateTable(read=None, write=3), StateTable(read=3, write=None)):
        with pytest.raises(LeaseError):
            rig.runner.forward([SeqInput([1], 5, [tables[0], table])])


def test_specs_that_no_layer_class_reads_are_refused() -> None:
    odd = [
        Component("full", Full(), (Buffer("k", 0, (2, 4)), Buffer("index", 0, (4,)))),
        Component("state", Point(), (Buffer("ssm", 0, (2, 4)),)),
    ]
    for parts in ((odd[0],), (Component("full", Full()), odd[1])):
        spec = CacheSpec(parts, 16)
        with pytest.raises(SpecError, match="no cache layer reads"):
            BanyanCache(spec, make_stack(spec, 4).device, 1)
    model = tiny_model("tiny-full")
    deep = CacheSpec((Component("full", Full(), (Buffer("k", 9, (2, 4)), Buffer("v", 9, (2, 4)))),))
    with pytest.raises(SpecError, match="10 layers"):
        Runner(model, deep, make_stack(deep, 4))
    first, second = CacheSpec.from_config(model.config).components[0].buffers, model.config
    window = Component("window", Window(8), first[:2])
    rest = Component("full", Full(), first[2:])
    assert second.layer_types[0] == second.layer_types[1]
    with pytest.raises(
        SpecError, match=r"layer 0, buffer 'k': the model keeps .* full, the spec says .* window"
    ):
        Runner(model, CacheSpec((rest, window)), make_stack(CacheSpec((rest, window)), 4))


@cache
def _hybrid_model() -> Any:
    config = FalconH1Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_state=16,
        mamba_chunk_size=32,
        initializer_range=0.3,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _hybrid_spec(model: Any) -> CacheSpec:
    """A hand-written spec: attention and a state in every layer."""
    held = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[1, 2]]), cache=held, use_cache=True)
    paged, states = [], []
    for i, layer in enumerate(held.layers):
        entry = (layer.keys.shape[1], layer.keys.shape[3])
        paged += [Buffer("k", i, entry), Buffer("v", i, entry)]
        states += [
            Buffer("conv", i, tuple(layer.conv_states[0].shape[1:])),
            Buffer("recurrent", i, tuple(layer.recurrent_states[0].shape[1:])),
        ]
    return CacheSpec(
        (Component("full", Full(), tuple(paged)), Component("state", Point(), tuple(states))), 16
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_and_state_compose_in_one_layer(batch: int) -> None:
    """Falcon H1 runs from a hand-written spec; its states change in place, the cached one not."""
    model = _hybrid_model()
    spec = _hybrid_spec(model)
    stack = make_stack(spec, 128)
    rig = Sequencer(Runner(model, spec, stack), stack, np.arange(128, dtype=np.int32)[::-1])
    assert all(isinstance(layer, HybridLayer) for layer in rig.runner._cache.layers)
    held, expected = [], []
    for i in range(batch):
        prompt = prompt_of(40 + 7 * i, seed=i)
        tables = rig.new_tables()
        rig.prefill(tables, prompt, 32)
        held.append((tables, len(prompt)))
        chunks = [prompt[at : at + 32] for at in range(0, len(prompt), 32)]
        expected.append(bare_logits(model, [*chunks, [65], [66]]))
    for token in (65, 66):
        seqs = []
        for i, (tables, start) in enumerate(held):
            rig.prepare(tables, start, start + 1)
            seqs.append(SeqInput([token], start, tables))
            held[i] = (tables, start + 1)
        logits = rig.runner.forward(seqs)
        again = rig.runner.forward(seqs)
        assert torch.equal(logits, again), "the state that was read has changed"
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=1e-4)
