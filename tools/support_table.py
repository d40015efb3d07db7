"""Renders docs/models.md: which model families were tried and how that went, which are refused.

    python -m tools.support_table RECORD --out docs/models.md

RECORD is what the family tests found (`tests/parity/recording.py`). Owns the page's form only. A
record in which a family lacks a result is not rendered: the page would claim what nobody has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tools.try_configs import Tried, try_all

Found: TypeAlias = Mapping[str, Any]

ROUNDS = ("cold", "device", "host", "mixed")
ONCE = ("chunks", "bits", "bfloat16", "mutations", "verify", "carried")
"""Kinds of results that every family has once; families with states have `earlier state` too."""

HEAD = """\
# Models

Made by `make support-table` with torch {torch} and transformers {transformers}, on CPU; not edited
by hand.

Nothing in Banyan is made for one family: what a model's layers keep is observed, and makes its
components (`banyan/observe.py`, `banyan/spec.py`). Each family below is a small model of random
weights with its family's kinds of layers; real models of the family differ from it in sizes. Before
an engine serves anything it also checks the model itself, and refuses one whose answer depends on
how its prompt is cut (`banyan/engine/selftest.py`).

## Tried

{asked}

- **cold**: nothing is known before. **device**: the same prompts again. **host**: again, after the
  device was emptied and overwritten. **mixed**: again with half of each component evicted, then
  with shared beginnings on device and the rest on host only. Figures: combinations of page size and
  running requests that passed, of all.
- **bits**: the logits of every forward after a restore from host are those of a hit on device, bit
  for bit, in float32 and in bfloat16.
- **bytes**: for how many buffers, each of one layer, one flipped bit in what is restored, and the
  buffer's absence, change the first logits; `verify` catches such bits, every buffer is seen to
  arrive, and the state of a page earlier will not do.
- **noise**: largest difference of a logit (the largest are about 4) between {tokens} tokens at once
  and in chunks: in `transformers` on its own cache; and in the engine, for the last token.
"""

ASKED = (
    "Greedy answers to {prompts} prompts of {shortest} to {longest} tokens, in float32, are "
    "compared token for token with those of `transformers` without a prefix cache, with pages of "
    "{pages} tokens and {running} running requests, prompts computed at most {chunk} tokens at a "
    "time."
)

NOT_TRIED = """
## Spec derived, not tried

A spec follows from the default config of these types or, where that makes no model, from one of
small sizes. Nothing was run: the engine's own check is still to come when one of them is to be
served. In brackets the type of the text part, where it has a name of its own.
"""

REFUSED = """
## Refused

No spec follows from the default config of these types, nor from one of small sizes. Where the
reason is one of `transformers` itself, the complete config of a real model may fare better.
"""


class Incomplete(Exception):
    """The record lacks results that the page needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the page; 1 when the record is incomplete, and nothing is written then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    record = json.loads(given.record.read_text(encoding="utf-8"))
    try:
        tried = page_of_tried(record)
    except Incomplete as error:
        print(f"{given.record}: {error}; nothing was rendered", file=sys.stderr)
        return 1
    quiet_transformers()
    page = tried + page_of_others(try_all(), set(by_family(record["found"])))
    given.out.write_text(page, encoding="utf-8")
    return 0


