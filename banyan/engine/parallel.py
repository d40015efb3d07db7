"""What every rank of a sharded model keeps the same copy of: found by shape, proven by bytes.

Such buffers need one copy on host and in storage, not one per rank. Owns the finding of them. Knows
no request. Called by all ranks, at start, on the thread that will run the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash

from banyan.engine.plans import SeqInput
from banyan.engine.runner import Runner
from banyan.engine.selftest import fixed_tokens
from banyan.errors import SpecError
from banyan.lease import PageTable, StateTable
from banyan.observe import observe_config
from banyan.pools.allocator import SlotAllocator
from banyan.pools.assembler import PoolStack
from banyan.pools.device import DevicePool
from banyan.spec import Buffer, CacheSpec

Gather = Callable[[bytes], list[bytes]]
"""Gives every rank what each rank gave, in rank order."""

Place = tuple[int, str]
"""A buffer: its layer and name."""

_TRIAL_TOKENS = 24


def replicated_buffers(model: Any, spec: CacheSpec, gather: Gather) -> frozenset[Place]:
    """The buffers of which every rank keeps an equal copy.

    Candidates have the shape that they have in the whole model. Fixed tokens are then run through
    the sharded model and pools of its own, and those whose bytes are the same on all ranks are it.

    Args:
        model: sharded.
        spec: what this rank's part of it keeps, `CacheSpec.from_layers(observe_model(model), page)`
        gather: collective; called once.

    Returns:
        (layer, name) of each; the same set on every rank. With one rank, all buffers.

    Raises:
        SpecError: the ranks do not keep buffers of the same shapes, or the trial run failed.

    Cost: two forwards of 24 tokens, more where a layer keeps one entry for many tokens.
    """
    digests = _digests(model, spec, _whole_shapes(model))
    layout = [[c.name, str(c.reach), [_line(b) for b in c.buffers]] for c in spec.components]
    answers = [json.loads(one) for one in gather(json.dumps([layout, digests]).encode())]
    for rank, (other, _) in enumerate(answers):
        if other != answers[0][0]:
            raise SpecError(
                f"rank {rank} keeps {other}, rank 0 {answers[0][0]}: the ranks' pools must have "
                "the same slots, so their buffers must have the same shapes"
            )
    first = answers[0][1]
    alike = (key for key in first if all(each.get(key) == first[key] for _, each in answers))
    return frozenset((int(layer), name) for layer, name in (key.split(" ") for key in alike))


def mark_replicated(spec: CacheSpec, found: Iterable[Place]) -> CacheSpec:
    """`spec` with `replicated` set on the buffers of `found`, and on no other."""
    places = frozenset(found)
    parts = []
    for part in spec.components:
        buffers = tuple(replace(b, replicated=(b.layer, b.name) in places) for b in part.buffers)
        parts.append(replace(part, buffers=buffers))
    return replace(spec, components=tuple(parts))


def _line(buffer: Buffer) -> str:
    return f"{buffer.layer} {buffer.name} {buffer.dtype}{list(buffer.shape)}/{buffer.stride}"


def _whole_shapes(model: Any) -> dict[Place, tuple[int, ...]]:
    """By buffer, its shape in the model before it was sharded."""
    dtype = str(model.dtype).removeprefix("torch.")
    layers = observe_config(model.config.get_text_config(), dtype)
    return {(at, held.name): held.shape for at, layer in enumerate(layers) for held in layer.held}


def _digests(model: Any, spec: CacheSpec, whole: Mapping[Place, tuple[int, ...]]) -> dict[str, str]:
    """By layer and name of each candidate, the digest of what a trial run left in it."""
    stack = _run_trial(model, spec)
    found = {}
    for pool in stack.device:
        for b in pool.component.buffers:
            if whole.get((b.layer, b.name)) == b.shape:
                data = pool.buffers[b.layer, b.name].cpu().view(-1).view(torch.uint8).numpy()
                found[f"{b.layer} {b.name}"] = xxhash.xxh3_128_hexdigest(data.data)
    return found


def _run_trial(model: Any, spec: CacheSpec) -> PoolStack:
    """Pools with room for one short sequence, after the forward of one."""
    page = spec.page_size
    widest = max((b.stride for c in spec.components for b in c.buffers), default=1)
    count = max(_TRIAL_TOKENS, 2 * widest)
    pages = -(-count // page)
    slots = [pages if c.reach.page_shaped else 1 for c in spec.components]
    pools = [
        DevicePool(c, n, page, model.device) for c, n in zip(spec.components, slots, strict=True)
    ]
    free = [SlotAllocator(pool.slots, pool.component.name) for pool in pools]
    stack = PoolStack(spec, pools, [], free, [SlotAllocator(0, c.name) for c in spec.components])
    tables: list[PageTable | StateTable] = []
    for part in spec.components:
        if part.reach.page_shaped:
            table = PageTable()
            table.append(np.arange(pages, dtype=np.int32))
            tables.append(table)
        else:
            tables.append(StateTable(write=0))
    tokens = fixed_tokens(int(model.config.get_text_config().vocab_size), count)
    Runner(model, spec, stack).forward([SeqInput(tokens, 0, tables)])
    return stack
