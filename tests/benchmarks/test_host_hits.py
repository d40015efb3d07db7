"""The benchmark of host hits on a small prompt: what it calls a host hit comes from host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from banyan.engine.build import build_core
from banyan.options import ServeOptions
from benchmarks import host_hits
from benchmarks.host_hits import Asker, Row, measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_hits, "PROMPT", 128)
    monkeypatch.setattr(host_hits, "DEVICE_BYTES", 16 << 20)
    monkeypatch.setattr(host_hits, "HOST_BYTES", 64 << 20)


def test_hits_come_from_where_they_are_said_to() -> None:
    row = measure("tiny-linear", 2)
    assert (row.device_tokens, row.host_tokens) == (112, 112)
    assert min(row.computed_s, row.device_s, row.host_s) > 0


def test_an_eviction_leaves_nothing_on_device_and_all_on_host() -> None:
    core = build_core(ServeOptions(model="tiny-linear", device_bytes=16 << 20, host_bytes=64 << 20))
    asker, prompt = Asker(core), list(range(1, 129))
    asker.ask(prompt)
    asker.evict()
    device = core.cache.stats()["tiers"]["device"]
    assert all(pool["free"] == pool["capacity"] for pool in device.values())
    _, usage = asker.ask(prompt)
    assert (usage.device, usage.host) == (0, 112)
    core.check()
    core.close()


def test_a_hit_that_was_not_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asker, "evict", lambda self: None)
    with pytest.raises(RuntimeError, match="a host hit of prompt"):
        measure("tiny-linear", 1)


def test_the_ratio_is_of_host_over_device() -> None:
    row = Row("m", 1, 9.0, 2.0, 2.2, 1, 1)
    assert (row.ratio, row.met) == (1.1, True)
    assert not replace(row, host_s=2.4).met
