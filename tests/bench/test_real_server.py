"""The benchmarks against real servers with a built-in model, and the demo with the real one."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from banyan.bench.cli import app
from banyan.bench.report import Report

DEMO_MODEL = Path(__file__).parents[2] / ".demo" / "gemma-3-270m"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def bench(command: str, folder: Path) -> Report:
    json = folder / "result.json"
    words = [*shlex.split(command), "--json", str(json), "--png", str(folder / "result.png")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)
    report = msgspec.json.decode(json.read_bytes(), type=Report)
    for run in report.runs:
        for sample in (s for r in run.rounds for s in r.samples):
            assert sample.computed + sample.device + sample.host == sample.prompt_tokens
            assert len(sample.itl_s) == sample.output_tokens - 1
    return report


def test_the_second_round_comes_from_host(tmp_path: Path) -> None:
    report = bench(
        "shared-prefix --groups 4 --prompts-per-group 2 --shared 192 --question 32 --output 4 "
        "--rounds 2 --device-groups 1 --concurrency 1 --model tiny-linear --page-size 8 "
        "--serve-arg chunk=128 --serve-arg max-running=1 --serve-arg verify=all "
        "--serve-arg load-back-threshold=16 --host-bytes 64MiB",
        tmp_path,
    )
    (run,) = report.runs
    first, second = run.summaries
    assert second.host > second.device
    assert second.computed < first.computed
    assert second.hit_rate is not None and second.hit_rate > 0.9
    copies = run.cache_stats["cache"]["copies"]
    assert copies["backup"]["verified"] > 0 and copies["load_back"]["verified"] > 0
    assert copies["backup"]["mismatched"] == copies["load_back"]["mismatched"] == 0


def test_a_conversation_is_resumed_where_its_answer_ended(tmp_path: Path) -> None:
    report = bench(
        "multi-turn --clients 2 --rounds 3 --first 64 --message 16 --output 8 --concurrency 1 "
        "--model tiny-swa --page-size 8 --serve-arg chunk=64 --device-bytes 16MiB",
        tmp_path,
    )
    (run,) = report.runs
    for turn, result in enumerate(run.rounds[1:], start=1):
        for sample in result.samples:
            assert sample.prompt_tokens == 64 + turn * 24
            assert sample.computed <= 24 + 8


@pytest.mark.slow
def test_compare_measures_three_servers(tmp_path: Path) -> None:
    report = bench(
        "shared-prefix --groups 4 --prompts-per-group 2 --shared 512 --question 32 --output 4 "
        "--rounds 2 --device-groups 1 --concurrency 1 --model tiny-linear --compare",
        tmp_path,
    )
    full, no_host, no_cache = report.runs
    assert full.summaries[1].host > 0
    assert sum(s.host for s in no_host.summaries + no_cache.summaries) == 0
    assert sum(s.device for s in no_cache.summaries) == 0
    assert full.summaries[1].computed < no_host.summaries[1].computed
    assert [pair.against for pair in report.comparisons] == ["host off", "cache off"]


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.skipif(not DEMO_MODEL.is_dir(), reason="needs the demo model: make model")
def test_the_demo_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from banyan.bench.demo import main

    with pytest.raises(typer.Exit) as ended:
        main(model=DEMO_MODEL, results=tmp_path, documents=4, questions=1, rounds=2)
    said = capsys.readouterr().out
    assert ended.value.exit_code == 0, said
    assert "records compared by SHA-256, 0 differed" in said
    assert (tmp_path / "demo.json").is_file() and (tmp_path / "demo.png").is_file()
