"""An engine in this process, and the plain `transformers` answers to compare it with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import DynamicCache

from banyan.engine.build import build_core
from banyan.engine.messages import GenerateRequest, Output, Sampling, Usage
from banyan.engine.models import LoadedModel
from banyan.engine.runner import Runner
from banyan.observe import own_cache_class
from banyan.options import ServeOptions
from banyan.tiers.ops import CopyKind
from banyan.tree import Tier
from banyan.tree.tier_index import TierIndex
from tests.support.plain import reference_generate

MIB = 1 << 20


class Halved(NamedTuple):
    """Slots that could be evicted from the device, by component: those that went, and the rest."""

    gone: list[int]
    left: list[int]


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
        index = self._evict(lambda evictable: evictable)
        assert not any(index.evictable) and not any(index.protected)

    def evict_half(self) -> Halved:
        """Let half of what may go leave the device, of each component, in the order of eviction."""
        self.settle()
        before = list(self.cache.tree.device.evictable)
        left = list(self._evict(lambda evictable: evictable // 2).evictable)
        return Halved([n - m for n, m in zip(before, left, strict=True)], left)

    def _evict(self, share: Callable[[int], int]) -> TierIndex:
        """Free `share` of the evictable slots of each component, and fill them with bytes that make
        NaNs: only a load-back brings back what was there."""
        self.settle()
        pools, index = self.cache.stack.device_slots, self.cache.tree.device
        was_free = [pool.is_free() for pool in pools]
        counts = [pool.free_count + share(index.evictable[c]) for c, pool in enumerate(pools)]
        slots = self.cache.controller.reserve(Tier.DEVICE, counts)
        assert isinstance(slots, list), slots
        for pool, taken, free in zip(self.cache.stack.device, slots, was_free, strict=True):
            freed = torch.from_numpy(taken[~free[taken]]).long()
            for stack in pool.stacks:
                stack[:, freed] = 0xFF
        self.cache.controller.free(Tier.DEVICE, slots)
        return index

    @property
    def loaded_bytes(self) -> int:
        """Bytes that load-backs have brought so far."""
        self.settle()
        return self.cache.controller.totals[CopyKind.LOAD_BACK].moved_bytes

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


@contextmanager
def recorded_forwards() -> Iterator[list[torch.Tensor]]:
    """The logits of every forward that is run meanwhile, in order."""
    seen: list[torch.Tensor] = []
    forward = Runner.forward

    def watched(self: Runner, seqs: Any) -> torch.Tensor:
        logits = forward(self, seqs)
        seen.append(logits.clone())
        return logits

    with mock.patch.object(Runner, "forward", watched):
        yield seen


class Restored(NamedTuple):
    """Answers to prompts whose beginnings were found on one tier, and the logits they came from."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


def restored_from(
    where: str, loaded: LoadedModel, known: Sequence[list[int]], **options: Any
) -> Restored:
    """Answer `known`, then prompts that part from them at their last token, from one tier.

    Both tiers keep the last page boundary before that token, and so give the same cut points (the
    device alone may have the state at the prompt's very end). One request at a time.
    """
    asked = [
        [*prompt[:-1], prompt[-1] % 94 + 32, *range(40 + i, 60 + i)]
        for i, prompt in enumerate(known)
    ]
    with Engine(loaded, max_running=1, **options) as engine:
        engine.answer(known, 4)
        if where == "host":
            engine.evict_device()
        with recorded_forwards() as logits:
            answers = engine.answer(asked, 4)
        assert any(usage.host > 0 for _, usage in answers) == (where == "host")
        assert all(usage.host + usage.device > 0 for _, usage in answers)
    return Restored([tokens for tokens, _ in answers], logits)


def assert_same_bits(one: Restored, other: Restored) -> None:
    """Every forward of the two gave the same logits, bit for bit."""
    assert one.tokens == other.tokens
    assert len(one.logits) == len(other.logits)
    for mine, yours in zip(one.logits, other.logits, strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, yours)


def plain_logits(model: Any, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of all tokens of `chunks`, fed one by one to `transformers` on its own cache.

    Returns:
        float32[tokens, vocabulary].
    """
    own = own_cache_class(model.config)
    cache = DynamicCache(config=model.config) if own is None else own()
    rows: list[torch.Tensor] = []
    start = 0
    with torch.inference_mode():
        for chunk in chunks:
            stop = start + len(chunk)
            out = model(
                input_ids=torch.tensor([list(chunk)]),
                position_ids=torch.arange(start, stop)[None],
                cache=cache,
                use_cache=True,
            )
            rows.append(out.logits[0].float())
            start = stop
    return torch.cat(rows)


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
