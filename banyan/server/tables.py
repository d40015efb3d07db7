"""What the terminal shows of sizes: of what a model caches, and of what fits where.

Owns the form only: every figure comes in as plain rows, which may have crossed a process boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]


def size_table(rows: Sequence[Row]) -> Table:
    """What each tier holds, and which pool runs out first.

    Args:
        rows: the fields of `SizeRow`, one row per tier and component.
    """
    has_host = any(row["tier"] == "host" for row in rows)
    ranks = max((row.get("ranks", 1) for row in rows), default=1)
    caption = f"device: each of {ranks} ranks; host: all of them together" if ranks > 1 else None
    if not has_host:
        caption = "no host tier; give --host-bytes or --host-ratio for one"
    counted = [n for n in ("tokens", "windows", "states") if any(row[n] for row in rows)]
    table = _table("What fits", ("tier", "component"), (*counted, "bytes"), caption)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            row["tier"],
            row["component"],
            *(_count(row[name]) for name in counted),
            size_text(row["bytes"]),
            "limits" if row["limiting"] else "",
        )
    return table


def component_table(rows: Sequence[Row]) -> Table:
    """What the model caches: how far back it is needed, and what it takes.

    Args:
        rows: the fields of `ComponentRow`, one row per component.
    """
    table = _table("What is cached", ("component", "reach"), ("layers", "bytes", "record"))
    for row in rows:
        unit = "state" if row["token_bytes"] is None else "token"
        table.add_row(
            row["name"],
            row["reach"],
            _count(row["layers"]),
            f"{_count(row[f'{unit}_bytes'])} per {unit}",
            size_text(row["record_bytes"]),
        )
    return table


def inspection(found: Row) -> Iterator[Table | Text]:
    """All that `banyan inspect` prints, in order.

    Args:
        found: the fields of `Inspection`.
    """
    page = f"pages of {found['page_size']:,} tokens ({size_text(found['page_bytes'])} each)"
    facts = f"{found['family']}, {found['layers']:,} layers, {found['dtype']}, {page}"
    yield Text.from_markup(f"[bold]{escape(found['model'])}[/bold]: {escape(facts)}")
    yield component_table(found["components"])
    yield _buffer_table(found["components"])
    yield _capacity_table(found["components"], found["one_gib"])


def _buffer_table(components: Sequence[Row]) -> Table:
    table = _table("Buffers", ("component", "buffer", "one per", "shape", "dtype"), ("layers",))
    for component in components:
        for row in component["buffers"]:
            tokens = "token" if row["stride"] == 1 else f"{row['stride']:,} tokens"
            table.add_row(
                component["name"],
                row["name"],
                "state" if component["token_bytes"] is None else tokens,
                " x ".join(map(str, row["shape"])),
                row["dtype"],
                _count(row["layers"]),
            )
    return table


def _capacity_table(components: Sequence[Row], whole: Row) -> Table:
    caption = "prompts: all components, one checkpoint each"
    table = _table("One GiB holds", ("of",), ("each", "holds"), caption)
    for row in components:
        for unit, each in (("tokens", "token_bytes"), ("states", "state_bytes")):
            if row[f"gib_{unit}"] is not None:
                fits = f"{row[f'gib_{unit}']:,} {unit}"
                table.add_row(f"{row['name']} alone", size_text(row[each]), fits)
    longest = whole["longest_prompt"]
    fits = "any length" if longest is None else f"{longest:,} tokens"
    table.add_row("one long prompt", "", fits)
    prompts = f"prompts of {whole['prompt_tokens']:,} tokens"
    table.add_row(prompts, size_text(whole["prompt_bytes"]), f"{whole['prompts']:,} prompts")
    return table


def size_text(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _count(value: float | None) -> str:
    """A number with separators; nothing for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _table(
    title: str, texts: Sequence[str], numbers: Sequence[str], caption: str | None = None
) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", box=box.SIMPLE_HEAD)
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table
