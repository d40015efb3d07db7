"""Rows, comparisons, JSON and picture say what the samples say."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from banyan.bench.client import Sample
from banyan.bench.drive import RoundResult
from banyan.bench.plot import draw
from banyan.bench.report import (
    Comparison,
    Report,
    Run,
    compare,
    comparison_table,
    failed_requests,
    first_error,
    later_ttft,
    machine,
    ms,
    round_table,
    summarize,
    versions,
    write_json,
)


def sample(
    ttft: float | None, *, index: int = 0, host: int = 0, error: str | None = None
) -> Sample:
    return Sample(
        index=index,
        group=0,
        sent_s=0.0,
        ttft_s=ttft,
        itl_s=[0.010, 0.030],
        duration_s=1.0,
        prompt_tokens=100,
        output_tokens=3,
        computed=60 - host,
        device=40,
        host=host,
        error=error,
    )


def run(name: str, *rounds: list[float], host: int = 0) -> Run:
    results = [
        RoundResult(2.0, [sample(t, index=i, host=host) for i, t in enumerate(r)]) for r in rounds
    ]
    return Run(
        name=name,
        serve_args=["--page-size", "16"],
        summaries=[summarize(r) for r in results],
        rounds=results,
        cache_stats={"hits": 3},
    )


def report(*runs: Run) -> Report:
    pair = compare(runs[0], runs[-1])
    return Report(
        benchmark="shared-prefix",
        model="tiny-linear",
        workload={"groups": 2},
        pace={"concurrency": 4},
        versions=versions(),
        machine=machine(),
        runs=list(runs),
        comparisons=[pair] if pair else [],
    )


def test_a_round_is_summed_over_its_good_requests() -> None:
    samples = [sample(0.1), sample(0.2, host=20), sample(0.4), sample(9.0, error="broken")]
    row = summarize(RoundResult(1.5, samples))
    assert (row.requests, row.failed) == (4, 1)
    assert row.ttft_p50_s == pytest.approx(0.2)
    assert row.ttft_p95_s == pytest.approx(0.38)
    assert row.itl_p50_s == pytest.approx(0.02)
    assert (row.computed, row.device, row.host) == (160, 120, 20)
    assert row.hit_rate == pytest.approx(140 / 300)


def test_a_round_without_an_answer_has_no_numbers() -> None:
    row = summarize(RoundResult(1.5, [sample(None, error="broken")]))
    assert (row.requests, row.failed, row.hit_rate) == (1, 1, None)
    assert row.ttft_p50_s is row.ttft_p95_s is row.itl_p50_s is None
    assert "-" in rendered_row([row])


def rendered_row(rows: list) -> str:  # type: ignore[type-arg]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(round_table("device + host", rows))
    return console.export_text()


def test_the_table_has_a_row_per_round() -> None:
    first = run("device + host", [0.5], [0.0123], host=10)
    text = rendered_row(first.summaries)
    lines = text.splitlines()
    assert lines[0].strip() == "device + host"
    second = next(line for line in lines if line.split("│")[1:2] == ["     2 "])
    assert [cell.strip() for cell in second.strip("│").split("│")] == [
        "2", "1", "12.3 ms", "12.3 ms", "20 ms", "2.00 s", "50", "40", "10", "50.0%",
    ]  # fmt: skip


def test_comparison_looks_at_the_later_rounds_only() -> None:
    fast = run("device + host", [9.0, 9.0], [0.1, 0.2], [0.3, 0.2])
    slow = run("host off", [0.001], [0.8], [0.8])
    assert later_ttft(fast) == pytest.approx(0.2)
    pair = compare(fast, slow)
    assert pair is not None
    assert pair.change_percent == pytest.approx(-75)
    assert compare(run("one round", [1.0]), slow) is None
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(comparison_table([pair]))
    assert "-75.0 %" in console.export_text()


def test_failures_are_counted_and_explained() -> None:
    broken = RoundResult(1.0, [sample(0.1), sample(None, error="HTTP 503")])
    bad = Run(
        name="x",
        serve_args=[],
        summaries=[summarize(broken)],
        rounds=[broken],
        cache_stats={},
    )
    good = run("y", [0.1])
    assert (failed_requests([good, bad]), first_error([good, bad])) == (1, "HTTP 503")
    assert (failed_requests([good]), first_error([good])) == (0, None)


def test_json_holds_everything_and_reads_back(tmp_path: Path) -> None:
    written = report(run("device + host", [0.5], [0.1]), run("host off", [0.5], [0.4]))
    path = tmp_path / "new" / "result.json"
    write_json(written, path)
    read = msgspec.json.decode(path.read_bytes(), type=Report)
    assert read == written
    assert read.comparisons == [
        Comparison(
            name="device + host",
            against="host off",
            ttft_s=0.1,
            against_ttft_s=0.4,
            change_percent=pytest.approx(-75),
        )
    ]
    assert {"python", "torch", "transformers"} <= set(read.versions)


@pytest.mark.parametrize("runs", [1, 3])
def test_the_picture_is_drawn(tmp_path: Path, runs: int) -> None:
    names = ("device + host", "host off", "cache off")[:runs]
    path = tmp_path / "picture.png"
    draw(report(*(run(n, [0.5, 0.7], [0.1, 0.2], [0.1, 0.3], host=30) for n in names)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (12.0, "12,000 ms"), (0.00025, "0.25 ms")],
)
def test_milliseconds_are_readable(seconds: float | None, text: str) -> None:
    assert ms(seconds) == text
