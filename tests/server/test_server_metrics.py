"""Latencies are measured per prompt, and the engine's numbers are passed on as they are."""

from __future__ import annotations

import pytest

from banyan.engine.messages import Output
from banyan.server.metrics import ServerMetrics, samples


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"banyan_{name}", labels)


def test_first_token_and_gaps() -> None:
    """Tokens at 2 s and 5 s, two more together at 6 s; another prompt's first token at 4 s."""
    now = [0.0]
    metrics = ServerMetrics(lambda: now[0])
    timer = metrics.timer()
    for at, name, tokens, reason in (
        (2.0, "a", [1], None),
        (4.0, "b", [1], None),
        (5.0, "a", [2], None),
        (6.0, "a", [3, 4], "stop"),
        (7.0, "b", [], "abort"),
    ):
        now[0] = at
        timer.note(Output(request_id=name, tokens=tokens, finish_reason=reason))
    assert value(metrics, "time_to_first_token_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_sum") == 2.0 + 4.0
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == 3.0 + 0.5 + 0.5
    assert value(metrics, "request_duration_seconds_sum") == 6.0 + 7.0


def test_clients_gone() -> None:
    metrics = ServerMetrics()
    metrics.timer().client_gone()
    assert value(metrics, "clients_gone_total") == 1


def test_stats_become_families_with_labels() -> None:
    metrics = ServerMetrics()
    pool = {"capacity": 8, "free": 3, "evictable": 5, "protected": 0, "other": 0}
    stats = {
        "engine": {"finished": {"stop": 4}, "prompt_tokens": {"host": 96, "device": 32}},
        "cache": {
            "tiers": {"host": {"state": pool}},
            "copies": {"backup": {"verified": 7, "mismatched": 0, "reasons": {"checksum": 2}}},
            "misses": {"loading": 1},
        },
    }
    text = metrics.render(stats).decode()
    assert "banyan_engine_up 1.0" in text
    assert value(metrics, "requests_finished_total", reason="stop") == 4
    assert value(metrics, "prompt_tokens_total", source="host") == 96
    assert value(metrics, "pool_slots_free", tier="host", component="state") == 3
    assert value(metrics, "copy_verified_total", kind="backup") == 7
    assert value(metrics, "copy_failures_total", kind="backup", reason="checksum") == 2
    assert value(metrics, "cache_misses_total", reason="loading") == 1


def test_without_an_engine_only_the_servers_own_numbers_remain() -> None:
    text = ServerMetrics().render(None).decode()
    assert "banyan_engine_up 0.0" in text
    assert "banyan_prompt_tokens" not in text
    assert "banyan_time_to_first_token_seconds_count" in text


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("a",), [([], 1.0)]),
        (("b", "*"), [(["x"], 2.0), (["y"], 3.0)]),
        (("missing", "*"), []),
        (("b", "x"), [([], 2.0)]),
    ],
)
def test_paths(path: tuple[str, ...], found: list[tuple[list[str], float]]) -> None:
    assert list(samples({"a": 1, "b": {"x": 2, "y": 3}}, path)) == found
