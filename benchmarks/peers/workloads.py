"""What is measured: workloads over the interface of `side`, and how the sides take turns.

A workload is set up once on every side and then run in blocks, one side after the other and each
round beginning with another side, so that what else the machine does falls on all of them. A sample
is one call, but for `match, 2,000 branches`, whose sample is the mean of one pass over all of them.
Knows no system under test.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.peers.side import Side

VOCABULARY = 128_000
TURNS, TURN = 64, 2_048
STEM, OWN = 4_096, 512
LEAF = 64
PASSES = 3

Block = Callable[[], list[float]]
"""One turn of a side: the microseconds of each sample."""


@dataclass(frozen=True)
class Effort:
    """How much is done.

    Args:
        rounds: turns that each side has.
        calls: samples of a turn where a sample changes nothing.
        branches, leaves: sizes of the wide trees.
    """

    rounds: int = 5
    calls: int = 40
    branches: int = 2_000
    leaves: int = 10_000


QUICK = Effort(rounds=3, calls=10, branches=200, leaves=1_000)


@dataclass(frozen=True)
class Workload:
    """One row.

    Args:
        prepare: sets a side up and returns its block.
        kind: what it counts as: `match` (with slots), `grown` (the same, after each change),
            `lookup` (without), `insert`, `evict`, `lock`, `lock below`, `hold` or `key`.
    """

    name: str
    kind: str
    prepare: Callable[[Side, Effort], Block]


class Prompts:
    """Random prompts, the same on every side."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def draw(self, count: int) -> array[int]:
        """`count` tokens."""
        tokens = array("q")
        tokens.frombytes(self._random.integers(0, VOCABULARY, count, dtype=np.int64).tobytes())
        return tokens

    def branch(self, count: int, number: int) -> array[int]:
        """`count` tokens of which the first is in no other prompt."""
        tokens = self.draw(count)
        tokens[0] = VOCABULARY + number
        return tokens


def run(workload: Workload, sides: Sequence[Side], effort: Effort) -> dict[str, list[float]]:
    """Microseconds of every sample, by side.

    Raises:
        AssertionError: a side answered wrongly, or its tree is inconsistent afterwards.
    """
    blocks = [workload.prepare(side, effort) for side in sides]
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(effort.rounds):
        for i in range(len(sides)):
            at = (i + turn) % len(sides)
            gc.collect()
            gc.disable()
            try:
                samples[sides[at].name] += blocks[at]()
            finally:
                gc.enable()
    for side in sides:
        side.check()
        side.release()
        side.clear()
    return samples


def timed(call: Callable[[Any], object], arguments: Sequence[Any]) -> list[float]:
    """Microseconds of each call."""
    clock = time.perf_counter_ns
    times = []
    for argument in arguments:
        start = clock()
        call(argument)
        times.append((clock() - start) / 1000)
    return times


def put(side: Side, tokens: array[int], cached: int = 0) -> None:
    """Insert `tokens`, the first `cached` of which are there."""
    had = side.insert(side.insertion(tokens, cached))
    assert had == cached, (side.name, had, cached)


# ---- matching ------------------------------------------------------------------------------------


def one_edge(side: Side, tokens: int) -> array[int]:
    """A prompt put in by one insert."""
    side.clear()
    prompt = Prompts().draw(tokens)
    put(side, prompt)
    return prompt


def conversation(side: Side) -> array[int]:
    """A prompt put in turn by turn."""
    side.clear()
    talk = Prompts().draw(TURNS * TURN)
    for turn in range(TURNS):
        put(side, talk[: (turn + 1) * TURN], turn * TURN)
    return talk


def match_edge(side: Side, effort: Effort, *, call: str, tokens: int) -> Block:
    """Matches a prompt that is one node (two where windows cut it)."""
    return _repeated(side, effort, call, one_edge(side, tokens))


def match_turns(side: Side, effort: Effort, *, call: str) -> Block:
    """Matches a conversation of as many nodes as turns (twice as many where windows cut them)."""
    return _repeated(side, effort, call, conversation(side))


