"""A running server with the fake core, and ways to start more."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from banyan.server.launch import ServerProcess

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "fake_serve.py"))


@pytest.fixture(scope="session", autouse=True)
def environment_of_children() -> Iterator[None]:
    """Child processes find `fake_core`, and compute with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), before))))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def fake_server(*arguments: str, model: str = "fake") -> ServerProcess:
    return ServerProcess(model, arguments, command=COMMAND, start_timeout_s=30)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with fake_server() as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """False for a process that has ended, even where nobody has collected its status."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
