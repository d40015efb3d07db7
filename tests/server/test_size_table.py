"""The table at start: what fits where, and which pool limits it, within 80 columns."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from rich.console import Console

from banyan.pools.sizing import plan_sizes
from banyan.server.serve import size_table, size_text
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

SPEC = CacheSpec(
    (
        Component("full", Full(), (Buffer("k", 0, (2, 16), "float32"),)),
        Component("window", Window(1024), (Buffer("k", 1, (2, 16), "float32"),)),
        Component("state", Point(), (Buffer("s", 2, (64, 64), "float32"),)),
    ),
    page_size=16,
)


def lines(host_bytes: int) -> list[str]:
    plan = plan_sizes(
        SPEC,
        device_bytes=1 << 32,
        host_bytes=host_bytes,
        max_running=16,
        chunk=512,
        state_interval=None,
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(size_table([asdict(row) for row in plan.table_rows()]))
    return capture.get().splitlines()


def test_a_row_per_tier_and_component() -> None:
    said = lines(1 << 33)
    for tier in ("device", "host"):
        rows = [line for line in said if line.split()[:1] == [tier]]
        assert [row.split()[1] for row in rows] == ["full", "window", "state"]
        assert sum("limits" in row for row in rows) == 1
    assert not any("…" in line for line in said)
    assert "no host tier" not in "".join(said)


def test_without_a_host_tier_it_says_how_to_get_one() -> None:
    assert "no host tier; give --host-bytes" in "".join(lines(0))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3,072.0 GiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size_text(count) == text
