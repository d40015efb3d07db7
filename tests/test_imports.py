"""Imports go downwards only, and the light parts stay light (design: layout)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import banyan

ROOT = Path(banyan.__file__).parent

LAYERS = (
    ("errors",),
    ("observe",),
    ("spec",),
    ("tree", "pools"),
    ("tiers",),
    ("ranks",),
    ("lease",),
    ("rolling", "grants"),
    ("cache", "audit"),
    ("options",),
    ("engine",),
    ("server",),
    ("bench",),
    ("soak",),
    ("integrations",),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
APART = {("tree", "pools"), ("pools", "tree")}
"""On one layer, and still not to know of each other."""

DETERMINISTIC = (
    "tree",
    "tiers/controller.py",
    "tiers/operation.py",
    "tiers/journal.py",
    "ranks.py",
    "engine/cutpoints.py",
)
"""What gets its clock, threads and randomness through the constructor, or needs none."""
FORBIDDEN = {"time", "random", "threading", "os", "asyncio", "queue", "datetime", "secrets"}


def modules() -> list[Path]:
    """All source files of the package."""
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path, typing_too: bool) -> Iterator[tuple[str, int]]:
    """(module, line) of every import in a file, lazy ones included.

    Args:
        typing_too: also those under `if TYPE_CHECKING`.
    """
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                skipped.update(inner for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_part_has_its_layer() -> None:
    parts = {layer_of(path) for path in modules()} - {"__init__"}
    assert parts <= RANK.keys(), f"add to LAYERS: {parts - RANK.keys()}"


def test_imports_go_downwards() -> None:
    found = []
    for path in modules():
        here = layer_of(path)
        if here == "__init__":
            continue
        for name, line in imported(path, typing_too=True):
            parts = name.split(".")
            there = parts[1] if parts[0] == "banyan" and len(parts) > 1 else None
            if there is None or there not in RANK:
                continue
            if RANK[there] > RANK[here] or (here, there) in APART:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which is above it")
    assert not found, "\n".join(found)


def test_the_test_sees_an_upward_import(tmp_path: Path) -> None:
    source = tmp_path / "upward.py"
    source.write_text("def f():\n    from banyan.engine import runner\n")
    assert ("banyan.engine.runner", 2) in list(imported(source, typing_too=False))
    source.write_text("if TYPE_CHECKING:\n    import banyan.cli\n")
    assert ("banyan.cli", 2) in list(imported(source, typing_too=True))
    assert ("banyan.cli", 2) not in list(imported(source, typing_too=False))


def test_the_deterministic_parts_import_no_time_threads_or_chance() -> None:
    found = []
    for name in DETERMINISTIC:
        top = ROOT / name
        assert top.exists(), top
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            found += [
                f"{path.relative_to(ROOT)}:{line} imports {what}"
                for what, line in imported(path, typing_too=False)
                if what.split(".")[0] in FORBIDDEN
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", ["tree", "spec.py", "errors.py", "pools/allocator.py"])
def test_what_a_simulator_needs_imports_no_torch(part: str) -> None:
    top = ROOT / part
    for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
        names = {what.split(".")[0] for what, _ in imported(path, typing_too=False)}
        assert not names & {"torch", "transformers"}, path


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has after `statement`."""
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    return set(run.stdout.split())


def test_the_facade_imports_neither_models_nor_server() -> None:
    names = loaded_by("from banyan import CacheSpec, PrefixCache")
    assert "banyan.cache" in names and "banyan.tree.tree" in names
    heavy = {"transformers", "fastapi", "uvicorn", "zmq", "matplotlib", "typer", "accelerate"}
    assert not names & heavy
    above = ("banyan.engine", "banyan.server", "banyan.bench")
    assert not {name for name in names if name.startswith(above)}


def test_the_spec_and_the_tree_import_no_torch() -> None:
    names = loaded_by("from banyan import CacheSpec; from banyan.tree import Tree")
    assert "banyan.tree.tree" in names
    assert not names & {"torch", "transformers", "banyan.cache"}
