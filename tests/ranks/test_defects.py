"""The simulation can fail: each seeded defect is found, and told by what differs first."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.ranks.defects import (
    DEFECTS,
    Patch,
    collective_skipped,
    completion_applied_early,
    hit_unreduced,
)
from tests.ranks.engine import Parts
from tests.ranks.fabric import Divergence, SimulatedFabric
from tests.ranks.simulation import simulate

WITHIN = 10
"""Seeds within which each defect is found; the sound product passes the same ones."""

MISMATCH = r"call \d+: rank \d+ calls \w+\(.*\) at .*, where rank \d+ has called \w+"
DRIFT = r"the first difference is operation \d+: rank \d+: #\d+ \w+\("
OWN_REPORT = rf"RankError: the ranks have drifted apart; {DRIFT}"


def found_by(parts: Parts, patch: Patch) -> list[str]:
    """What the first seeds say against `parts`."""
    messages = []
    for seed in range(WITHIN):
        try:
            simulate(seed, parts)
        except Divergence as difference:
            messages.append(str(difference))
            assert f"python -m tests.ranks.simulation {seed}" in "".join(difference.__notes__)
    patch.undo()
    return messages


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_and_the_sound_product_passes_the_same_seeds(
    defect: Callable[[Patch], Parts], monkeypatch: Patch
) -> None:
    messages = found_by(defect(monkeypatch), monkeypatch)
    assert len(messages) >= 3
    for seed in range(WITHIN):
        simulate(seed)


def test_a_skipped_collective_shows_as_two_ranks_in_different_calls(monkeypatch: Patch) -> None:
    messages = found_by(collective_skipped(monkeypatch), monkeypatch)
    assert all(re.match(MISMATCH, message) for message in messages), messages


@pytest.mark.parametrize("defect", [completion_applied_early, hit_unreduced])
def test_drift_is_told_by_the_first_operation_that_differs(
    defect: Callable[[Patch], Parts], monkeypatch: Patch
) -> None:
    messages = found_by(defect(monkeypatch), monkeypatch)
    assert all(re.search(DRIFT, message) for message in messages), messages


@pytest.mark.parametrize("defect", [completion_applied_early, hit_unreduced])
def test_the_engine_itself_finds_drift_and_stops_on_all_ranks(
    defect: Callable[[Patch], Parts], monkeypatch: Patch
) -> None:
    parts = replace(defect(monkeypatch), watched=False)
    messages = found_by(parts, monkeypatch)
    assert len(messages) >= 3
    for message in messages:
        assert re.search(OWN_REPORT, message), message
        told = re.search(r"so did ranks \[(.*)\]", message)
        assert told is not None
        named = set(re.findall(r"rank (\d+): (?:#|nothing)", message))
        assert set(told[1].split(", ")) == named, "all ranks stop, and each is in the report"


# ---- the fabric's own checks ---------------------------------------------------------------------


def test_a_deadlock_says_who_waits_where() -> None:
    node = SimulatedFabric(3, random.Random(0))
    ends = [node.end(rank) for rank in range(3)]

    def talk(rank: int) -> None:
        ends[rank].gather(b"one")
        if rank != 1:
            ends[rank].gather(b"two")

    with pytest.raises(Divergence) as caught:
        node.run([lambda rank=rank: talk(rank) for rank in range(3)])
    told = str(caught.value)
    assert "deadlock: 2 of 3 ranks wait" in told
    assert "rank 0 waits in call 1, gather" in told and "ranks [0, 2] have come" in told
    assert "rank 1 has ended after 1 calls" in told


@pytest.mark.parametrize("words", [3, 4])
def test_ranks_that_send_another_length_are_found(words: int) -> None:
    node = SimulatedFabric(2, random.Random(0))
    ends = [node.end(rank) for rank in range(2)]
    mains = [
        lambda: ends[0].collect(np.zeros(3, np.int64)),
        lambda: ends[1].collect(np.zeros(words, np.int64)),
    ]
    if words == 3:
        node.run(mains)  # type: ignore[arg-type]
        return
    with pytest.raises(Divergence, match=r"collect\([34]\).* where rank \d has called collect"):
        node.run(mains)  # type: ignore[arg-type]


def test_a_rank_that_calls_once_too_often_is_found() -> None:
    node = SimulatedFabric(2, random.Random(0))
    ends = [node.end(rank) for rank in range(2)]

    def send(rank: int, times: int) -> None:
        for _ in range(times):
            ends[rank].collect(np.zeros(1, np.int64))

    node_run = [lambda: send(0, 1), lambda: send(1, 2)]
    with pytest.raises(Divergence, match=r"different numbers of calls, by rank: \[1, 2\]"):
        node.run(node_run)


def test_an_error_of_one_rank_is_told_and_not_the_wait_of_the_others() -> None:
    node = SimulatedFabric(2, random.Random(0))
    ends = [node.end(rank) for rank in range(2)]

    def fail() -> None:
        raise ValueError("of this rank alone")

    with pytest.raises(Divergence, match="rank 1 has ended with ValueError: of this rank alone"):
        node.run([lambda: ends[0].gather(b""), fail])  # type: ignore[list-item]


def test_every_message_reaches_every_rank_in_every_order() -> None:
    for seed in range(20):
        node = SimulatedFabric(4, random.Random(seed))
        got: dict[int, list[object]] = {}

        def talk(rank: int, node: SimulatedFabric = node, got: dict = got) -> None:
            end = node.end(rank)
            reports = end.collect(np.array([rank, 7], np.int64))
            heard = end.broadcast(b"all" if rank == 0 else None)
            got[rank] = [heard, end.gather(str(rank).encode())]
            if rank == 0:
                assert reports is not None
                assert [r.tolist() for r in reports] == [[n, 7] for n in range(4)]

        node.run([lambda rank=rank: talk(rank) for rank in range(4)])
        assert got == {rank: [b"all", [b"0", b"1", b"2", b"3"]] for rank in range(4)}
