"""A pytest plugin that keeps what the family tests found, for the page docs/models.md.

    python -m pytest -p tests.parity.recording --support-record FILE tests/parity

A test tells its part with `record_property(SUPPORT, {...})` of plain data, which may still change
until the test ends; the outcome is added here. With pytest-xdist the workers' reports bring it to
the controlling process, which alone writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SUPPORT = "support"
"""The name of the property."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-record", metavar="FILE", help="write what the family tests found to FILE (JSON)"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--support-record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recording(Path(path)), "support-recording")


class Recording:
    """The findings of one session.

    Args:
        path: the file to write at its end; made anew, with its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == SUPPORT:
                assert isinstance(value, dict)
                self._found.append({**value, "passed": report.passed})

    def pytest_sessionfinish(self) -> None:
        import torch
        import transformers

        self._found.sort(key=lambda one: json.dumps(one, sort_keys=True))
        record = {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "found": self._found,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
