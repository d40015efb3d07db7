"""An engine in this process, and the plain `transformers` answers to compare it with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from banyan.engine.build import build_core
from banyan.engine.messages import GenerateRequest, Output, Sampling, Usage
from banyan.engine.models import LoadedModel
from banyan.options import ServeOptions
from banyan.tree import Tier
from tests.support.plain import reference_generate

MIB = 1 << 20


class Engine:
    """An `EngineCore` and what tests do with it.

    Args:
        loaded: the model; every engine of a test shares it.
        options: fields of `ServeOptions` other than the model.
    """

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        settings: dict[str, Any] = {
            "device_bytes": 160 * MIB,
            "host_bytes": 320 * MIB,
            "load_back_threshold": 1,
            **options,
        }
        self.core = build_core(ServeOptions(model=loaded.name, **settings), loaded)
        self.cache = self.core.cache
        self.cache.controller.options = _without_weighing(self.cache.controller.options)
        self.first_logits: list[torch.Tensor] = []
        self._serial = 0

    def answer(
        self, prompts: Sequence[list[int]], max_tokens: int, **sampling: Any
    ) -> list[tuple[list[int], Usage]]:
        """Submit all prompts at once; tokens and receipt of each, in the order given."""
        news: dict[str, list[Output]] = {}
        for prompt in prompts:
            self._serial += 1
            request_id = f"r{self._serial}"
            news[request_id] = []
            wanted = Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling)
            self.core.submit(GenerateRequest(request_id=request_id, prompt=prompt, sampling=wanted))
        while self.core.has_work:
            for output in self.core.step():
                news[output.request_id].append(output)
        return [_joined(outputs) for outputs in news.values()]

    def settle(self) -> None:
        """Wait until no copy runs."""
        while self.cache.controller.operations:
            self.cache.poll()

    def evict_device(self) -> None:
        """Let everything cached go from the device; what host has stays."""
        self.settle()
        pools = self.cache.stack.device_slots
        index = self.cache.tree.device
        counts = [pool.free_count + index.evictable[c] for c, pool in enumerate(pools)]
        slots = self.cache.controller.reserve(Tier.DEVICE, counts)
        assert isinstance(slots, list), slots
        self.cache.controller.free(Tier.DEVICE, slots)
        assert not any(index.evictable) and not any(index.protected)

    def close(self) -> None:
        """Check every invariant, then stop."""
        self.settle()
        self.core.check()
        self.core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _without_weighing(options: Any) -> Any:
    """Load back whatever can be: tests say where data comes from, not the machine's speed."""
    from dataclasses import replace

    return replace(options, weigh_cost=False)


def _joined(outputs: list[Output]) -> tuple[list[int], Usage]:
    last = outputs[-1]
    assert last.finish_reason == "length", last
    assert last.usage is not None
    return [token for output in outputs for token in output.tokens], last.usage


def prompts_of(
    vocabulary: Sequence[int], groups: int, each: int, shared: int, own: int, seed: int = 0
) -> list[list[int]]:
    """`groups * each` prompts: those of a group share a prefix of about `shared` tokens and go on
    for up to `own` tokens of their own. Lengths vary, so that pages are cut everywhere."""
    source = random.Random(seed)
    prompts = []
    for _ in range(groups):
        prefix = source.choices(vocabulary, k=shared + source.randrange(-shared // 4, shared // 4))
        for _ in range(each):
            tail = source.choices(vocabulary, k=source.randrange(1, own))
            prompts.append([*prefix, *tail])
    source.shuffle(prompts)
    return prompts


def plain_answers(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """What `transformers` itself answers greedily with a cache of its own."""
    return [reference_generate(model, prompt, max_tokens) for prompt in prompts]
