"""Random requests, aborts, flushes and failing copies in tight pools, against known answers."""

from __future__ import annotations

import random

import pytest

from tests.support.toy_engine import ToyEngine
from tests.support.toy_model import answer

TIGHT = {
    "full": ([16], [20]),
    "full+window": ([16, 12], [20, 16]),
    "full+state": ([16, 5], [20, 6]),
    "full+window+state": ([16, 12, 5], [20, 16, 6]),
}


def random_run(seed: int) -> ToyEngine:
    """Requests, aborts, time limits, flushes and failing copies in tight pools; checks answers."""
    rng = random.Random(seed)
    kind = list(TIGHT)[seed % 4]
    device, host = TIGHT[kind]
    e = ToyEngine(
        kind,
        device=[n + rng.randrange(8) for n in device],
        host=host if rng.random() < 0.7 else [],
        write_policy=rng.choice(["write_through", "write_through_selective"]),
        auto_copy=False,
        chunk=rng.choice([4, 8, 16]),
        state_interval=rng.choice([None, 8]),
        max_running=rng.choice([1, 2, 4]),
        order=rng.choice(["fcfs", "longest_prefix"]),
        patience=2,
        lookahead=3,
    )
    stems = [[rng.randrange(250) for _ in range(rng.randrange(4, 28))] for _ in range(3)]
    asked: dict[str, tuple[list[int], int, int | None]] = {}
    failing = rng.random() < 0.5
    for _ in range(120):
        if rng.random() < 0.3 and len(e.roster) < 8:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, len(stem) + 1)]
            prompt += [rng.randrange(3) for _ in range(rng.randrange(8))]
            asked[name := f"q{len(asked)}"] = prompt, rng.choice([2, 6, 25]), rng.choice([None, 5])
            e.submit(
                prompt,
                asked[name][1],
                name=name,
                seed=asked[name][2],
                use_cache=rng.random() < 0.85,
                timeout_s=rng.choice([None, None, 15.0]),
                priority=rng.randrange(2),
            )
        if rng.random() < 0.05 and asked:
            e.roster.abort(rng.choice(sorted(asked)))
        if rng.random() < 0.01:
            e.cache.flush()
        while e.copies.pending and rng.random() < 0.5:
            ok = not (failing and rng.random() < 0.2)
            e.copies.finish(rng.choice(e.copies.pending), ok=ok)
        e.now += 1
        e.step()
    e.auto_copy = True
    e.run()
    for name, (prompt, count, sampling_seed) in asked.items():
        want, got = answer(prompt, count, sampling_seed), e.tokens(name)
        assert got == want[: len(got)], (seed, name)
        assert e.last(name).finish_reason != "length" or got == want, (seed, name)
        assert e.last(name).error_code in (None, "out_of_slots"), (seed, name)
    e.assert_idle()
    return e


@pytest.mark.parametrize("block", range(4))
def test_random_requests_answer_right_and_leave_nothing(block: int):
    engines = [random_run(seed) for seed in range(12 * block, 12 * block + 12)]
    assert sum(e.scheduler.counters.retractions for e in engines) > 0
    assert sum(e.scheduler.counters.sharing_waits for e in engines) > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_requests_answer_right_and_leave_nothing(block: int):
    for seed in range(1_000 + 50 * block, 1_050 + 50 * block):
        random_run(seed)
