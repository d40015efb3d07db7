"""docs/models.md has the families that are tried, and is made of nothing but what tests found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import FAMILIES
from tools import support_table
from tools.support_table import Incomplete, page_of_others, page_of_tried
from tools.try_configs import Tried, try_one

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"


def families_in(page: str) -> list[str]:
    """The first column of the first table."""
    table = page.split("## Tried")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)


def record(**changes: Any) -> dict[str, Any]:
    """What a run over one family with two combinations records; `changes` by kind."""
    answers = {
        "prompts": 3,
        "shortest": 80,
        "longest": 90,
        "chunk": 32,
        "page": 16,
        "rounds": ["cold", "device", "host", "mixed"],
        "tokens": 1000,
    }
    chunks = {
        "tokens": 150,
        "transformers": 2e-5,
        "engine": 0.0,
        "remark": "",
        "components": [{"reach": "full", "buffers": ["k", "v"]}, {"reach": "point", "buffers": []}],
        "cells": 2,
    }
    found: list[dict[str, Any]] = [
        {"kind": "answers", "running": 1, **answers},
        {"kind": "answers", "running": 4, **answers},
        {"kind": "chunks", **chunks},
        {"kind": "mutations", "unread": [], "changed": 8},
        *({"kind": kind} for kind in ("bits", "bfloat16", "verify", "carried", "earlier state")),
    ]
    for one in found:
        one |= {"family": "llama", "passed": True, **changes.get(one["kind"].replace(" ", "_"), {})}
    return {"versions": {"torch": "9.9", "transformers": "8.8"}, "found": found}


def test_the_page_lists_exactly_the_families_that_are_tried() -> None:
    """Fails when a family was added or dropped since `make support-table` was run."""
    assert families_in(PAGE.read_text(encoding="utf-8")) == sorted(FAMILIES)


def test_the_page_names_its_command_and_versions() -> None:
    assert re.search(
        r"`make support-table` with torch \d+\.\d+\S* and transformers \d+\.\d+",
        PAGE.read_text(encoding="utf-8"),
    )


def test_the_page_claims_no_failure_and_no_gap() -> None:
    """The page that is kept is that of a run in which all passed."""
    table = PAGE.read_text(encoding="utf-8").split("## Tried")[1].split("\n## ")[0]
    figures = re.findall(r"\| (\d+)/(\d+) ", table)
    assert len(figures) == 4 * len(FAMILIES)
    assert all(passed == of for passed, of in figures)
    assert "fail" not in table


def test_a_row_shows_what_was_found() -> None:
    page = page_of_tried(record())
    assert families_in(page) == ["llama"]
    cells = "| full: k, v | 2/2 | 2/2 | 2/2 | 2/2 | 2,000 | yes, yes | 8 | 2e-05, 0 |  |"
    assert f"| `llama` {cells}" in page
    assert "torch 9.9 and transformers 8.8" in page
    said = " ".join(page.split())
    assert "3 prompts of 80 to 90 tokens" in said and "1 and 4 running requests" in said


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"answers": {"rounds": ["cold", "device"]}}, "| 2/2 | 2/2 | 0/2 | 0/2 |"),
        ({"bfloat16": {"passed": False}}, "| yes, fail |"),
        ({"verify": {"passed": False}}, "| fail |"),
        ({"earlier_state": {"passed": False}}, "| fail |"),
        ({"mutations": {"passed": False, "changed": None}}, "| fail |"),
        ({"chunks": {"passed": False}}, "2e-05, 0 fail |"),
        ({"chunks": {"remark": "it forgets"}}, "`transformers`: it forgets |"),
        ({"mutations": {"unread": ["a", "b"], "changed": 6}}, "| 2 more buffers are carried"),
    ],
)
def test_a_row_shows_what_failed_and_what_is_special(changes: dict[str, Any], shown: str) -> None:
    assert shown in page_of_tried(record(**changes))


def test_page_sizes_of_its_own_are_told() -> None:
    odd, usual = record(answers={"page": 32}), record()
    for name in ("olmo", "qwen3"):
        odd["found"] += [{**one, "family": name} for one in usual["found"]]
    page = page_of_tried(odd)
    assert "with pages of 16 tokens and" in " ".join(page.split())
    assert re.findall(r"\| `(\w+)` .*\| pages of 32 tokens: whole groups", page) == ["llama"]


@pytest.mark.parametrize("index", range(9))
def test_a_missing_result_makes_no_page(
    index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = record()
    del whole["found"][index]
    with pytest.raises(Incomplete, match="llama has"):
        page_of_tried(whole)
    (tmp_path / "record.json").write_text(json.dumps(whole))
    page = tmp_path / "page.md"
    assert support_table.main([str(tmp_path / "record.json"), "--out", str(page)]) == 1
    assert "nothing was rendered" in capsys.readouterr().err
    assert not page.exists()


def test_an_empty_record_makes_no_page() -> None:
    with pytest.raises(Incomplete, match="no family"):
        page_of_tried({**record(), "found": []})


def test_others_are_grouped_and_families_left_out() -> None:
    page = page_of_others(
        [
            Tried("llama", "llama", "full: k, v", ""),
            Tried("a", "a", "full: k, v", ""),
            Tried("b", "b_text", "full: k, v", ""),
            Tried("c", "c", "", "it caches nothing"),
        ],
        {"llama"},
    )
    derived, refused = page.split("## Refused")
    assert "| full: k, v | `a`, `b` (`b_text`) |" in derived
    assert "| it caches nothing | `c` |" in refused
    assert "llama" not in page


@pytest.mark.parametrize(
    ("model_type", "components", "reason"),
    [
        ("qwen3_next", "full: k, v; point: conv, recurrent", ""),
        ("hunyuan_v1_dense", "full: k, v", ""),  # only with a size that its default leaves open
        ("bart", "", "it is an encoder-decoder model, whose prompt is not a prefix of its answer"),
        ("rwkv", "", "no layer of this model caches anything"),
        ("blt", "", "transformers makes no cache: AttributeError: 'BltConfig' object has no"),
    ],
)
def test_a_model_type_is_tried_by_its_config(model_type: str, components: str, reason: str) -> None:
    found = try_one(model_type)
    assert found.components == components
    assert found.reason.startswith(reason) and bool(reason) != bool(components)


def test_workers_findings_reach_the_record(tmp_path: Path) -> None:
    """Two workers, one passed test and one that fails after it told its part."""
    (tmp_path / "test_two.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_it(n, record_property):\n"
        "    part = {'kind': 'k', 'n': n, 'seen': []}\n"
        "    record_property('support', part)\n"
        "    part['seen'].append(n)\n"
        "    assert n == 1\n"
    )
    path = tmp_path / "made" / "record.json"
    options = ["-p", "tests.parity.recording", "--support-record", str(path), "-n", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = json.loads(path.read_text())
    assert [(one["n"], one["seen"], one["passed"]) for one in found["found"]] == [
        (1, [1], True),
        (2, [2], False),
    ]
    assert found["versions"].keys() == {"torch", "transformers"}
