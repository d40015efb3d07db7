"""Several ranks behind the real server: the same answers as one rank's, and one end for all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_rig import is_alive, wait_for

from banyan.engine.presets import build_preset
from banyan.server.launch import ServerProcess
from tests.support.plain import reference_generate

RANKS = 4
NEW = 8
PROMPTS = [[(7 * n + 3 * i + i * i) % 90 + 33 for i in range(300)] for n in range(9)]
POOLS = {"tiny-linear": "7MiB", "tiny-swa": "2500KiB"}
"""Of each rank: some four of the prompts."""
GONE_S = 15.0


@pytest.fixture(scope="module", params=sorted(POOLS))
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    model = str(request.param)
    arguments = ["--tp", str(RANKS), "--device-bytes", POOLS[model], "--host-ratio", "8"]
    arguments += ["--max-running", "2", "--chunk", "128", "--verify", "all"]
    with ServerProcess(model, arguments) as running:
        yield running
        ranks = rank_pids(running)
        assert running.stop() == 0
        assert not any(map(is_alive, ranks))
        assert "Traceback" not in running.output


def health(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/health").json())


def rank_pids(server: ServerProcess) -> list[int]:
    pids = list(health(server)["rank_pids"])
    assert len(pids) == RANKS
    return pids


def ask(server: ServerProcess, prompt: list[int], tokens: int = NEW) -> tuple[str, dict[str, int]]:
    body = {"model": health(server)["model"], "prompt": prompt, "max_tokens": tokens}
    answer = httpx.post(
        f"{server.url}/v1/completions", json={**body, "temperature": 0}, timeout=120
    ).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]


def stats(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/v1/cache/stats", timeout=60).json())


def test_answers_are_those_of_one_rank_from_every_tier(server: ServerProcess) -> None:
    model = build_preset(health(server)["model"])
    want = "".join(map(chr, reference_generate(model, PROMPTS[0], NEW))).partition(chr(257))[0]
    cold, computed = ask(server, PROMPTS[0])
    assert computed["cached_tokens"] == 0
    warm, device = ask(server, PROMPTS[0])
    assert device["device_tokens"] >= 256 and device["host_tokens"] == 0
    for prompt in PROMPTS[1:]:
        ask(server, prompt, 1)
    back, host = ask(server, PROMPTS[0])
    assert host["host_tokens"] >= 256, "the other prompts have pushed it off the device"
    assert cold == warm == back == want


def test_every_rank_has_the_same_history_and_equal_bytes(server: ServerProcess) -> None:
    assert wait_for(lambda: stats(server)["cache"]["operations"] == 0)
    ranks = stats(server)["ranks"]
    assert len(ranks) == RANKS
    assert len({(rank["digest"], rank["operations"]) for rank in ranks}) == 1
    assert all(rank["verified"] > 0 and rank["mismatched"] == 0 for rank in ranks)
    found = httpx.post(f"{server.url}/v1/cache/check", timeout=60).json()
    assert found["ok"] is True and found["ranks"] == RANKS


def test_a_flush_empties_every_rank(server: ServerProcess) -> None:
    httpx.post(f"{server.url}/v1/cache/flush", timeout=60)
    for pools in stats(server)["cache"]["tiers"].values():
        assert all(pool["free"] == pool["capacity"] for pool in pools.values())
    assert httpx.post(f"{server.url}/v1/cache/check", timeout=60).json()["ok"] is True


@pytest.mark.parametrize("victim", [0, 2])
def test_the_end_of_one_rank_is_the_end_of_all(victim: int) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    arguments = ["--tp", str(RANKS), "--device-bytes", "8MiB", "--host-ratio", "4"]
    with ServerProcess("tiny-linear", arguments) as server:
        ranks = rank_pids(server)
        load = [threading.Thread(target=_keep_asking, args=(server, p)) for p in PROMPTS[:3]]
        for thread in load:
            thread.start()
        time.sleep(1.5)
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.monotonic()
        assert wait_for(lambda: not any(map(is_alive, ranks)), GONE_S)
        took = time.monotonic() - killed
        assert wait_for(lambda: health(server)["status"] == "engine_gone", 5)
        reason = health(server)["reason"]
        for thread in load:
            thread.join(GONE_S)
            assert not thread.is_alive(), "a client still waits for its answer"
        said = server.output
    who = "signal 9" if victim == 0 else f"rank {victim} was ended by signal 9"
    assert who in reason, (reason, took)
    assert "Traceback" not in said, said
    assert set(Path("/dev/shm").iterdir()) <= shared_before


def test_ranks_that_somebody_else_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun does it: every process is told its rank and where rank 0 is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-m", "banyan", "serve", "tiny-full", "--tp", "2"]
    follower = subprocess.Popen(command, env=os.environ | {"RANK": "1"})
    try:
        monkeypatch.setenv("RANK", "0")
        with ServerProcess("tiny-full", ["--tp", "2"]) as server:
            want = reference_generate(build_preset("tiny-full"), PROMPTS[0], NEW)
            assert ask(server, PROMPTS[0])[0] == "".join(map(chr, want)).partition(chr(257))[0]
            assert server.stop() == 0
        assert follower.wait(10) == 0
    finally:
        follower.kill()


def test_a_wrong_world_size_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    command = [sys.executable, "-m", "banyan", "serve", "tiny-full", "--tp", "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Write --tp 3" in done.stderr and "Trace" not in done.stderr


def test_ranks_that_cannot_share_the_heads_are_one_line() -> None:
    command = [sys.executable, "-m", "banyan", "serve", "tiny-full", "--tp", "3", "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2 and "Use --tp 1 or 2 or 4" in said and "Traceback" not in said


def _keep_asking(server: ServerProcess, prompt: list[int]) -> None:
    body = {"model": "tiny-linear", "prompt": prompt, "max_tokens": 400}
    httpx.post(f"{server.url}/v1/completions", json={**body, "temperature": 0}, timeout=60)
