"""The tables at start and of `banyan inspect`: every figure in its place, within 80 columns."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from rich.console import Console, RenderableType

from banyan.engine.inspect import Capacity, Inspection, component_rows, whole_model
from banyan.pools.plan import SizeRow
from banyan.pools.sizing import plan_sizes
from banyan.server.tables import component_table, inspection, size_table, size_text
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

SPEC = CacheSpec(
    (
        Component("full", Full(), (Buffer("k", 0, (2, 16), "float32"),)),
        Component("window", Window(1024), (Buffer("k", 1, (2, 16), "float32"),)),
        Component("state", Point(), (Buffer("s", 2, (64, 64), "float32"),)),
    ),
    page_size=16,
)


def size_rows(host_bytes: int, ranks: int = 1) -> list[SizeRow]:
    plan = plan_sizes(
        SPEC,
        device_bytes=1 << 32,
        host_bytes=host_bytes,
        max_running=16,
        chunk=512,
        state_interval=None,
        ranks=ranks,
    )
    return plan.table_rows()


def lines(host_bytes: int, ranks: int = 1) -> list[str]:
    return printed(size_table([asdict(row) for row in size_rows(host_bytes, ranks)]))


def printed(*parts: RenderableType) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(*parts)
    said = capture.get()
    assert "…" not in said
    return said.splitlines()


def words(lines: list[str]) -> list[str]:
    """The lines with single spaces."""
    return [" ".join(line.split()) for line in lines]


def test_a_row_per_tier_and_component() -> None:
    said = lines(1 << 33)
    for tier in ("device", "host"):
        rows = [line for line in said if line.split()[:1] == [tier]]
        assert [row.split()[1] for row in rows] == ["full", "window", "state"]
        assert sum("limits" in row for row in rows) == 1
    assert "no host tier" not in "".join(said)


def test_without_a_host_tier_it_says_how_to_get_one() -> None:
    assert "no host tier; give --host-bytes" in "".join(lines(0))


def test_host_bytes_are_those_of_all_ranks() -> None:
    """The budget is the node's, so the slots of a rank are a quarter and the bytes are the same."""
    one, four = ([r for r in size_rows(1 << 33, n) if r.tier == "host"] for n in (1, 4))
    assert "ranks" not in " ".join(lines(1 << 33))
    said = words(lines(1 << 33, ranks=4))
    assert "device: each of 4 ranks; host: all of them together" in " ".join(said)
    for alone, row in zip(one, four, strict=True):
        assert row.slots == pytest.approx(alone.slots / 4, rel=0.01)
        assert row.bytes == pytest.approx(alone.bytes, rel=0.01)
        shown = [line for line in said if line.startswith(f"host {row.component} ")]
        assert [size_text(row.bytes) in line for line in shown] == [True]


def test_what_is_cached_has_reach_and_bytes() -> None:
    rows = words(printed(component_table([asdict(r) for r in component_rows(SPEC)])))
    assert "component reach layers bytes record" in rows
    assert "full full 1 128 per token 2.0 KiB" in rows
    assert "window window(1024) 1 128 per token 2.0 KiB" in rows
    assert "state point 1 16,384 per state 16.0 KiB" in rows


def inspected(spec: CacheSpec, one_gib: Capacity | None = None) -> list[str]:
    found = Inspection(
        model="[a]/model",
        family="any",
        layers=3,
        dtype="float32",
        page_size=16,
        components=component_rows(spec),
        page_bytes=4096,
        one_gib=one_gib or whole_model(spec),
    )
    return printed(*inspection(asdict(found)))


def test_an_inspection_names_the_model_and_all_parts() -> None:
    said = inspected(SPEC)
    assert said[0] == "[a]/model: any, 3 layers, float32, pages of 16 tokens (4.0 KiB each)"
    rows = words(said)
    assert "state s state 64 x 64 float32 1" in rows
    assert "state alone 16.0 KiB 65,536 states" in rows


def test_an_inspection_shows_strides_and_fractions() -> None:
    packed = Buffer("c", 0, (3,), "float16", stride=4)
    rows = words(inspected(CacheSpec((Component("full", Full(), (packed,)),))))
    assert "full c 4 tokens 3 float16 1" in rows
    assert "full full 1 1.5 per token 24 B" in rows


def test_any_length_where_length_costs_nothing() -> None:
    spec = CacheSpec((Component("full", Full()), SPEC.components[2]))
    said = inspected(spec)
    assert any("one long prompt" in line and "any length" in line for line in said)
    assert not any("full alone" in line for line in said)


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
