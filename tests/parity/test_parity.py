"""INV-27: greedy answers with the prefix on any tier equal those of `transformers` without one.

The presets run in part with every test run and in whole under `slow`; Gemma 3 270M under `slow` and
`demo`. `equal` is token for token over 32 prompts.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from banyan.engine.models import LoadedModel, load_model
from banyan.engine.presets import PRESETS
from tests.parity.harness import (
    MIB,
    Engine,
    assert_same_bits,
    plain_answers,
    prompts_of,
    restored_from,
)

GEMMA = Path(__file__).parents[2] / ".demo" / "gemma-3-270m"
PAGES, CHUNKS, RUNNING = (1, 16, 64), (32, 512), (1, 4)
QUICK = {(1, 32, 4), (16, 512, 1), (64, 32, 4)}
MATRIX = list(itertools.product(PAGES, CHUNKS, RUNNING))


@cache
def loaded(name: str) -> LoadedModel:
    return load_model(name)


@cache
def preset_work(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """32 prompts and their plain answers of 8 tokens."""
    prompts = prompts_of(range(32, 127), groups=8, each=4, shared=150, own=60)
    return prompts, plain_answers(loaded(name).model, prompts, 8)


@cache
def gemma_work() -> tuple[list[list[int]], list[list[int]]]:
    """32 prompts of real text and their plain answers of 6 tokens."""
    import pydoc_data.topics

    model = loaded(str(GEMMA))
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    tokens = model.tokenizer.encode(text[:60_000], add_special_tokens=False)
    prompts = []
    for group in range(8):
        at = group * 800
        for i in range(4):
            own = tokens[at + 200 + 40 * i : at + 220 + 45 * i]
            prompts.append([2, *tokens[at : at + 90 + 7 * group], *own])
    return prompts, plain_answers(model.model, prompts, 6)


def run_everywhere(
    model: LoadedModel, work: tuple[list[list[int]], list[list[int]]], **options: Any
) -> None:
    """Cold, then with the prefixes on device, then on host only: always the plain answers."""
    prompts, wanted = work
    length = len(wanted[0])
    with Engine(model, **options) as engine:
        for where in ("cold", "device", "host"):
            if where == "host":
                engine.evict_device()
            answers = engine.answer(prompts, length)
            for prompt, (tokens, usage), plain in zip(prompts, answers, wanted, strict=True):
                assert tokens == plain, (where, prompt[:8], usage)
                assert usage.computed + usage.device + usage.host == len(prompt)
            receipts = [usage for _, usage in answers]
            if where == "device":
                assert all(u.device > 0 and u.host == 0 for u in receipts)
            if where == "host":
                assert sum(u.host > 0 for u in receipts) >= 8, "each group once from host"
                assert all(u.device + u.host > 0 for u in receipts)
            engine.settle()
            engine.core.check()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("page", "chunk", "running"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in MATRIX],
)
def test_preset_answers(name: str, page: int, chunk: int, running: int) -> None:
    run_everywhere(
        loaded(name), preset_work(name), page_size=page, chunk=chunk, max_running=running
    )


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.skipif(not GEMMA.is_dir(), reason="the demo model is not there: run make model")
@pytest.mark.parametrize(("page", "chunk", "running"), MATRIX)
def test_gemma_answers(page: int, chunk: int, running: int) -> None:
    run_everywhere(
        loaded(str(GEMMA)),
        gemma_work(),
        page_size=page,
        chunk=chunk,
        max_running=running,
        device_bytes=512 * MIB,
        host_bytes=768 * MIB,
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("page", PAGES)
def test_logits_after_a_host_restore_are_those_of_a_device_hit(name: str, page: int) -> None:
    """Bit for bit, with the same cut points: two engines do the same work, one from each tier."""
    known = preset_work(name)[0][:6]
    device, host = (
        restored_from(where, loaded(name), known, page_size=page, chunk=512)
        for where in ("device", "host")
    )
    assert_same_bits(device, host)
