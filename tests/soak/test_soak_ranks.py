"""`banyan soak` with several ranks: they agree and balance; what goes wrong on one is told."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from banyan.engine.oracle_build import OracleOptions
from banyan.engine.rank_process import EXIT_RANK_LOST, lead
from banyan.soak.drive import Core
from banyan.soak.options import SoakOptions
from banyan.soak.run import run_soak
from tests.soak.test_soak_cli import SMALL, TROUBLE, report_of, small, soak

ROOT = Path(__file__).parents[2]
GONE_S = 15.0


@pytest.mark.parametrize("preset", ["full+window+state", "full+indexer"])
def test_a_disturbed_soak_of_three_ranks_balances(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = ("--tp", "3", "--preset", preset, "--detach", "--faults", "0.05", "--json", str(path))
    assert soak(*SMALL, *TROUBLE, *words) == 0
    report = report_of(path)
    found = {line.what: line.found for line in report.balance}
    assert "on 3 ranks" in found["ranks have equal histories"]
    assert sum(row.failed for row in report.rounds) > 0, "on one rank, so on all"
    assert sum(row.aborted for row in report.rounds) > 3
    assert sum(row.load_backs for row in report.rounds) > 0


def _planted(what: str, options: SoakOptions) -> tuple[int, str]:
    def start(engine_options: OracleOptions, ranks: int) -> Core:
        return lead(f"tests.soak.planted:{what}", msgspec.json.encode(engine_options), ranks)

    out = io.StringIO()
    return run_soak(options, Console(file=out, width=300), start=start), out.getvalue()


@pytest.fixture(autouse=True)
def ranks_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_wrong_byte_on_one_rank_ends_the_soak() -> None:
    status, shown = _planted("one_host_byte", small(preset="full", tp=2))
    assert status == 1 and "difference: rank 1" in shown, shown


def test_a_wrong_byte_on_one_rank_is_a_miss_for_all_under_verify() -> None:
    status, shown = _planted("one_host_byte", small(preset="full", tp=2, verify="all"))
    assert status == 1 and "difference: SHA-256 equal on both sides of a copy" in shown, shown
    assert "on 2 ranks" in shown and "wrong bytes read by a forward pass" not in _differences(shown)


def _differences(shown: str) -> str:
    return "\n".join(line for line in shown.splitlines() if line.startswith("difference"))


def test_ranks_that_drift_apart_are_told_the_first_operation() -> None:
    status, shown = _planted("one_eviction", small(tp=3))
    told = _differences(shown)
    assert status == 1 and "the ranks have drifted apart; the first difference is" in told, shown
    assert "rank 0:" in told and "rank 1:" in told and "rank 2:" in told


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    words = ["--tp", "4", "--groups", "200", *SMALL[2:], "--preset", "full+indexer"]
    process = subprocess.Popen(
        [sys.executable, "-m", "banyan", "soak", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("victim", ["follower", "leader"])
def test_the_end_of_one_rank_ends_the_soak(running: subprocess.Popen[str], victim: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    deadline = time.monotonic() + 60
    while len(ranks := children_of(running.pid)) < 3 or not _is_busy(ranks[0]):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    os.kill(ranks[1] if victim == "follower" else running.pid, signal.SIGKILL)
    killed = time.monotonic()
    said, _ = running.communicate(timeout=GONE_S)
    while not all(map(is_gone, ranks)):
        assert time.monotonic() - killed < GONE_S, "a rank is still there"
        time.sleep(0.05)
    assert set(Path("/dev/shm").iterdir()) <= before
    if victim == "follower":
        assert running.returncode in (1, EXIT_RANK_LOST), said  # the latter on a busy machine
        assert "rank 2 was ended by signal 9" in " ".join(said.split()), said
        assert "Traceback" not in said


def _is_busy(pid: int) -> bool:
    """Whether a rank maps memory that the others share: its pools are there, and it is at work."""
    try:
        return "memfd:banyan-host" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
