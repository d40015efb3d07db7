"""`--verify all` over random requests: each copy compared by SHA-256, none differs.

100 requests per preset with every test run, 2,000 under `slow`; the number compared is printed.
"""

from __future__ import annotations

import random

import pytest
import torch

from banyan.engine.messages import GenerateRequest, Sampling
from banyan.engine.models import load_model
from banyan.engine.presets import PRESETS
from tests.parity.harness import MIB, Engine

SIZES = [pytest.param(100), pytest.param(2000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_copy_is_compared(
    name: str, policy: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    if policy == "write_back" and count > 100:
        count //= 4
    source = random.Random(name)
    stems = [source.choices(range(32, 127), k=source.randrange(40, 160)) for _ in range(24)]
    with Engine(
        load_model(name),
        verify="all",
        write_policy=policy,
        page_size=16,
        chunk=128,
        max_running=4,
        device_bytes=4 * MIB,
        host_bytes=24 * MIB,
    ) as engine:
        submitted = finished = 0
        while finished < count:
            while submitted < count and submitted - finished < 8:
                stem = source.choice(stems)
                prompt = stem[: source.randrange(1, len(stem))]
                prompt += source.choices(range(32, 127), k=source.randrange(1, 40))
                sampling = Sampling(max_tokens=source.randrange(1, 5), ignore_eos=True)
                engine.core.submit(
                    GenerateRequest(request_id=f"r{submitted}", prompt=prompt, sampling=sampling)
                )
                submitted += 1
            if source.random() < 0.01 and submitted > finished:
                engine.core.abort(f"r{source.randrange(max(0, submitted - 8), submitted)}")
            finished += sum(output.finish_reason is not None for output in engine.core.step())
        engine.settle()
        copies = engine.cache.stats()["copies"]
        compared = sum(kind["verified"] for kind in copies.values())
        with capsys.disabled():
            print(
                f"\n{name} {policy}: {count} requests, {compared} records compared by SHA-256 "
                f"({copies['backup']['verified']} backups, {copies['load_back']['verified']} "
                f"load-backs), {sum(k['mismatched'] for k in copies.values())} differ"
            )
        assert copies["backup"]["verified"] > 0 and copies["load_back"]["verified"] > 0
        assert all(kind["mismatched"] == 0 for kind in copies.values())
        assert all(not kind["reasons"].get("copy_error") for kind in copies.values())
