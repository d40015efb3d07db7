"""A running server with the fake core, and the environment of all child processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest
from server_rig import HERE, fake_server

from banyan.server.launch import ServerProcess


@pytest.fixture(scope="session", autouse=True)
def environment_of_children() -> Iterator[None]:
    """Child processes find `fake_core`, and compute with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), before))))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with fake_server() as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client
