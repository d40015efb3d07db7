"""A real server under real clients: disconnects leave nothing behind, the front end stays awake."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from banyan.server.launch import ServerProcess

CLIENTS = 200
OPTIONS = (
    "--page-size", "16", "--chunk", "128", "--device-bytes", "24MiB", "--host-bytes", "48MiB",
    "--max-running", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("tiny-linear", OPTIONS) as process:
        yield process


def resident_mib(pid: int) -> float:
    """Resident memory of a process (MiB)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def request_owned(stats: dict[str, Any]) -> int:
    """Device slots that are neither free nor the tree's."""
    return sum(pool["other"] for pool in stats["cache"]["tiers"]["device"].values())


def locked(stats: dict[str, Any]) -> int:
    return sum(
        pool["protected"] for tier in stats["cache"]["tiers"].values() for pool in tier.values()
    )


async def one_client(http: httpx.AsyncClient, number: int, leaves: bool) -> str:
    """Stream an answer; a client that leaves closes the connection after a random while."""
    source = random.Random(number)
    stem = [32 + (number % 10 + i) % 95 for i in range(120)]
    body = {
        "model": "tiny-linear",
        "prompt": stem + source.choices(range(32, 127), k=source.randrange(1, 60)),
        "max_tokens": source.randrange(4, 12),
        "stream": True,
        "ignore_eos": True,
    }
    patience = source.uniform(0.0, 4.0)
    started = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if leaves and time.monotonic() - started > patience:
                return "left"
            if line == "data: [DONE]":
                return "done"
    return "cut"


async def crowd(url: str, clients: int, seed: int) -> tuple[list[str], list[float]]:
    """All clients at once, a third of which may leave; and how long /health took meanwhile."""
    source = random.Random(seed)
    leavers = set(source.sample(range(clients), clients // 3))
    limits = httpx.Limits(max_connections=clients + 4)
    health: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        waiting = asyncio.gather(
            *(_leave_early(http, n, n in leavers, source.uniform(0, 3)) for n in range(clients))
        )
        while not waiting.done():
            began = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            health.append(time.monotonic() - began)
            await asyncio.sleep(0.2)
        return await waiting, health


async def _leave_early(http: httpx.AsyncClient, number: int, leaves: bool, after: float) -> str:
    """A leaver may also go before its first byte."""
    task = asyncio.create_task(one_client(http, number, leaves))
    if leaves:
        await asyncio.wait([task], timeout=after)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            return "left"
    return await task


def wait_idle(url: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        stats: dict[str, Any] = httpx.get(f"{url}/v1/cache/stats", timeout=30).json()
        if not stats["cache"]["leases"] and not stats["cache"]["operations"]:
            return stats
        assert time.monotonic() < deadline, stats
        time.sleep(0.1)


def test_disconnecting_clients_leave_nothing(server: ServerProcess) -> None:
    """200 streaming clients, a third disconnects at random: no slot owned, no lock, no growth."""
    asyncio.run(crowd(server.url, CLIENTS, seed=1))  # pools and allocators touch their pages
    wait_idle(server.url)
    before = resident_mib(server.engine_pid), resident_mib(server.pid)
    outcomes, health = asyncio.run(crowd(server.url, CLIENTS, seed=2))
    stats = wait_idle(server.url)
    assert outcomes.count("done") >= CLIENTS - CLIENTS // 3
    assert outcomes.count("left") > CLIENTS // 10
    assert "cut" not in outcomes
    assert request_owned(stats) == 0
    assert locked(stats) == 0
    assert httpx.post(f"{server.url}/v1/cache/check", timeout=30).status_code == 200
    after = resident_mib(server.engine_pid), resident_mib(server.pid)
    for name, old, new in zip(("engine", "http"), before, after, strict=True):
        assert new < old * 1.1 + 16, f"{name}: {old:.0f} MiB before, {new:.0f} MiB after"
    slow = sorted(health)[int(0.9 * len(health))]
    assert slow < 5.0, f"90 % of health checks within {slow:.2f} s"


def test_a_flush_frees_everything(server: ServerProcess) -> None:
    assert httpx.post(f"{server.url}/v1/cache/flush", timeout=30).status_code == 200
    stats = wait_idle(server.url)
    for tier in stats["cache"]["tiers"].values():
        for name, pool in tier.items():
            assert pool["free"] == pool["capacity"], name
