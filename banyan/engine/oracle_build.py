"""Puts an engine together around the oracle: the real scheduler, cache, tiers and copy engines.

Owns the wiring, as `banyan.engine.build` does for real models, and the faults that a soak asks for.
With several ranks each calls `build_oracle_rank` with equal options.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import msgspec
import numpy as np

from banyan.cache import PrefixCache
from banyan.engine.core import EngineCore, Limits
from banyan.engine.cutpoints import DEFAULT_CHECKPOINTS
from banyan.engine.inspect import component_rows
from banyan.engine.memory import give_back, resident_bytes
from banyan.engine.messages import GenerateRequest
from banyan.engine.oracle import Emulation, OracleModel
from banyan.engine.oracle_hash import VOCAB_SIZE, interned
from banyan.engine.oracle_presets import WINDOW, oracle_spec
from banyan.engine.ports import Model
from banyan.engine.rank_context import RankContext
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.options import EvictPolicyName, WritePolicyName
from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.plan import SizePlan
from banyan.pools.shared import HostSharing
from banyan.pools.sizing import plan_sizes
from banyan.spec import CacheSpec
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tiers.journal import Journal
from banyan.tiers.ops import CopyEngine, CopyJob
from banyan.tiers.threaded import Fault, ThreadedCopyEngine
from banyan.tree import Tier, make_policy

_POISON = 0xA5
"""What pools hold before anything was written: memory is touched, and is never right by chance."""


class OracleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an oracle engine can be told; plain data, equal on all ranks.

    Args:
        device_bytes: of all device pools of one rank.
        host_bytes: of all host pools of all ranks together; 0: no host tier.
        spacing: tokens per checkpoint that the pools' sizes are divided by.
        longest: tokens of the longest request, prompt and answer.
        open_requests: running and waiting ones together.
        faults: share of copies that fail, by `seed`, rank and number of the copy.
        prefill_s_per_token, decode_s: see `Emulation`.
    """

    preset: str
    page_size: int = 64
    window: int = WINDOW
    device_bytes: int
    host_bytes: int = 0
    spacing: int = 512
    chunk: int = 2048
    checkpoints: int = DEFAULT_CHECKPOINTS
    max_running: int = 128
    open_requests: int = 4096
    longest: int = 8192
    write_policy: WritePolicyName = "write_through"
    evict_policy: EvictPolicyName = "lru"
    order: Literal["fcfs", "longest_prefix"] = "fcfs"
    verify: bool = False
    load_back_threshold: int = 64
    timeout_s: float = 30.0
    faults: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    seed: int = 0