def quiet_transformers() -> None:
    """No look at the hub, and no advice about kernels that are not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import logging

    logging.set_verbosity_error()


# ---- what was tried ------------------------------------------------------------------------------


def by_family(found: Iterable[Found]) -> dict[str, dict[str, list[Found]]]:
    """Results by family, by kind; families in alphabetical order."""
    sorted_out: dict[str, dict[str, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for one in sorted(found, key=lambda one: str(one["family"])):
        sorted_out[one["family"]][one["kind"]].append(one)
    return {family: dict(kinds) for family, kinds in sorted_out.items()}


def page_of_tried(record: Mapping[str, Any]) -> str:
    """The page down to the table of families.

    Raises:
        Incomplete: naming the family and what it lacks.
    """
    families = by_family(record["found"])
    if not families:
        raise Incomplete("no family was tried")
    for family, kinds in families.items():
        _check(family, kinds)
    cells = [cell for kinds in families.values() for cell in kinds["answers"]]
    usual = _usual_pages(families)
    running = _listed(sorted({cell["running"] for cell in cells}))
    asked = ASKED.format(**{**cells[0], "pages": _listed(usual), "running": running})
    head = HEAD.format(
        **record["versions"],
        asked=textwrap.fill(asked, 100, break_on_hyphens=False),
        tokens=next(iter(families.values()))["chunks"][0]["tokens"],
    )
    titles = ["family", "components", *ROUNDS, "tokens", "bits", "bytes", "noise", "remarks"]
    rows = [_row(family, kinds, usual) for family, kinds in families.items()]
    total = sum(cell["tokens"] for cell in cells)
    passed = f"\n{len(families)} families, {total:,} tokens of answers compared.\n"
    return head + "\n" + _table(titles, rows) + passed


def _check(family: str, kinds: Mapping[str, list[Found]]) -> None:
    for kind in ONCE:
        if len(kinds.get(kind, ())) != 1:
            raise Incomplete(f"{family} has {len(kinds.get(kind, ()))} results of {kind!r}, not 1")
    chunks = kinds["chunks"][0]
    cells = len(kinds.get("answers", ()))
    if cells != chunks["cells"]:
        raise Incomplete(f"{family} has {cells} of {chunks['cells']} results of 'answers'")
    if _has_states(chunks) and "earlier state" not in kinds:
        raise Incomplete(f"{family} has no result of 'earlier state'")


def _has_states(chunks: Found) -> bool:
    return any(part["reach"] == "point" for part in chunks["components"])


def _usual_pages(families: Mapping[str, Mapping[str, list[Found]]]) -> list[int]:
    """The page sizes that most families were tried with."""
    counts = Counter(tuple(_pages(kinds)) for kinds in families.values())
    return list(counts.most_common(1)[0][0])


def _pages(kinds: Mapping[str, list[Found]]) -> list[int]:
    return sorted({int(cell["page"]) for cell in kinds["answers"]})


def _row(family: str, kinds: Mapping[str, list[Found]], usual: list[int]) -> list[str]:
    cells, chunks, mutations = kinds["answers"], kinds["chunks"][0], kinds["mutations"][0]
    passed = [sum(where in cell["rounds"] for cell in cells) for where in ROUNDS]
    same = ["yes" if kinds[kind][0]["passed"] else "fail" for kind in ("bits", "bfloat16")]
    loaded = [mutations, kinds["verify"][0], kinds["carried"][0], *kinds.get("earlier state", [])]
    all_noticed = all(one["passed"] for one in loaded)
    return [
        f"`{family}`",
        "; ".join(
            f"{p['reach']}: {', '.join(p['buffers'])}" for p in chunks["components"] if p["buffers"]
        ),
        *(f"{count}/{len(cells)}" for count in passed),
        f"{sum(cell['tokens'] for cell in cells):,}",
        ", ".join(same),
        str(mutations["changed"]) if all_noticed else "fail",
        f"{_figure(chunks['transformers'])}, {_figure(chunks['engine'])}"
        + ("" if chunks["passed"] else " fail"),
        "; ".join(_remarks(kinds, usual)),
    ]


def _remarks(kinds: Mapping[str, list[Found]], usual: list[int]) -> list[str]:
    chunks, unread, pages = kinds["chunks"][0], kinds["mutations"][0]["unread"], _pages(kinds)
    remarks = [f"noise of `transformers`: {chunks['remark']}"] if chunks["remark"] else []
    if pages != usual:
        remarks.append(f"pages of {_listed(pages)} tokens: whole groups of compressed ones")
    if unread:
        remarks.append(f"{len(unread)} more buffers are carried, which no page boundary needs")
    return remarks


def _figure(value: float) -> str:
    return f"{value:.0e}" if value else "0"


# ---- what was not --------------------------------------------------------------------------------


def page_of_others(others: Iterable[Tried], families: set[str]) -> str:
    """The page's other tables: model types that are not in the table of families."""
    derived: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for one in others:
        if one.model_type in families:
            continue
        name = f"`{one.model_type}`"
        if one.text_type != one.model_type:
            name += f" (`{one.text_type}`)"
        if one.components:
            derived[one.components].append(name)
        else:
            refused[one.reason].append(name)
    return (
        NOT_TRIED
        + "\n"
        + _table(["components", "model types"], _grouped(derived))
        + REFUSED
        + "\n"
        + _table(["reason", "model types"], _grouped(refused))
    )


def _grouped(groups: Mapping[str, list[str]]) -> list[list[str]]:
    """The largest group first."""
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [[key, ", ".join(names)] for key, names in ordered]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _listed(values: Sequence[int]) -> str:
    """`1, 16 and 64`."""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


if __name__ == "__main__":
    raise SystemExit(main())
