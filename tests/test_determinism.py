"""The same seed gives the same log, whatever the hash seed of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def log_of(which: str, hash_seed: str) -> str:
    """What `tests.property.trace` prints under a hash seed."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.property.trace", which],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
    )
    return run.stdout


@pytest.mark.parametrize("which", ["tree", "cache"])
def test_runs_do_not_depend_on_the_hash_seed(which: str) -> None:
    first = log_of(which, "0")
    assert int(first.split()[0]) > 5_000, "the log says something"
    for hash_seed in ("1", "2") if which == "tree" else ("1",):
        assert log_of(which, hash_seed) == first


def test_another_seed_gives_another_log() -> None:
    from tests.property.trace import tree_log

    assert tree_log(0) == tree_log(0)
    assert tree_log(0) != tree_log(1)
