"""The commands from options to files, against the fake server."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from fake_server import FakeServer, serving
from typer.testing import CliRunner

from banyan.bench import target
from banyan.bench.cli import app
from banyan.bench.report import Report
from banyan.bench.target import Configuration
from banyan.errors import ConfigError

SMALL = shlex.split(
    "--groups 2 --prompts-per-group 3 --shared 64 --question 8 --output 4 --rounds 2"
)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Configuration]:
    """Replaces starting a real server by a fake one; lists what was asked for."""
    asked: list[Configuration] = []

    @contextmanager
    def start(console: object, model: str, configuration: Configuration) -> Iterator[str]:
        asked.append(configuration)
        with serving(FakeServer()) as url:
            yield url

    monkeypatch.setattr(target, "started", start)
    return asked


def test_shared_prefix_drives_a_running_server(tmp_path: Path) -> None:
    json, png = tmp_path / "a.json", tmp_path / "a.png"
    files = ["--json", str(json), "--png", str(png)]
    with serving(FakeServer()) as url:
        result = bench("shared-prefix", *SMALL, "--url", url, "--vocab-size", "500", *files)
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert (report.benchmark, report.model, len(report.runs)) == ("shared-prefix", "fake", 1)
    first, second = report.runs[0].summaries
    assert (first.requests, first.failed, second.requests, second.failed) == (6, 0, 6, 0)
    assert second.hit_rate == pytest.approx(71 / 72)
    assert second.computed == 6
    assert "98.6%" in result.output
    assert report.workload["shared"] == 64 and report.pace["concurrency"] == 2
    assert png.read_bytes().startswith(b"\x89PNG")


def test_multi_turn_drives_a_running_server() -> None:
    talk = shlex.split("--clients 2 --rounds 3 --first 32 --message 8 --output 4 --concurrency 1")
    with serving(FakeServer()) as url:
        result = bench("multi-turn", *talk, "--url", url, "--vocab-size", "500")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    assert len(rows) == 3
    assert [cell.strip() for cell in rows[2].split("│")][7] == "16"


def test_compare_plays_on_three_fresh_servers(started: list[Configuration], tmp_path: Path) -> None:
    json = tmp_path / "a.json"
    size = ["--device-groups", "1", "--model", "tiny-linear"]
    result = bench("shared-prefix", *SMALL, *size, "--compare", "--json", str(json))
    assert result.exit_code == 0, result.output
    assert [c.name for c in started] == ["device + host", "host off", "cache off"]
    sizes = {c.given["device_bytes"] for c in started}
    assert len(sizes) == 1 and sizes.pop() > 0
    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert [r.name for r in report.runs] == [c.name for c in started]
    assert [(c.name, c.against) for c in report.comparisons] == [
        ("device + host", "host off"),
        ("device + host", "cache off"),
    ]
    prompts = [[s.prompt_tokens for r in run.rounds for s in r.samples] for run in report.runs]
    assert prompts[0] == prompts[1] == prompts[2]


def test_prompts_are_cut_from_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    fake = FakeServer()
    with serving(fake) as url:
        given = ["--url", url, "--model", "tiny-linear", "--text", str(text)]
        result = bench("shared-prefix", *SMALL, *given)
    assert result.exit_code == 0, result.output
    written = text.read_text() * 2
    for body in fake.bodies:
        assert bytes(body["prompt"][:64]).decode() in written


def test_failed_requests_fail_the_command() -> None:
    with serving(FakeServer(refuse=0)) as url:
        result = bench("shared-prefix", *SMALL, "--url", url, "--vocab-size", "20")
    assert result.exit_code == 1
    assert "request(s) failed" in result.output
    assert "this token is refused" in result.output


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--rounds", "0", "--model", "tiny-full"], "--rounds"),
        ([], "--model"),
        (["--url", "http://127.0.0.1:1", "--compare"], "--compare"),
        (["--url", "http://127.0.0.1:1", "--page-size", "4"], "--url"),
        (["--url", "http://127.0.0.1:1", "--device-groups", "4"], "--device-groups"),
        (["--url", "http://127.0.0.1:1"], "--url"),
        (["--url", "nonsense"], "--url"),
        (["--model", "tiny-full", "--page-size", "7"], "--chunk"),
        (
            ["--model", "tiny-full", "--device-bytes", "1MiB", "--device-groups", "2"],
            "--device-groups",
        ),
        (["--model", "tiny-full", "--page-size", "4", "--serve-arg", "page-size=8"], "--serve-arg"),
        (["--model", "tiny-full", "--device-bytes", "few"], "--device-bytes"),
        (["--model", "tiny-full", "--text", "no-such-file"], "--text"),
        (["--model", "tiny-full", "--text", "x", "--vocab-size", "9"], "--vocab-size"),
        (["--model", "tiny-full", "--vocab-size", "0"], "--vocab-size"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    started: list[Any], arguments: list[str], option: str
) -> None:
    result = bench("shared-prefix", *arguments)
    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.option == option
    assert not started
