"""Puts an engine together from options: model, spec, pools, copy engine, cache, scheduler.

Owns the wiring and nothing else; everything it makes is handed to the `EngineCore`. Called once, in
the process that will run the engine, on the thread that will own it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import msgspec
import torch

from banyan.cache import PrefixCache
from banyan.engine.core import EngineCore, Limits
from banyan.engine.cutpoints import DEFAULT_CHECKPOINTS
from banyan.engine.inspect import component_rows
from banyan.engine.models import LoadedModel, load_config, load_model
from banyan.engine.parallel import mark_replicated, replicated_buffers
from banyan.engine.ports import Model
from banyan.engine.rank_context import RankContext
from banyan.engine.rank_process import follow_from_environment, lead
from banyan.engine.ranked import RankedCore
from banyan.engine.runner import Runner
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.engine.selftest import batches_alike, check_continuation
from banyan.engine.served_model import ServedModel
from banyan.engine.sharding import check_ranks
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

RANK_BUILD = "banyan.engine.build:build_rank"


def build_engine(options: ServeOptions) -> EngineCore | RankedCore:
    """The engine that `options` ask for, on as many ranks. Raises as `build_core` and `lead`."""
    if options.tp == 1:
        return build_core(options)
    check_ranks(load_config(options.model).config, options.tp)  # before N processes find it out
    return lead(RANK_BUILD, msgspec.json.encode(options), options.tp, device=options.device)


def follow_if_told(options: ServeOptions) -> bool:
    """Be a rank that follows, where the environment says so; see `follow_from_environment`."""
    given = msgspec.json.encode(options)
    return follow_from_environment(RANK_BUILD, given, options.tp, options.device)


def build_rank(options: bytes, ranks: RankContext) -> EngineCore:
    """One rank of an engine: what `lead` has every rank call.

    Args:
        options: of `ServeOptions`, JSON.
    """
    return build_core(msgspec.json.decode(options, type=ServeOptions), ranks=ranks)


def build_core(
    options: ServeOptions,
    loaded: LoadedModel | None = None,
    clock: Clock = time.monotonic,
    ranks: RankContext | None = None,
) -> EngineCore:
    """An engine ready for requests, or this process's rank of one.

    Args:
        options: validated.
        loaded: the model, if it is loaded already; else `options.model` is.
        clock: seconds, monotonic; with ranks theirs is used.
        ranks: this process's place among the ranks; None when there is one.

    Raises:
        ConfigError: an unknown model, or byte budgets too small for it.
        SpecError: a model that no `CacheSpec` can represent.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = loaded or _load(options, ranks)
    clock = ranks.clock if ranks is not None else clock
    spec = _spec(options, loaded, ranks)
    plan = _plan(options, spec, ranks)
    pin = options.device == "cuda"
    shared = ranks.sharing(pin) if ranks is not None and plan.host else None
    stack = assemble(spec, plan, device=options.device, shared=shared)
    cache = _build_cache(options, stack, clock, ranks)
    runner = Runner(loaded.model, spec, stack)
    vocab_size = int(loaded.config.vocab_size)
    check_continuation(cache, runner, vocab_size, loaded.dtype)
    runner.batches = batches_alike(cache, runner, vocab_size, loaded.dtype)
    for pool in stack.device_slots:  # the trials have mixed up slots that ascend in a fresh pool,
        pool.reset()  # and pages in ascending slots are read without a copy
    if not runner.batches:
        log.warning("this model ignores the positions it is given: it decodes one by one")
    model: Model = ServedModel(runner, loaded.tokenizer, options.seed)
    if ranks is not None:
        model = ranks.model(model)
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
        None if ranks is None else ranks.pace,
    )
    limits = Limits(
        vocab_size=int(loaded.config.vocab_size),
        model_tokens=loaded.max_length,
        pool_tokens=cache.capacity_tokens(),
        open_requests=options.max_running + options.max_waiting,
    )
    return EngineCore(scheduler, cache, limits, _info(options, loaded, spec, plan))


def _load(options: ServeOptions, ranks: RankContext | None) -> LoadedModel:
    """The model, or this rank's part of it."""
    loaded = load_model(
        options.model,
        dtype=options.resolved_dtype or "auto",
        device=options.device,
        ranks=options.tp,
        rank=ranks.rank if ranks else 0,
    )
    if ranks is not None:
        ranks.fabric.wait_for_all("loaded")
    return loaded


def _spec(options: ServeOptions, loaded: LoadedModel, ranks: RankContext | None) -> CacheSpec:
    """What the model keeps, or this rank's part of it, with what all ranks keep alike marked."""
    spec = CacheSpec.from_layers(observe_model(loaded.model), options.page_size)
    if ranks is None:
        return spec
    return mark_replicated(spec, replicated_buffers(loaded.model, spec, ranks.fabric.gather))


def _plan(options: ServeOptions, spec: CacheSpec, ranks: RankContext | None) -> SizePlan:
    """Slots for every pool; with ranks, those of the rank that has room for the fewest."""
    local = 1 if ranks is None else len(ranks.find_node())
    plan = plan_sizes(
        spec,
        device_bytes=options.device_bytes,
        host_bytes=options.host_total * local // options.tp,
        max_running=options.max_running,
        chunk=options.chunk,
        state_interval=options.state_interval,
        ranks=local,
    )
    return plan if ranks is None else ranks.agree_plan(plan)


def _build_cache(
    options: ServeOptions, stack: PoolStack, clock: Clock, ranks: RankContext | None
) -> PrefixCache:
    engine: CopyEngine
    if options.device == "cuda":
        engine = StreamCopyEngine(stack)
    else:
        engine = ThreadedCopyEngine(stack, clock=ranks.watch if ranks else clock)
    tiers = TierOptions(
        write_policy=WritePolicy(options.resolved_write_policy),
        load_back_threshold=options.load_back_threshold,
        verify=options.verify == "all",
    )
    policy = make_policy(options.evict_policy)
    if ranks is None:
        return PrefixCache(stack, engine, tiers, policy, clock)
    record_bytes = ranks.agreement.most([pool.record_bytes for pool in stack.device])
    copies = ranks.copies(engine, record_bytes)
    return PrefixCache(stack, copies, tiers, policy, clock, ranks.journal, record_bytes)


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
        "tp": options.tp,
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
