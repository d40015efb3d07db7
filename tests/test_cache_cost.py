"""INV-17 by counting calls: a step's work depends on what changed, not on what is cached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from banyan.cache import AllocateOutcome
from tests.support.rig import Rig

PAGE = 4


def calls(step: Callable[[], object]) -> int:
    """Python and C functions called by `step`; counts are exact, unlike times."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def seq(n: int, stream: int = 1) -> list[int]:
    """n tokens of a stream."""
    return [stream * 100_000 + i for i in range(n)]


def grown(kind: str, turns: int, others: int) -> Rig:
    """A cache with one prompt of `turns` nodes and `others` prompts of one page beside it."""
    pages = 2 * (turns + others) + 64
    slots = [pages for name in kind.split("+")]
    rig = Rig(kind, device=slots, host=slots)
    lease = rig.acquire(seq(PAGE * turns))
    for turn in range(1, turns + 1):
        assert rig.compute(lease, seq(PAGE * turns), PAGE * turn) is AllocateOutcome.OK
        rig.commit(lease, seq(PAGE * turns))
        rig.settle()
    rig.cache.release(lease)
    for other in range(others):
        rig.run(seq(PAGE, 10 + other))
    return rig


def steps_of_a_turn(rig: Rig, turns: int) -> dict[str, int]:
    """Calls per verb of one more turn of a page on the long prompt; `acquire` fills the tables."""
    cost = {}
    tokens = seq(PAGE * turns) + seq(PAGE + 1, 5)
    lease = rig.acquire(tokens)
    stop = PAGE * (turns + 1)
    cost["allocate"] = calls(lambda: rig.cache.allocate(lease, stop))
    rig.write(lease, tokens, lease.length, stop)
    cost["advance"] = calls(lambda: rig.cache.advance(lease, stop))
    cost["commit"] = calls(lambda: rig.commit(lease, tokens))
    rig.engine.finish_all()
    cost["poll"] = calls(rig.cache.poll)
    second = rig.acquire(tokens)
    cost["release"] = calls(lambda: rig.cache.release(second))
    rig.cache.release(lease)
    rig.check()
    return cost


@pytest.mark.parametrize("kind", ["full", "full+window", "full+window+state"])
def test_a_turn_costs_the_same_on_a_long_prompt_and_in_a_full_cache(kind: str) -> None:
    """But for the backup it starts, which pins the prompt's path on host: one call a node."""
    small = steps_of_a_turn(grown(kind, turns=8, others=4), 8)
    long = steps_of_a_turn(grown(kind, turns=200, others=4), 200)
    full = steps_of_a_turn(grown(kind, turns=8, others=300), 8)
    for verb, count in small.items():
        path = 200 - 8 if verb in ("commit", "poll") else 0
        assert abs(long[verb] - count) <= path + 8, (verb, small, long)
        assert abs(full[verb] - count) <= 8, (verb, small, full)


def test_a_match_costs_a_few_calls_per_node_of_its_path() -> None:
    costs = {}
    for turns in (8, 200):
        rig = grown("full+window+state", turns, 4)
        key = b"".join(token.to_bytes(4, "little") for token in [*seq(PAGE * turns), 1])
        costs[turns] = calls(lambda rig=rig, key=key: rig.cache.match(key))  # type: ignore[misc]
        assert rig.cache.match(key).boundary == PAGE * turns
    assert costs[200] - costs[8] <= 5 * (200 - 8)


def test_an_idle_poll_costs_nothing() -> None:
    rig = grown("full+window+state", 8, 300)
    assert calls(rig.cache.poll) <= 8
