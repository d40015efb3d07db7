"""What all parity tests share."""

import gc
from collections.abc import Iterator

import pytest

from tests.support.threads import one_thread as one_thread


@pytest.fixture(autouse=True)
def memory_goes_with_its_engine() -> Iterator[None]:
    """An engine's parts refer to each other: without a collection its pools, half a GiB, wait for
    one by chance, and two test processes grow to 12 GiB each."""
    yield
    gc.collect()
