"""`docs/cases.md` is honest: the tests it names exist, and each case names all of its tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "docs" / "cases.md"
LIST = ROOT.parent / "shared" / "cases.md"

ROW = re.compile(r"^\| (C\d{3}) \| (.+?) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[str, str]]:
    """(case, last cell) of every row."""
    return [(case, cell) for case, _, cell in ROW.findall(TABLE.read_text())]


def names_in(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions) and node.name.startswith("test_")
    }


def test_every_test_named_exists() -> None:
    missing = [
        f"{case}: {file}::{name}"
        for case, cell in rows()
        for file, name in NAMED.findall(cell)
        if not (ROOT / "tests" / file).exists() or name not in names_in(ROOT / "tests" / file)
    ]
    assert not missing, "\n".join(missing)


def test_every_row_has_a_test_or_a_reason() -> None:
    reasons = ("not built yet", "there is one core", "no transport yet", "no events yet")
    for case, cell in rows():
        assert NAMED.search(cell) or any(reason in cell for reason in reasons), case
    assert all(count == 1 for count in Counter(case for case, _ in rows()).values())


def test_every_case_that_has_a_test_names_it() -> None:
    cells = dict(rows())
    found = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT / "tests").as_posix()
        for name in sorted(names_in(path)):
            case = re.match(r"test_(c\d{3})_", name)
            if case:
                found += 1
                assert f"`{file}::{name}`" in cells.get(case[1].upper(), ""), f"{file}::{name}"
    assert found > 80


@pytest.mark.skipif(not LIST.exists(), reason="the list of cases is not beside this checkout")
def test_every_case_has_a_row() -> None:
    cases = re.findall(r"^### (C\d{3})", LIST.read_text(), re.MULTILINE)
    assert cases and [case for case, _ in rows()] == cases
