"""The example engine runs as it stands and its table shows what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_engine.py"


def test_the_toy_engine_shows_a_device_hit_and_a_host_hit():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=True
    )
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head == ["prompt", "answer", "computed", "device", "host"]
    cold, device, *others, host = rows
    assert cold[2:] == ["40", "0", "0"]
    assert device[2:] == ["4", "36", "0"]
    assert host[2:] == ["4", "0", "36"]
    assert cold[:2] == device[:2] == host[:2]
    assert len({row[1] for row in (cold, *others)}) == 4


def test_the_toy_engine_stays_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 65
