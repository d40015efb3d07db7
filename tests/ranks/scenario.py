"""What a seed decides before anything runs: ranks, pools, policies, requests, when what happens.

Plain records. What is decided on the way (who runs next, how a copy ends) is drawn by those whom it
concerns, from sources seeded the same way.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache

from banyan.spec import CacheSpec
from tests.ranks.copies import CopyOdds
from tests.support.rig import KINDS, toy_spec
from tests.support.toy_model import VOCAB, answer

FEWEST, MOST = 2, 16
_WRITE = ("write_through", "write_through", "write_through_selective", "write_back")
_ALIKE = {"full": {"v"}, "window": {"k", "v"}, "state": {"recurrent"}}
"""Buffers that are equal on all ranks, by component, where a seed has such."""

_EVICT = ("lru", "lru", "lfu", "slru", "fifo", "priority")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Args:
        seed: None is greedy.
        stored: tokens of the prompt that each rank's storage holds, by rank; empty without one.
        evicts: when it arrives, the device lets go of all that no request holds.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    use_cache: bool
    priority: int
    timeout_s: float | None
    stored: tuple[int, ...]
    evicts: bool


@dataclass(frozen=True, slots=True)
class Events:
    """What happens before one step."""

    asks: list[Ask] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run of the simulation.

    Args:
        shared: buffers that are equal on all ranks have one host copy, written by rank 0.
        exact: ranks talk as for the oracle model; nothing but copies fails then.
        device, host: slots by component; `host` is empty where there is no host tier.
        odds: how copies fare on each rank.
        picky: a model that reads what a failed load-back has not brought raises, rather than answer
            with nonsense.
        model_fails: chance that a forward, or a sampling, raises on a rank.
        events: by step.
    """

    seed: int
    ranks: int
    spec: CacheSpec
    shared: bool
    exact: bool
    device: tuple[int, ...]
    host: tuple[int, ...]
    write_policy: str
    evict_policy: str
    threshold: int
    weigh_cost: bool
    timeout_s: float
    chunk: int
    state_interval: int | None
    max_running: int
    order: str
    odds: CopyOdds
    picky: bool
    model_fails: float
    asks: dict[str, Ask]
    events: dict[int, Events]

    @property
    def last_event(self) -> int:
        """The last step before which something happens."""
        return max(self.events)


def scenario_of(seed: int) -> Scenario:
    """All that `seed` decides beforehand."""
    rng = random.Random(f"scenario/{seed}")
    ranks = _ranks(rng)
    page = rng.choice((2, 4, 4, 8))
    shared = rng.random() < 0.3
    spec = spec_of(rng.choice(KINDS), page, rng.choice((5, 8, 9)), shared)
    exact = rng.random() < 0.5
    asks = _asks(rng, ranks, page)
    chunk = page * rng.choice((1, 2, 4))
    device = _device(rng, spec, asks, chunk)
    has_host = rng.random() < 0.93
    host = tuple(max(1, int(n * rng.choice((0.6, 1.5, 3, 3)))) for n in device) if has_host else ()
    return Scenario(
        seed=seed,
        ranks=ranks,
        spec=spec,
        shared=shared,
        exact=exact,
        device=device,
        host=host,
        write_policy=rng.choice(_WRITE) if has_host else "none",
        evict_policy=rng.choice(_EVICT),
        threshold=rng.choice((1, 1, page * 2)),
        weigh_cost=rng.random() < 0.4,
        timeout_s=rng.choice((1.0, 4.0, 30.0)),
        chunk=chunk,
        state_interval=rng.choice((None, None, 2 * page)),
        max_running=rng.choice((1, 2, 4, 8)),
        order=rng.choice(("fcfs", "longest_prefix")),
        odds=_odds(rng),
        picky=rng.random() < 0.5,
        model_fails=rng.choice((0.0, 0.0, 0.01)) if not exact else 0.0,
        asks={ask.name: ask for ask in asks},
        events=_events(rng, asks),
    )


