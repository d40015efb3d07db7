"""What every test of the simulation needs around it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    """The engine logs each fault that a seed plans."""
    torch.set_num_threads(1)
    log = logging.getLogger("banyan.engine")
    before, log.disabled = log.disabled, True
    yield
    log.disabled = before
