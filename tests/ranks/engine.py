"""One rank of the simulation: the product's engine over simulated copies, clock and storage."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from banyan.cache import PrefixCache
from banyan.engine.core import EngineCore, Limits
from banyan.engine.messages import GenerateRequest, Output
from banyan.engine.rank_context import RankContext
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.pools.assembler import assemble
from banyan.pools.plan import PoolSize, SizePlan
from banyan.ranks import AgreedCopies, Agreement
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tree import Tier, make_policy
from tests.ranks.copies import SimulatedCopies
from tests.ranks.fabric import SimulatedFabric
from tests.ranks.model import RankModel
from tests.ranks.scenario import Scenario
from tests.support.toy_model import VOCAB


class Host(Protocol):
    """What ranks have in common: the simulation."""

    scenario: Scenario
    parts: Parts
    fabric: SimulatedFabric
    saw: Counter[str]
    memory: dict[str, Tensor]
    sizes: SizePlan

    def observe(self, rank: int, outputs: Sequence[Output]) -> None:
        """Told of what each step of a rank has said."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Of what a rank is made; a test puts a defect in.

    Args:
        agreement, copies: classes.
        watched: compare the ranks after each step, rather than leave that to the engine.
    """

    agreement: type[Agreement] = Agreement
    copies: type[AgreedCopies] = AgreedCopies
    watched: bool = True


class Watch:
    """A rank's own clock: each reading takes a little time, as much as is drawn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.now = rng.random() * 100

    def __call__(self) -> float:
        self.now += self._rng.random() * 0.004
        return self.now


class NodeMemory:
    """Implements `HostSharing`: host memory that all ranks see, by the name of a component."""

    def __init__(self, held: dict[str, Tensor], writes: bool) -> None:
        self._held, self.writes = held, writes

    def allocate(self, name: str, nbytes: int) -> Tensor:
        """See `HostSharing.allocate`."""
        memory = self._held.setdefault(name, torch.zeros(nbytes, dtype=torch.uint8))
        assert len(memory) == nbytes
        return memory


class RankCore(EngineCore):
    """An engine that shows the simulation what each step has done, and that has a storage."""

    def __init__(self, sim: Host, rank: int, context: RankContext, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._sim, self._rank, self._context = sim, rank, context

    def step(self) -> list[Output]:
        """As `EngineCore.step`; the outcome must be that of all ranks."""
        outputs = super().step()
        self._sim.observe(self._rank, outputs)
        return outputs

    def enqueue(self, request: GenerateRequest) -> None:
        """As `EngineCore.enqueue`, once the tiers were treated as the request says."""
        ask = self._sim.scenario.asks[request.request_id]
        if ask.evicts:
            self._take_and_return(Tier.DEVICE, self._all_of_device())
        if ask.stored:
            [hit] = self._context.agreement.hits([ask.stored[self._rank]])
            pages = hit // self.cache.page_size
            self._take_and_return(Tier.HOST, [pages, *[0] * (self.cache.tree.width - 1)])
        super().enqueue(request)

    def _all_of_device(self) -> list[int]:
        free, evictable = self.cache.stack.device_slots, self.cache.tree.device.evictable
        return [pool.free_count + more for pool, more in zip(free, evictable, strict=True)]

    def _take_and_return(self, tier: Tier, counts: list[int]) -> None:
        """Reserve slots, which may evict, and give them back."""
        got = self.cache.controller.reserve(tier, counts)
        if isinstance(got, list):
            self.cache.controller.free(tier, got)


class SimRank:
    """One rank: its context, its pools, its copies, its engine."""

    def __init__(self, sim: Host, rank: int) -> None:
        plan, parts = sim.scenario, sim.parts
        rng = random.Random(f"rank/{plan.seed}/{rank}")
        self.rank, self.watch = rank, Watch(rng)
        self.context = RankContext(sim.fabric.end(rank), self.watch)
        self.context.agreement = parts.agreement(self.context.fabric, self.context.journal)
        memory = NodeMemory(sim.memory, writes=rank == 0) if plan.shared else None
        self.stack = assemble(plan.spec, sim.sizes, shared=memory)
        self.copies = SimulatedCopies(self.stack, plan.odds, rng, sim.saw)
        self.cache = self._cache(plan, parts)
        model = RankModel(self.stack, rank, sim.fabric.fail, plan.picky)
        if plan.model_fails:
            model.fault = model.sample_fault = _faults(plan.model_fails, rng, sim.saw)
        self.scheduler = Scheduler(
            self.cache,
            self.context.model(model, exact=plan.exact),
            SchedulerOptions(
                chunk=plan.chunk,
                state_interval=plan.state_interval,
                max_running=plan.max_running,
                order=plan.order,  # type: ignore[arg-type]
                lookahead=3,
                patience=2,
            ),
            clock=self.context.clock,
            pace=self.context.pace,
        )
        limits = Limits(
            vocab_size=VOCAB,
            model_tokens=1_000,
            pool_tokens=self.cache.capacity_tokens(),
            open_requests=64,
        )
        self.core = RankCore(sim, rank, self.context, self.scheduler, self.cache, limits, {})

    def _cache(self, plan: Scenario, parts: Parts) -> PrefixCache:
        record_bytes = [c.record_bytes(plan.spec.page_size) for c in plan.spec.components]
        engine = parts.copies(self.copies, record_bytes)
        self.context.agreement.copies = engine
        return PrefixCache(
            self.stack,
            engine,
            TierOptions(
                write_policy=WritePolicy(plan.write_policy),
                load_back_threshold=plan.threshold,
                timeout_s=plan.timeout_s,
                weigh_cost=plan.weigh_cost,
            ),
            make_policy(plan.evict_policy),
            clock=self.context.clock,
            journal=self.context.journal,
            record_bytes=record_bytes,
        )

    def free_counts(self) -> list[list[int]]:
        """Free slots by tier and component."""
        return [[pool.free_count for pool in tier] for tier in self.cache.controller.allocators]


def sizes_of(scenario: Scenario) -> SizePlan:
    """The plan of every rank's pools."""
    spec = scenario.spec
    page = spec.page_size

    def sizes(counts: tuple[int, ...], shared: bool) -> tuple[PoolSize, ...]:
        return tuple(
            PoolSize(
                part.name,
                count,
                part.record_bytes(page),
                part.only(replicated=True).record_bytes(page) if shared else 0,
                scenario.ranks if shared else 1,
            )
            for part, count in zip(spec.components, counts, strict=bool(counts))
        )

    device, host = sizes(scenario.device, False), sizes(scenario.host, scenario.shared)
    return SizePlan(device, host, tuple(c.reach for c in spec.components), page, "full")


def _faults(
    chance: float, rng: random.Random, saw: Counter[str]
) -> Callable[[Sequence[object]], None]:
    def fault(_: Sequence[object]) -> None:
        if rng.random() < chance:
            saw["model_faults"] += 1
            raise RuntimeError("as the seed says")

    return fault
