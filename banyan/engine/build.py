"""Puts an engine together from options: model, spec, pools, copy engine, cache, scheduler.

Owns the wiring and nothing else; everything it makes is handed to the `EngineCore`. Called once, in
the process that will run the engine, on the thread that will own it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from banyan.cache import PrefixCache
from banyan.engine.core import EngineCore, Limits
from banyan.engine.models import LoadedModel, load_model
from banyan.engine.runner import Runner
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.engine.served_model import ServedModel
from banyan.options import ServeOptions
from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.plan import SizePlan
from banyan.pools.sizing import plan_sizes
from banyan.spec import CacheSpec
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tiers.ops import CopyEngine
from banyan.tiers.stream import StreamCopyEngine
from banyan.tiers.threaded import ThreadedCopyEngine
from banyan.tree import make_policy

Clock = Callable[[], float]


def build_core(
    options: ServeOptions, loaded: LoadedModel | None = None, clock: Clock = time.monotonic
) -> EngineCore:
    """An engine ready for requests.

    Args:
        options: validated.
        loaded: the model, if it is loaded already; else `options.model` is.
        clock: seconds, monotonic.

    Raises:
        ConfigError: an unknown model, or byte budgets too small for it.
        SpecError: a model that no `CacheSpec` can represent.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = loaded or load_model(
        options.model, dtype=options.resolved_dtype or "auto", device=options.device
    )
    spec = CacheSpec.from_config(loaded.config, options.page_size, loaded.dtype)
    plan = plan_sizes(
        spec,
        device_bytes=options.device_bytes,
        host_bytes=options.host_total,
        max_running=options.max_running,
        chunk=options.chunk,
        state_interval=options.state_interval,
    )
    stack = assemble(spec, plan, device=options.device)
    cache = _build_cache(options, stack, clock)
    model = ServedModel(Runner(loaded.model, spec, stack), loaded.tokenizer, options.seed)
    scheduler = Scheduler(
        cache,
        model,
        SchedulerOptions(
            chunk=options.chunk,
            state_interval=options.state_interval,
            max_running=options.max_running,
            order=options.order,
            cache=options.cache,
            eos_ids=loaded.eos_ids,
        ),
        clock,
        torch.cuda.synchronize if options.device == "cuda" else lambda: None,
    )
    limits = Limits(
        vocab_size=int(loaded.config.vocab_size),
        model_tokens=loaded.max_length,
        pool_tokens=cache.capacity_tokens(),
        open_requests=options.max_running + options.max_waiting,
    )
    return EngineCore(scheduler, cache, limits, _info(options, loaded, spec, plan))


def _build_cache(options: ServeOptions, stack: PoolStack, clock: Clock) -> PrefixCache:
    engine: CopyEngine
    if options.device == "cuda":
        engine = StreamCopyEngine(stack)
    else:
        engine = ThreadedCopyEngine(stack, clock=clock)
    tiers = TierOptions(
        write_policy=WritePolicy(options.resolved_write_policy),
        load_back_threshold=options.load_back_threshold,
        verify=options.verify == "all",
    )
    return PrefixCache(stack, engine, tiers, make_policy(options.evict_policy), clock)


def _info(
    options: ServeOptions, loaded: LoadedModel, spec: CacheSpec, plan: SizePlan
) -> dict[str, object]:
    """What a front end shows and needs; plain data."""
    return {
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "device": options.device,
        "dtype": loaded.dtype,
        "page_size": spec.page_size,
        "chunk": options.chunk,
        "state_interval": options.state_interval,
        "max_running": options.max_running,
        "write_policy": options.resolved_write_policy,
        "evict_policy": options.evict_policy,
        "verify": options.verify,
        "cache": options.cache,
        "components": {c.name: str(c.reach) for c in spec.components},
        "size_rows": [asdict(row) for row in plan.table_rows()],
    }
