"""INV-27 for every family: answers with the prefix on any tier, or on both, are those of
`transformers` without a prefix cache.

Each test run has every family once (page 16, four running requests); all page sizes, and one
running request, come under `slow`. Prompts of 80 to 240 tokens are computed 32 at a time, so
that chunks end in many places and the windows of 24 tokens are crossed. Greedy answers are
compared token for token. No family needs more room: `test_chunks` shows how little the logits move
when a prompt is cut. What was found is recorded for docs/models.md (`recording.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from banyan.engine.messages import Usage
from banyan.spec import CacheSpec
from tests.parity.harness import (
    Engine,
    assert_same_bits,
    plain_answers,
    plain_logits,
    prompts_of,
    recorded_forwards,
    restored_from,
)
from tests.parity.recording import SUPPORT
from tests.support.families import (
    CHUNKS_DIFFER,
    FAMILIES,
    QUICK_FAMILIES,
    config_of,
    loaded_family,
    pages_of,
)

Record = Callable[[str, object], None]

PAGE = 16
RUNNING = (1, 4)
CHUNK = 32
GROUPS, EACH, ANSWER = 3, 3, 8
NOISE_LIMIT = 1e-3
"""Of a logit; the largest are about 4. Rounding moves them by 1e-4 at most, a lost state by 1."""


def matrix() -> Iterator[Any]:
    """(family, page, running); the middle page and four running requests are quick."""
    for family in FAMILIES:
        for page, running in itertools.product(pages_of(family), RUNNING):
            quick = (page, running) == (PAGE, 4)
            marks = () if quick else pytest.mark.slow
            yield pytest.param(family, page, running, marks=marks, id=f"{family}-{page}-{running}")


def families() -> Iterator[Any]:
    """All families; quick are those that have one of each kind of buffer among them."""
    for family in FAMILIES:
        yield pytest.param(family, marks=() if family in QUICK_FAMILIES else pytest.mark.slow)


class Work(NamedTuple):
    """Prompts, their plain answers, and the beginnings that they share, each a token longer."""

    prompts: list[list[int]]
    answers: list[list[int]]
    fronts: list[list[int]]


@cache
def family_work(family: str) -> Work:
    prompts = prompts_of(range(32, 127), groups=GROUPS, each=EACH, shared=110, own=100)
    fronts: dict[tuple[int, ...], list[int]] = {}
    for prompt in prompts:
        shared = max(_common(prompt, other) for other in prompts if other is not prompt)
        fronts[tuple(prompt[:shared])] = prompt[: shared + 1]
    answers = plain_answers(loaded_family(family).model, prompts, ANSWER)
    return Work(prompts, answers, list(fronts.values()))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning of both."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


class Rounds:
    """The same prompts again and again, with what is known of them in one place after another."""

    def __init__(self, engine: Engine, work: Work) -> None:
        self.engine, self.work = engine, work
        self.computed: list[int] = []
        self.host_bytes = 0

    def ask(self) -> list[Usage]:
        """Answers are the plain ones, receipts add up; the receipts."""
        prompts, wanted, _ = self.work
        answers = self.engine.answer(prompts, ANSWER)
        for prompt, (tokens, usage), plain in zip(prompts, answers, wanted, strict=True):
            assert tokens == plain, (prompt[:8], usage)
            assert usage.computed + usage.device + usage.host == len(prompt)
        self.engine.settle()
        self.engine.core.check()
        return [usage for _, usage in answers]

    def cold(self) -> None:
        """Nothing is known but what the group's first prompts leave for the others."""
        receipts = self.ask()
        assert all(u.host == 0 for u in receipts)
        assert sum(u.device < PAGE for u in receipts) >= GROUPS, "first tokens may be equal"
        assert self.engine.loaded_bytes == 0

    def device(self) -> None:
        """All on device."""
        receipts = self.ask()
        assert all(u.device > 0 and u.host == 0 for u in receipts)
        assert self.engine.loaded_bytes == 0
        self.computed = [u.computed for u in receipts]

    def host(self) -> None:
        """All on host only; later prompts of a group find some of it on device again."""
        self.engine.evict_device()
        receipts = self.ask()
        assert sum(u.host > 0 for u in receipts) >= GROUPS
        assert [u.computed for u in receipts] == self.computed, "as much found as on device"
        self.host_bytes = self.engine.loaded_bytes
        assert self.host_bytes > 0

    def mixed(self) -> None:
        """Half of each component on device; then the beginnings on device, the rest on host."""
        half = self.engine.evict_half()
        for c, component in enumerate(self.engine.cache.spec.components):
            if component.buffers:
                assert half.gone[c] > 0 and half.left[c] > 0, (component.name, half)
        receipts = self.ask()
        assert [u.computed for u in receipts] == self.computed
        moved = self.engine.loaded_bytes - self.host_bytes
        assert 0 < moved < self.host_bytes, "some, and not all"

        self.engine.evict_device()
        self.engine.answer(self.work.fronts, 1)
        receipts = self.ask()
        assert [u.computed for u in receipts] == self.computed
        assert sum(u.device > 0 and u.host > 0 for u in receipts) >= GROUPS