class OracleCore(EngineCore):
    """An engine core that also says what its oracle has found, and lets go of its host tier."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        limits: Limits,
        info: dict[str, Any],
        oracle: OracleModel,
    ) -> None:
        super().__init__(scheduler, cache, limits, info)
        self.oracle = oracle
        self.orders |= {"detach_host": self.detach_host, "attach_host": self.attach_host}

    def enqueue(self, request: GenerateRequest) -> None:
        """As `EngineCore`; a prompt that came from another process is let go of at once."""
        super().enqueue(msgspec.structs.replace(request, prompt=interned(request.prompt)))

    def stats(self) -> dict[str, Any]:
        """As `EngineCore`, and as `ranks` what an engine of several says of each."""
        return {**super().stats(), "ranks": [{**self.own_stats(), "rss_bytes": resident_bytes()}]}

    def own_stats(self) -> dict[str, Any]:
        """As `EngineCore`, and bytes compared, differences, the first one.

        Free memory goes back to the system first, so that what is resident is in use.
        """
        give_back()
        oracle = self.oracle
        return {
            **super().own_stats(),
            "checked_bytes": oracle.checked_bytes,
            "wrong": oracle.wrong,
            "first_wrong": oracle.first_wrong,
        }

    def detach_host(self) -> None:
        """Start no more backups, and drop what is on host and not in use.

        What running transfers bring there afterwards stays usable until the next call.
        """
        controller = self.cache.controller
        controller.has_host = False
        index = self.cache.tree.index[Tier.HOST]
        pools = controller.allocators[Tier.HOST]
        counts = [pool.free_count + index.evictable[c] for c, pool in enumerate(pools)]
        slots = controller.reserve(Tier.HOST, counts) if any(counts) else None
        if isinstance(slots, list):
            controller.free(Tier.HOST, slots)

    def attach_host(self) -> None:
        """Back up to host again, where there is a host tier."""
        controller = self.cache.controller
        controller.has_host = controller.allocators[Tier.HOST][0].capacity > 0


def build_oracle_core(
    options: OracleOptions,
    rank: int = 0,
    ranks: int = 1,
    clock: Callable[[], float] = time.monotonic,
    wrap_engine: Callable[[CopyEngine], CopyEngine] = lambda engine: engine,
    *,
    wrap_model: Callable[[Model], Model] = lambda model: model,
    journal: Journal | None = None,
    shared: HostSharing | None = None,
    watch: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> OracleCore:
    """An engine ready for requests.

    Args:
        rank, ranks: of this process, and how many there are.
        clock: seconds, monotonic; alike on all ranks.
        wrap_engine: what to put between the controller and this rank's copies.
        wrap_model: what to put between the scheduler and the oracle.
        journal: of the operations, where ranks compare them.
        shared: host memory of what is replicated, where there are ranks.
        watch: seconds, monotonic, of this process: how long its copies take.
        sleep: waits so many seconds, for emulation.

    Raises:
        ConfigError: an unknown preset, or byte budgets too small for it.
    """
    spec = oracle_spec(options.preset, options.page_size, options.window)
    plan = plan_sizes(
        spec,
        device_bytes=options.device_bytes,
        host_bytes=options.host_bytes,
        max_running=options.max_running,
        chunk=options.chunk,
        state_interval=options.spacing,
        ranks=ranks,
    )
    stack = assemble(spec, plan, shared=shared)
    _touch(stack)
    early, late = _faults(options, rank)
    engine = ThreadedCopyEngine(stack, clock=watch, fault=early, late_fault=late)
    cache = PrefixCache(
        stack,
        wrap_engine(engine),
        _tier_options(options),
        make_policy(options.evict_policy),
        clock,
        journal,
    )
    oracle = OracleModel(
        stack,
        rank=rank,
        ranks=ranks,
        rows=options.max_running + 4,
        tokens=options.longest,
        emulation=Emulation(options.prefill_s_per_token, options.decode_s),
        sleep=sleep,
    )
    scheduler = Scheduler(cache, wrap_model(oracle), _scheduler_options(options), clock)
    limits = Limits(
        vocab_size=VOCAB_SIZE,
        model_tokens=max(options.longest, 1),
        pool_tokens=cache.capacity_tokens(),
        open_requests=options.open_requests,
    )
    return OracleCore(scheduler, cache, limits, _info(options, spec, plan, rank, ranks), oracle)


def build_oracle_rank(options: bytes, ranks: RankContext) -> OracleCore:
    """One rank of an oracle engine: what `lead` has every rank call.

    Args:
        options: of `OracleOptions`, JSON.
    """
    decoded = msgspec.json.decode(options, type=OracleOptions)
    spec = oracle_spec(decoded.preset, decoded.page_size, decoded.window)
    record_bytes = [part.record_bytes(spec.page_size) for part in spec.components]
    return build_oracle_core(
        decoded,
        rank=ranks.rank,
        ranks=ranks.ranks,
        clock=ranks.clock,
        wrap_engine=lambda engine: ranks.copies(engine, record_bytes),
        wrap_model=lambda model: ranks.model(model, exact=True),
        journal=ranks.journal,
        shared=ranks.sharing() if decoded.host_bytes else None,
    )


def _tier_options(options: OracleOptions) -> TierOptions:
    """What is worth loading is never weighed: measured speeds of an oracle mean nothing."""
    return TierOptions(
        write_policy=WritePolicy(options.write_policy if options.host_bytes else "none"),
        load_back_threshold=options.load_back_threshold,
        verify=options.verify,
        timeout_s=options.timeout_s,
        weigh_cost=False,
    )


def _scheduler_options(options: OracleOptions) -> SchedulerOptions:
    return SchedulerOptions(
        chunk=options.chunk,
        checkpoints=options.checkpoints,
        max_running=options.max_running,
        order=options.order,
    )


def _touch(stack: PoolStack) -> None:
    """Fill every byte of the pools, but for shared ones that another rank writes."""
    for pool in stack.device:
        for tensor in pool.stacks:
            tensor.fill_(_POISON)
    for lanes in stack.lanes:
        for lane in lanes:
            if lane.writes:
                np.asarray(lane.host.data).fill(_POISON)


def _faults(options: OracleOptions, rank: int) -> tuple[Fault | None, Fault | None]:
    """Which copies fail: half of them before their bytes move, half afterwards."""
    if not options.faults:
        return None, None

    def draw(job: CopyJob, when: str) -> str | None:
        source = random.Random(f"{options.seed}/{rank}/{job.op_id}/{when}")
        return "copy_error" if source.random() < options.faults / 2 else None

    return (lambda job: draw(job, "early")), (lambda job: draw(job, "late"))


def _info(
    options: OracleOptions, spec: CacheSpec, plan: SizePlan, rank: int, ranks: int
) -> dict[str, Any]:
    """What a front end shows and needs; plain data."""
    return {
        "model": f"oracle/{options.preset}",
        "rank": rank,
        "ranks": ranks,
        "page_size": spec.page_size,
        "chunk": options.chunk,
        "max_running": options.max_running,
        "write_policy": options.write_policy if options.host_bytes else "none",
        "evict_policy": options.evict_policy,
        "verify": "all" if options.verify else "off",
        "components": {c.name: str(c.reach) for c in spec.components},
        "component_rows": [asdict(row) for row in component_rows(spec)],
        "size_rows": [asdict(row) for row in plan.table_rows()],
    }
