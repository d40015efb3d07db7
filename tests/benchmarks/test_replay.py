"""The replay of a trace, on small made-up ones: its counts are those of a slow reference."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from banyan.tree import ROOT_NAMESPACE
from benchmarks import replay as replaying
from benchmarks.byteless import COMPONENTS
from benchmarks.replay import BLOCK, Replay, TraceRequest, read_trace, replay
from tests.support.reference import Reference, survey

TIMES = ("seconds", "key_seconds", "us_per_request", "yardstick_us")
AMPLE = 1_000 * BLOCK


def talks(seed: int, requests: int = 80) -> list[TraceRequest]:
    """Conversations that grow by one to three blocks a turn, some branching off another."""
    rng, fresh = random.Random(seed), iter(range(1, 10_000))
    stems: list[list[int]] = [[next(fresh)] for _ in range(4)]
    trace = []
    for _ in range(requests):
        stem = rng.choice(stems)
        blocks = stem[: rng.randint(1, len(stem))] if rng.random() < 0.2 else list(stem)
        blocks += [next(fresh) for _ in range(rng.randint(1, 3))]
        if len(blocks) <= 10:
            stems.append(blocks)
        length = len(blocks) * BLOCK - rng.choice([0, 1, 200, BLOCK - 1])
        trace.append(TraceRequest(tuple(blocks), length, 5))
    return trace


def plain(figures: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from run to run."""
    return {name: value for name, value in figures.items() if name not in TIMES}


def run(trace: list[TraceRequest], components: str, device: int, host: int) -> dict[str, Any]:
    return replay(trace, components, device, host, lambda number: None)


def test_with_room_for_all_a_prompt_finds_what_any_earlier_one_had() -> None:
    trace = talks(1)
    expected, seen = 0, set[tuple[int, ...]]()
    for request in trace:
        own = [request.blocks[:n] for n in range((request.length - 1) // BLOCK, 0, -1)]
        expected += BLOCK * max((len(part) for part in own if part in seen), default=0)
        whole = request.length // BLOCK
        seen |= {request.blocks[:n] for n in range(1, whole + 1)}
    assert expected > 0
    figures = run(trace, "full", AMPLE, 0)
    assert (figures["device"], figures["host"], figures["refused"]) == (expected, 0, 0)
    assert figures["prompt"] == sum(request.length for request in trace)
    assert figures["hit_rate"] == expected / figures["prompt"]


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hits_are_those_of_the_reference(components: str, seed: int) -> None:
    cache = Replay(components, 24 * BLOCK, 60 * BLOCK)
    reference = Reference(cache.cache.spec)
    for request in talks(seed):
        reference.held = survey(cache.cache.tree)
        device, both, _, _ = reference.answer(cache._key(request), ROOT_NAMESPACE)
        before = dict(cache.tokens)
        cache.run(request)
        found = {name: cache.tokens[name] - before.get(name, 0) for name in ("device", "host")}
        assert found == {"device": device, "host": both - device}
    cache.cache.check()
    assert cache.tokens["device"] > 0 and cache.tokens["host"] > 0


@pytest.mark.parametrize("components", COMPONENTS)
def test_the_same_trace_gives_the_same_figures(components: str) -> None:
    trace = talks(4)
    first, second = (plain(run(trace, components, 24 * BLOCK, 60 * BLOCK)) for _ in range(2))
    assert first == second
    assert first["requests"] == len(trace) and first["nodes"] > 0
    assert first != plain(run(trace, components, AMPLE, 0))


def test_a_prompt_that_the_device_cannot_hold_is_refused_and_counted() -> None:
    trace = [TraceRequest(tuple(range(1, 13)), 12 * BLOCK, 5), *talks(5)]
    figures = run(trace, "full", 11 * BLOCK, 0)
    longer = sum(request.length > 11 * BLOCK for request in trace)
    assert figures["refused"] == longer > 0


def test_a_trace_is_read_replayed_and_written_as_json(tmp_path: Path) -> None:
    trace = talks(6, 20)
    path, out = tmp_path / "made-up.jsonl", tmp_path / "out" / "figures.json"
    path.write_text(
        "".join(
            json.dumps({"hash_ids": r.blocks, "input_length": r.length, "output_length": r.output})
            + "\n"
            for r in trace
        )
    )
    assert read_trace(path) == trace
    app = Typer()
    app.command()(replaying.main)
    done = CliRunner().invoke(app, [str(path), "--host-tokens", "0", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [plain(row) for row in rows] == [plain(run(trace, c, 3_000_000, 0)) for c in COMPONENTS]