@pytest.mark.parametrize(("family", "page", "running"), matrix())
def test_answers(family: str, page: int, running: int, record_property: Record) -> None:
    done: list[str] = []
    work = family_work(family)
    lengths = sorted(map(len, work.prompts))
    cell = {
        "kind": "answers",
        "family": family,
        "page": page,
        "running": running,
        "chunk": CHUNK,
        "prompts": len(lengths),
        "shortest": lengths[0],
        "longest": lengths[-1],
        "rounds": done,
        "tokens": 0,
    }
    record_property(SUPPORT, cell)
    assert len({tuple(answer) for answer in work.answers}) > GROUPS, "answers must tell prompts"
    with Engine(loaded_family(family), page_size=page, max_running=running, chunk=CHUNK) as engine:
        rounds = Rounds(engine, work)
        for where in (rounds.cold, rounds.device, rounds.host, rounds.mixed):
            where()
            done.append(where.__name__)
    cell["tokens"] = sum(map(len, work.answers)) * (len(done) + 1)  # mixed asks twice


@pytest.mark.parametrize("family", families())
def test_logits_after_a_host_restore_are_those_of_a_device_hit(
    family: str, record_property: Record
) -> None:
    record_property(SUPPORT, {"kind": "bits", "family": family})
    _same_bits(family, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_from_host_is_bfloat16_from_device(family: str, record_property: Record) -> None:
    """Not compared with `generate`: in bfloat16 where a prompt is cut changes near ties."""
    record_property(SUPPORT, {"kind": "bfloat16", "family": family})
    _same_bits(family, "bfloat16")


def _same_bits(family: str, dtype: str) -> None:
    loaded = loaded_family(family, dtype)
    known = family_work(family).prompts[:6]
    options = {"page_size": PAGE, "chunk": CHUNK, "dtype": dtype}
    device, host = (restored_from(where, loaded, known, **options) for where in ("device", "host"))
    assert_same_bits(device, host)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks(family: str, record_property: Record) -> None:
    """Cutting a prompt moves the logits by rounding alone: the engine's for every family, and those
    of `transformers` itself for all but some, whose own caches lose something there."""
    loaded = loaded_family(family)
    tokens = random.Random(1).choices(range(32, 127), k=150)
    whole = plain_logits(loaded.model, [tokens])
    pieces = plain_logits(loaded.model, [tokens[i : i + CHUNK] for i in range(0, 150, CHUNK)])
    with Engine(loaded, page_size=PAGE, max_running=1, chunk=CHUNK) as engine:
        with recorded_forwards() as logits:
            engine.answer([tokens], 1)
        assert len(logits) > 4
    noise = float((whole - pieces).abs().max())
    ours = float((whole[-1] - logits[-1][0]).abs().max())
    spec = CacheSpec.from_config(config_of(family), PAGE)
    record_property(
        SUPPORT,
        {
            "kind": "chunks",
            "family": family,
            "tokens": len(tokens),
            "transformers": noise,
            "engine": ours,
            "remark": CHUNKS_DIFFER.get(family, ""),
            "components": [
                {"reach": str(c.reach), "buffers": list(dict.fromkeys(b.name for b in c.buffers))}
                for c in spec.components
            ],
            "cells": len(pages_of(family)) * len(RUNNING),
        },
    )
    assert ours < NOISE_LIMIT
    if family in CHUNKS_DIFFER:
        assert noise > 100 * NOISE_LIMIT, "transformers has changed: drop the remark"
    else:
        assert noise < NOISE_LIMIT


def test_the_quick_families_have_every_kind_of_buffer() -> None:
    def kinds(chosen: Iterator[str] | Sequence[str]) -> set[tuple[str, str]]:
        specs = (CacheSpec.from_config(config_of(family), PAGE) for family in chosen)
        return {
            (type(c.reach).__name__, b.name) for s in specs for c in s.components for b in c.buffers
        }

    assert kinds(QUICK_FAMILIES) == kinds(list(FAMILIES))
