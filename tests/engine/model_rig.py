"""Pools, page tables and bare transformers loops for the model-side tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from banyan.engine.presets import PRESETS, SEED, VOCAB_SIZE, build_preset, randomize
from banyan.engine.runner import Runner, SeqInput
from banyan.lease import PageTable, StateTable
from banyan.pools.allocator import SlotAllocator
from banyan.pools.assembler import PoolStack
from banyan.pools.device import DevicePool
from banyan.spec import CacheSpec
from tests.support.plain import reference_generate as reference_generate

torch.set_num_threads(1)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=48),
    "gpt-oss": lambda: GptOssConfig(
        **_SHAPE, sliding_window=32, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **_SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
}
"""Tiny configs of families that are not presets."""

MODELS = [*PRESETS, *CONFIGS]


@cache
def tiny_model(name: str) -> Any:
    """A preset, or a randomly initialised model of `CONFIGS`; shared, so never to be changed."""
    if name in PRESETS:
        return build_preset(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    randomize(model)
    return model.eval()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Random printable bytes."""
    return [int(t) for t in np.random.default_rng(seed).integers(32, 127, length)]


def make_stack(spec: CacheSpec, slots: int) -> PoolStack:
    """A stack with `slots` slots in every device pool and no host tier."""
    parts = spec.components
    return PoolStack(
        spec=spec,
        device=[DevicePool(c, slots, spec.page_size) for c in parts],
        host=[],
        device_slots=[SlotAllocator(slots, c.name) for c in parts],
        host_slots=[SlotAllocator(0, c.name) for c in parts],
    )


@dataclass
class Sequencer:
    """Hands out slots to sequences in a shuffled or an ascending order, and runs them.

    Window pages out of reach are dropped and states alternate between two slots, as leases do.
    """

    runner: Runner
    stack: PoolStack
    order: np.ndarray

    @classmethod
    def of(cls, model: Any, *, page_size: int, slots: int = 256, seed: int | None = 0) -> Sequencer:
        """A rig for `model`; `seed` None hands out ascending slots."""
        spec = CacheSpec.from_config(model.config, page_size)
        stack = make_stack(spec, slots)
        order = np.arange(slots, dtype=np.int32)
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        return cls(Runner(model, spec, stack), stack, order)

    def take(self, n: int) -> np.ndarray:
        """The next n slots (the same ids serve every component)."""
        assert n <= len(self.order), "the rig has too few slots"
        taken, self.order = self.order[:n], self.order[n:]
        return taken

    def new_tables(self) -> list[PageTable | StateTable]:
        """Empty tables for one sequence."""
        parts = self.stack.spec.components
        return [PageTable() if c.reach.page_shaped else StateTable() for c in parts]

    def prepare(self, tables: Sequence[PageTable | StateTable], start: int, stop: int) -> None:
        """Give the tables slots for tokens [start, stop)."""
        page = self.stack.spec.page_size
        for table, part in zip(tables, self.stack.spec.components, strict=True):
            if isinstance(table, PageTable):
                table.drop_before(part.reach.first_needed(start - start % page, page) // page)
                table.append(self.take(-(-stop // page) - table.stop_page))
            else:
                if table.read is None and table.write is None:
                    table.write, table.spare = (int(s) for s in self.take(2))
                elif start > 0:
                    table.read, table.write, table.spare = table.write, table.spare, table.write

    def step(self, tables: Any, tokens: Sequence[int], start: int, ticket: Any = None) -> Any:
        """Forward one sequence; float32[vocabulary]."""
        self.prepare(tables, start, start + len(tokens))
        return self.runner.forward([SeqInput(tokens, start, tables, ticket)])[0]

    def prefill(self, tables: Any, tokens: Sequence[int], chunk: int, start: int = 0) -> Any:
        """Forward `tokens` in chunks; logits of the last, None without tokens."""
        logits = None
        for at in range(0, len(tokens), chunk):
            logits = self.step(tables, tokens[at : at + chunk], start + at)
        return logits

    def generate(self, prompt: Sequence[int], new: int, chunk: int) -> list[int]:
        """Greedy answer of `new` tokens."""
        tables = self.new_tables()
        logits = self.prefill(tables, prompt, chunk)
        out = [int(logits.argmax())]
        while len(out) < new:
            logits = self.step(tables, out[-1:], len(prompt) + len(out) - 1)
            out.append(int(logits.argmax()))
        return out


def bare_logits(model: Any, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of the last token after feeding `chunks` through a `DynamicCache`."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for chunk in chunks:
            ids = torch.tensor([list(chunk)])
            logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float()
