"""Puts an engine together from options: model, spec, pools, copy engine, cache, scheduler.

Owns the wiring and nothing else; everything it makes is handed to the `EngineCore`. Called once, in
the process that will run the engine, on the thread that will own it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from banyan.cache import PrefixCache
from banyan.engine.core import EngineCore, Limits
from banyan.engine.cutpoints import DEFAULT_CHECKPOINTS
from banyan.engine.inspect import component_rows
from banyan.engine.models import LoadedModel, load_model
from banyan.engine.runner import Runner
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.engine.selftest import batches_alike, check_continuation
from banyan.engine.served_model import ServedModel
from banyan.observe import observe_model
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

log = logging.getLogger("banyan.engine")

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
    spec = CacheSpec.from_layers(observe_model(loaded.model), options.page_size)
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
    runner = Runner(loaded.model, spec, stack)
    vocab_size = int(loaded.config.vocab_size)
    check_continuation(cache, runner, vocab_size, loaded.dtype)
    runner.batches = batches_alike(cache, runner, vocab_size, loaded.dtype)
    for pool in stack.device_slots:  # the trials have mixed up slots that ascend in a fresh pool,
        pool.reset()  # and pages in ascending slots are read without a copy
    if not runner.batches:
        log.warning("this model ignores the positions it is given: it decodes one by one")
    model = ServedModel(runner, loaded.tokenizer, options.seed)
    scheduler = Scheduler(
        cache,
        model,
        SchedulerOptions(
            chunk=options.chunk,
            state_interval=options.state_interval,
            checkpoints=options.checkpoints or _checkpoint_budget(plan),
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


def _checkpoint_budget(plan: SizePlan) -> int:
    """Checkpoints that one prompt may take: a quarter of what the scarcest device pool holds, so
    that one long prompt cannot drive out those of all others."""
    rows = [row for row in plan.table_rows() if row.tier == "device"]
    held = [row.states if row.windows is None else row.windows for row in rows]
    scarcest = min((n for n in held if n is not None), default=4 * DEFAULT_CHECKPOINTS)
    return max(2, min(DEFAULT_CHECKPOINTS, scarcest // 4))


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
        "component_rows": [asdict(row) for row in component_rows(spec)],
        "size_rows": [asdict(row) for row in plan.table_rows()],
    }
