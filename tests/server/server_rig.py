"""Starts servers with the fake core, and waits for what happens in other processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from banyan.server.launch import ServerProcess

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "fake_serve.py"))
"""What to run instead of `banyan`."""


def fake_server(*arguments: str, model: str = "fake") -> ServerProcess:
    return ServerProcess(model, arguments, command=COMMAND, start_timeout_s=30)


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