@lru_cache(maxsize=256)
def spec_of(kind: str, page: int, window: int, shared: bool) -> CacheSpec:
    """A toy spec; with `shared`, some buffers of each component are equal on all ranks."""
    spec = toy_spec(kind, page, window)
    if not shared:
        return spec
    parts = [
        replace(
            part,
            buffers=tuple(replace(b, replicated=b.name in _ALIKE[part.name]) for b in part.buffers),
        )
        for part in spec.components
    ]
    return CacheSpec(tuple(parts), page)


def _ranks(rng: random.Random) -> int:
    """Two to sixteen; few are more likely, since many cost more and show little else."""
    sizes = range(FEWEST, MOST + 1)
    return rng.choices(sizes, [1 / n for n in sizes])[0]


def _asks(rng: random.Random, ranks: int, page: int) -> list[Ask]:
    """Prompts that share beginnings; some go on from another one's answer."""
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(page, 28))] for _ in range(2)]
    stored = rng.random() < 0.6
    asks: list[Ask] = []
    for number in range(rng.randint(4, 8)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(max(1, len(stem) // 2), len(stem))]
        if asks and rng.random() < 0.3:
            earlier = rng.choice(asks)
            prompt = [*earlier.prompt, *answer(earlier.prompt, earlier.max_tokens, earlier.seed)]
        prompt = [*prompt[:40], *(rng.randrange(3) for _ in range(rng.randrange(1, 7)))]
        most = min(len(prompt), 4 * page)
        asks.append(
            Ask(
                name=f"q{number}",
                prompt=tuple(prompt),
                max_tokens=rng.choice((1, 2, 3, 5, 9)),
                seed=rng.choice((None, None, 5)),
                use_cache=rng.random() < 0.95,
                priority=rng.randrange(2),
                timeout_s=rng.choice((None, None, None, 8.0, 2.0)),
                stored=tuple(rng.randrange(most) for _ in range(ranks)) if stored else (),
                evicts=rng.random() < 0.7,
            )
        )
    return asks


def _device(rng: random.Random, spec: CacheSpec, asks: list[Ask], chunk: int) -> tuple[int, ...]:
    """Tight pools: the largest request fits, most of the time not much more does."""
    page = spec.page_size
    largest = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    full = math.ceil(largest / page) + 1
    least = {"full": full, "window": math.ceil((9 + chunk) / page) + 2, "state": 3}
    loose = rng.choice((1.0, 1.3, 2.0))
    return tuple(int(least[c.name] * loose) + rng.randrange(3) for c in spec.components)


def _odds(rng: random.Random) -> CopyOdds:
    calm = rng.random() < 0.25
    if calm:
        return CopyOdds(slow=rng.choice((1, 4)))
    return CopyOdds(
        at_once=rng.choice((0.2, 0.5, 0.8)),
        fails=rng.choice((0.0, 0.02, 0.1)),
        hangs=rng.choice((0.0, 0.05)),
        slow=rng.choice((2, 6)),
        unready_fails=rng.choice((0.0, 0.1)),
        unready_gives_up=rng.choice((0.0, 0.1)),
    )


def _events(rng: random.Random, asks: list[Ask]) -> dict[int, Events]:
    """When requests come and go, and when the engine is flushed and checked."""
    events: dict[int, Events] = {}

    def before(step: int) -> Events:
        return events.setdefault(step, Events())

    step = 0
    for ask in asks:
        step += rng.choice((0, 1, 3, 6, 12))
        before(step).asks.append(ask)
        if rng.random() < 0.12:
            before(step + rng.randrange(8)).aborts.append(ask.name)
    if rng.random() < 0.2:
        before(rng.randrange(step + 8)).orders.append("flush")
    if rng.random() < 0.2:
        before(rng.randrange(step + 8)).orders.append("check")
    return events
