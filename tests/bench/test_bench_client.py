"""The client measures what the server did, and a failed request is a sample."""

from __future__ import annotations

import socket

import pytest
from fake_server import FakeServer, serving

from banyan.bench.client import Sample
from banyan.bench.drive import Pace, RoundResult, play
from banyan.bench.work import MultiTurn, SharedPrefix, Vocabulary, Workload

SMALL = SharedPrefix(groups=2, prompts_per_group=3, shared=16, question=4, output=5, rounds=2)


def run(
    workload: Workload, url: str, pace: Pace | None = None, vocabulary: int = 1000
) -> list[RoundResult]:
    heard: list[tuple[int, Sample]] = []
    results = play(
        workload,
        Vocabulary(vocabulary),
        url,
        "fake",
        pace or Pace(),
        lambda turn, sample: heard.append((turn, sample)),
    )
    told = [(turn, s.index) for turn, s in heard]
    kept = [(turn, s.index) for turn, r in enumerate(results) for s in r.samples]
    assert sorted(told) == sorted(kept)
    return results


def test_requests_say_what_the_benchmark_needs() -> None:
    fake = FakeServer()
    with serving(fake) as url:
        run(SMALL, url)
    assert len(fake.bodies) == 12
    for body in fake.bodies:
        assert body["model"] == "fake"
        assert body["max_tokens"] == 5 and body["ignore_eos"] is True
        assert body["temperature"] == 0 and body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 20


def test_the_receipt_is_taken_over_and_adds_up() -> None:
    with serving(FakeServer()) as url:
        first, second = run(SMALL, url, Pace(concurrency=1))
    for sample in first.samples + second.samples:
        assert sample.error is None
        assert sample.computed + sample.device + sample.host == sample.prompt_tokens == 20
        assert sample.output_tokens == 5
    assert sorted(s.computed for s in first.samples)[-2:] == [20, 20]
    assert [(s.computed, s.device, s.host) for s in second.samples] == [(1, 10, 9)] * 6


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_times_are_those_of_the_tokens(per_chunk: int) -> None:
    with serving(FakeServer(gap_s=0.03, per_chunk=per_chunk)) as url:
        work = SharedPrefix(groups=1, prompts_per_group=1, shared=4, question=4, output=6, rounds=1)
        (result,) = run(work, url)
    (sample,) = result.samples
    assert sample.ttft_s is not None and sample.ttft_s >= 0.03
    assert len(sample.itl_s) == 6 - per_chunk
    assert sum(sample.itl_s) >= 0.9 * 0.03 * (6 / per_chunk - 1)
    assert sample.ttft_s + sum(sample.itl_s) <= sample.duration_s <= result.duration_s


@pytest.mark.parametrize(("concurrency", "most"), [(2, 2), (0, 6)])
def test_concurrency_bounds_the_requests_on_their_way(concurrency: int, most: int) -> None:
    fake = FakeServer(gap_s=0.02)
    with serving(fake) as url:
        run(SMALL, url, Pace(concurrency=concurrency))
    assert fake.most_running == most


def test_a_conversation_carries_the_answered_tokens() -> None:
    fake = FakeServer()
    talk = MultiTurn(clients=2, rounds=3, first=6, message=3, output=4)
    with serving(fake) as url:
        results = run(talk, url, Pace(concurrency=1))
    for turn, result in enumerate(results[1:], start=1):
        for sample in result.samples:
            assert sample.computed == 3, f"turn {turn} computes only the new message"
            assert sample.prompt_tokens == 6 + turn * (4 + 3)


def test_a_refused_request_is_a_sample_with_the_reason() -> None:
    with serving(FakeServer(refuse=0)) as url:
        (result, _) = run(SMALL, url, vocabulary=30)
    refused = [s for s in result.samples if s.error]
    assert 0 < len(refused) < 6
    for sample in refused:
        assert sample.error == (
            'HTTP 400: {"error":{"message":"this token is refused","type":"invalid_request_error"}}'
        )
        assert sample.ttft_s is None and sample.prompt_tokens == 0


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with serving(FakeServer(cut=0)) as url:
        (result, _) = run(SMALL, url, vocabulary=30)
    reasons = {s.error for s in result.samples}
    assert reasons == {None, "the stream ended without usage"}


def test_a_server_that_is_not_there_is_an_error_per_request() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        first, second = run(SMALL, url)
    errors = [s.error for s in first.samples + second.samples]
    assert len(errors) == 12
    assert all(error is not None and error.startswith("ConnectError") for error in errors)