def match_grown(side: Side, effort: Effort) -> Block:
    """Matches a conversation of `TURNS` turns and more, with its slots, after each further turn:
    what was kept for the one before is of no use to the next."""
    more = max(1, effort.calls // 4)
    talk = Prompts().draw((TURNS + more) * TURN)
    queries = [side.query(talk[: (TURNS + turn + 1) * TURN]) for turn in range(more)]

    def block() -> list[float]:
        conversation(side)
        times: list[float] = []
        for turn, query in enumerate(queries, TURNS):
            put(side, talk[: (turn + 1) * TURN], turn * TURN)
            times += timed(side.match_slots, [query])
        return times

    return block


def match_branches(side: Side, effort: Effort, *, call: str) -> Block:
    """Matches many prompts with the same beginning, in random order."""
    side.clear()
    prompts = Prompts()
    stem = prompts.draw(STEM)
    put(side, stem)
    queries = []
    for i in range(effort.branches):
        prompt = stem + prompts.branch(OWN, i)
        put(side, prompt, STEM)
        queries.append(side.query(prompt))
        assert side.match(queries[-1]) == STEM + OWN
    random.Random(0).shuffle(queries)
    operation = getattr(side, call)

    def block() -> list[float]:
        return [statistics.fmean(timed(operation, queries)) for _ in range(PASSES)]

    block()
    return block


def _repeated(side: Side, effort: Effort, call: str, tokens: array[int]) -> Block:
    """Calls one of a side's ways to match with the same query, all of which must be found."""
    query = side.query(tokens)
    operation = getattr(side, call)
    assert side.match(query) == len(tokens), (side.name, side.match(query))

    def block() -> list[float]:
        return timed(operation, [query] * (5 + effort.calls))[5:]

    return block


# ---- changing ------------------------------------------------------------------------------------


def insert_suffix(side: Side, effort: Effort, *, tokens: int) -> Block:
    """Publishes prompts that share `STEM` tokens, each with `tokens` of its own."""

    def block() -> list[float]:
        side.clear()
        prompts = Prompts()
        stem = prompts.draw(STEM)
        put(side, stem)
        count = 2 + max(1, effort.calls // (1 + tokens // 8_192))
        fresh = [side.insertion(stem + prompts.branch(tokens, i), STEM) for i in range(count)]
        return timed(side.insert, fresh)[2:]

    return block


def evict_tenth(side: Side, effort: Effort) -> Block:
    """Frees a tenth of the leaves that hang on one stem, least recently used first."""

    def block() -> list[float]:
        side.clear()
        prompts = Prompts()
        stem = prompts.draw(OWN)
        put(side, stem)
        for i in range(effort.leaves):
            put(side, stem + prompts.branch(LEAF, i), len(stem))
        wanted = effort.leaves // 10 * LEAF
        freed: list[int] = []
        times = timed(lambda tokens: freed.append(side.evict(tokens)), [wanted])
        assert freed == [wanted], (side.name, freed)
        return times

    return block


def lock_path(side: Side, effort: Effort, *, above: bool) -> Block:
    """Locks and unlocks a conversation's end; `above`: all but its last turn is locked already."""
    talk = conversation(side)
    if above:
        side.lock(side.node_of(side.query(talk[:-TURN])))
    node = side.node_of(side.query(talk))

    def block() -> list[float]:
        return timed(side.lock_unlock, [node] * (5 + 4 * effort.calls))[5:]

    return block


def make_key(side: Side, effort: Effort, *, tokens: int) -> Block:
    """Makes a key from a list of tokens."""
    prompt = Prompts().draw(tokens).tolist()

    def block() -> list[float]:
        return timed(side.make_key, [prompt] * (1 + max(1, effort.calls // 4)))[1:]

    return block


# ---- all of them ---------------------------------------------------------------------------------


def workloads(effort: Effort) -> list[Workload]:
    """Every row, in order."""
    return [
        *_matches(effort, "match_slots", "match + slots", "match"),
        Workload("match + slots, after each turn", "grown", match_grown),
        *_matches(effort, "match", "match", "lookup"),
        Workload("insert of 4,096", "insert", partial(insert_suffix, tokens=4_096)),
        Workload("insert of 32,768", "insert", partial(insert_suffix, tokens=32_768)),
        Workload(f"evict 10 % of {effort.leaves:,} leaves", "evict", evict_tenth),
        Workload(f"lock + unlock, {TURNS} turns", "lock", partial(lock_path, above=False)),
        Workload("lock + unlock, locked above", "lock below", partial(lock_path, above=True)),
        Workload(f"match + hold, {TURNS} turns", "hold", partial(match_turns, call="hold")),
        Workload("make a key of 4,096", "key", partial(make_key, tokens=4_096)),
        Workload("make a key of 131,072", "key", partial(make_key, tokens=131_072)),
    ]


def _matches(effort: Effort, call: str, name: str, kind: str) -> Iterator[Workload]:
    for tokens in (4_096, 32_768, 131_072):
        prepare = partial(match_edge, call=call, tokens=tokens)
        yield Workload(f"{name}, edge of {tokens:,}", kind, prepare)
    yield Workload(f"{name}, {TURNS} turns", kind, partial(match_turns, call=call))
    prepare = partial(match_branches, call=call)
    yield Workload(f"{name}, {effort.branches:,} branches", kind, prepare)
