"""Several ranks of one engine, each with its own tree, pools and copies, in one process.

What runs is the product's: `RankedCore` on rank 0 and `follow` on the others, over the scheduler,
the cache and `AgreedCopies`. Simulated are the fabric, the copies, the clocks and a storage whose
contents differ by rank; a seed decides all of them. `python -m tests.ranks.simulation SEED...` runs
seeds again and tells what they were.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from banyan.engine.messages import GenerateRequest, Output, Sampling
from banyan.engine.ranked import RankedCore, follow
from banyan.tiers.journal import first_difference
from banyan.tree import Tier
from tests.ranks.engine import Parts, SimRank, sizes_of
from tests.ranks.fabric import Divergence, SimulatedFabric
from tests.ranks.scenario import Ask, Events, Scenario, scenario_of
from tests.support.toy_model import answer

STEP_LIMIT = 600
"""Steps after which requests that are still open count as stuck."""


class Simulation:
    """All ranks of one seed.

    Args:
        parts: of what ranks are made.

    Attributes:
        saw: what has happened, by name, all ranks together.
        steps: what the first rank that took a step had done by its end.
    """

    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        self.scenario, self.parts = scenario, parts
        self.saw: Counter[str] = Counter()
        self.memory: dict[str, Tensor] = {}
        self._rng = random.Random(f"order/{scenario.seed}")
        self.fabric = SimulatedFabric(scenario.ranks, self._rng)
        self.sizes = sizes_of(scenario)
        self.ranks = [SimRank(self, rank) for rank in range(scenario.ranks)]
        self.steps: list[tuple[int, tuple[object, ...]]] = []
        self._taken = [0] * scenario.ranks
        self._outputs: dict[str, list[Output]] = {}

    def run(self) -> None:
        """Run to the end, and see that all ranks have come to the same one.

        Raises:
            Divergence: saying what differs.
        """
        followers = [self._follow(node) for node in self.ranks[1:]]
        self.fabric.run([self._lead, *followers])
        self._check_answers()
        self._check_end()
        self._count()

    def observe(self, rank: int, outputs: Sequence[Output]) -> None:
        """Compare what `rank` has done by the end of a step with what others had."""
        context, at = self.ranks[rank].context, self._taken[rank]
        self._taken[rank] += 1
        if not self.parts.watched:
            return
        told = tuple((o.request_id, tuple(o.tokens), o.finish_reason, o.usage) for o in outputs)
        journal = context.journal
        own = (context.agreement.talks, journal.count, journal.digest, told)
        if at == len(self.steps):
            self.steps.append((rank, own))
            return
        first, wanted = self.steps[at]
        if own == wanted:
            return
        if own[:3] == wanted[:3]:
            difference = f"news of {own[3]} and of {wanted[3]}"
        else:
            difference = self._difference(first, rank)
        self.fabric.fail(
            f"step {at}: rank {rank} has drifted from rank {first}: talks {own[0]} and "
            f"{wanted[0]}, operations {own[1]} and {wanted[1]}; {difference}"
        )

    def _difference(self, *ranks: int) -> str:
        found = first_difference([self.ranks[r].context.journal.tail() for r in ranks])
        if found is None:
            return "no operation differs"
        told = ", ".join(f"rank {r}: {e}" for r, e in zip(ranks, found[1], strict=True))
        return f"the first difference is operation {found[0]}: {told}"

    # ---- what the ranks do -----------------------------------------------------------------------

    def _follow(self, node: SimRank) -> Callable[[], None]:
        return lambda: follow(node.core, node.context)

    def _lead(self) -> None:
        node, scenario = self.ranks[0], self.scenario
        core = RankedCore(node.core, node.context)
        for at in range(STEP_LIMIT):
            if at in scenario.events:
                self._act(core, scenario.events[at])
            if at > scenario.last_event and not core.has_work and not self._copying:
                break
            node.watch.now += self._rng.choice((0.01, 0.1, 0.1, 0.4, 1.5))
            for output in core.step():
                self._outputs.setdefault(output.request_id, []).append(output)
        else:
            self.fabric.fail(f"requests or copies are still open after {STEP_LIMIT} steps")
        core.check()
        core.flush()
        core.check()
        core.close()

    @property
    def _copying(self) -> bool:
        return bool(self.ranks[0].cache.controller.operations)

    def _act(self, core: RankedCore, events: Events) -> None:
        for ask in events.asks:
            core.submit(request_of(ask))
        for name in events.aborts:
            core.abort(name)
        for order in events.orders:
            self.saw[order] += 1
            {"flush": core.flush, "check": core.check}[order]()

    # ---- the end ---------------------------------------------------------------------------------

    def _check_answers(self) -> None:
        for name, ask in self.scenario.asks.items():
            news = self._outputs.get(name, [])
            ends = [o.finish_reason for o in news if o.finish_reason is not None]
            if len(ends) != 1 or news[-1].finish_reason is None:
                raise Divergence(f"request {name} has ended {len(ends)} times")
            self.saw[f"ended_{ends[0]}"] += 1
            if ends[0] == "error":
                self.saw[f"error_{news[-1].error_code}"] += 1
                if news[-1].error_code == "model_failed" and not self.scenario.model_fails:
                    raise Divergence(f"request {name} has failed: {news[-1].error}")
            got = [token for output in news for token in output.tokens]
            wanted = answer(ask.prompt, ask.max_tokens, ask.seed)
            whole = ends[0] == "length"
            if got != (wanted if whole else wanted[: len(got)]):
                raise Divergence(f"request {name} was answered {got}, not {wanted}")

    def _check_end(self) -> None:
        lead = self.ranks[0]
        for node in self.ranks:
            node.core.check()
            journal, others = node.context.journal, lead.context.journal
            same = (journal.count, journal.digest, journal.tail())
            if same != (others.count, others.digest, others.tail()):
                raise Divergence(self._difference(0, node.rank))
            if node.cache.leases or node.cache.controller.operations or node.copies.unfinished:
                raise Divergence(f"rank {node.rank} has open leases or copies at the end")
            for tier in Tier:
                if any(node.cache.tree.index[tier].protected):
                    raise Divergence(f"rank {node.rank}: locks are left on {tier.name}")
            whole = [
                list(self.scenario.device),
                list(self.scenario.host) or [0] * lead.cache.tree.width,
            ]
            if node.free_counts() != whole:
                raise Divergence(f"rank {node.rank}: free {node.free_counts()} of {whole}")
            if node.context.agreement.talks != lead.context.agreement.talks:
                raise Divergence(f"rank {node.rank} has talked more or less often than rank 0")

    def _count(self) -> None:
        lead = self.ranks[0]
        counters = lead.scheduler.counters
        self.saw["steps"] += len(self.steps)
        self.saw["talks"] += lead.context.agreement.talks
        self.saw["operations"] += lead.context.journal.count
        for name in ("retractions", "load_failures", "forward_failures", "sharing_waits"):
            self.saw[name] += getattr(counters, name)
        for source, tokens in counters.prompt_tokens.items():
            self.saw[f"tokens_{source}"] += tokens
        self.saw["timeouts"] += lead.cache.controller.counts["miss_timeout"]


def request_of(ask: Ask) -> GenerateRequest:
    """As a front end would send it."""
    return GenerateRequest(
        request_id=ask.name,
        prompt=list(ask.prompt),
        sampling=Sampling(max_tokens=ask.max_tokens, seed=ask.seed),
        priority=ask.priority,
        use_cache=ask.use_cache,
        timeout_s=ask.timeout_s,
    )


def simulate(seed: int, parts: Parts | None = None) -> Counter[str]:
    """Run one seed; what has happened.

    Raises:
        Divergence: naming the seed and how to run it again.
    """
    try:
        simulation = Simulation(scenario_of(seed), parts or Parts())
        simulation.run()
    except Exception as error:
        error.add_note(f"seed {seed}; again: python -m tests.ranks.simulation {seed}")
        raise
    return simulation.saw


def main() -> None:
    """Run the seeds of the command line."""
    for seed in map(int, sys.argv[1:]):
        print(scenario_of(seed))
        print(dict(sorted(simulate(seed).items())))


if __name__ == "__main__":
    main()
