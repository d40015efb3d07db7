"""Ranks cannot drift apart, whatever order their copies finish in: thousands of seeds of it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.ranks.engine import Parts
from tests.ranks.scenario import FEWEST, MOST, scenario_of
from tests.ranks.simulation import simulate

QUICK = 300
ALL, BLOCK = 20_000, 1_000

KEPT = {
    1608: "a load-back that had failed elsewhere was read on a rank where it had ended well",
    15518: "a load-back given up by all was read once it had ended and its slots were others'",
}
"""Seeds that have found something, beyond the quick ones."""

LEAST = {
    "backup": 5_000,
    "load_back": 250,
    "failed": 50,
    "hang": 50,
    "timeouts": 50,
    "cancelled": 50,
    "early_reader_served": 100,
    "early_reader_failed": 3,
    "early_reader_gave_up": 3,
    "load_failures": 5,
    "model_faults": 10,
    "retractions": 10,
    "sharing_waits": 25,
    "tokens_device": 1_000,
    "tokens_host": 250,
    "ended_length": 450,
    "ended_abort": 25,
    "ended_timeout": 25,
    "flush": 10,
    "check": 10,
}
"""What half of the quick seeds bring about at least: otherwise they would show little."""


@pytest.mark.parametrize("seed", KEPT)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("half", [0, 1])
def test_ranks_agree_whatever_could_drive_them_apart(half: int) -> None:
    saw: Counter[str] = Counter()
    for seed in range(half * QUICK // 2, (half + 1) * QUICK // 2):
        saw += simulate(seed)
    assert saw["steps"] > 10 * QUICK
    assert {name: saw[name] for name, n in LEAST.items() if saw[name] < n} == {}


def test_the_seeds_cover_every_number_of_ranks_and_every_kind() -> None:
    plans = [scenario_of(seed) for seed in range(QUICK)]
    assert {plan.ranks for plan in plans} == set(range(FEWEST, MOST + 1))
    kinds = {tuple(part.name for part in plan.spec.components) for plan in plans}
    assert len(kinds) == 4
    for name in ("write_policy", "evict_policy", "exact", "shared", "picky", "weigh_cost"):
        assert len({getattr(plan, name) for plan in plans}) > 1, name


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in range(12):
        assert simulate(seed) == simulate(seed)
    assert simulate(0) != simulate(1)


def test_watching_the_ranks_changes_nothing() -> None:
    """The comparison after each step only looks; only what it counts is missing without it."""
    for seed in range(12):
        unwatched = simulate(seed, Parts(watched=False))
        watched = simulate(seed)
        assert not unwatched.pop("steps") and watched.pop("steps")
        assert unwatched == watched


@pytest.mark.slow
@pytest.mark.timeout(2_400)
@pytest.mark.parametrize("block", range(ALL // BLOCK))
def test_ranks_agree_on_all_seeds(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        simulate(seed)
