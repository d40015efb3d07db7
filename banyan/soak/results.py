"""What a soak has found: rounds, the balance, differences; and where the memory stands.

Owns the records that are written as JSON. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_NAMED = 20
"""Differences that are named; the others are counted."""

PUBLISHED_TTFT_PERCENT = -27.0
"""TTFT of the system this follows, rounds 2 and 3 against the first."""

PUBLISHED_DURATION_PERCENT = -14.6
"""Its duration, likewise."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round in numbers; times in seconds.

    Args:
        computed, device, host: prompt tokens by source.
        backups, load_backs: copies that every rank has started; `failed` of them.
        verified, mismatched: records of all ranks whose SHA-256 was compared, and differed.
        checked_bytes: bytes of all ranks that forward passes read and compared.
        memory_bytes: resident, all ranks, at the round's end.
    """

    requests: int
    aborted: int
    duration_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    computed: int
    device: int
    host: int
    steps: int
    retractions: int
    backups: int
    load_backs: int
    failed: int
    verified: int
    mismatched: int
    checked_bytes: int
    memory_bytes: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the balance sheet."""

    what: str
    found: str
    fine: bool


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A round against the first, in percent; negative is faster."""

    round: int
    ttft_percent: float
    duration_percent: float


class Differences:
    """What is not as it should be; the first ones are named.

    Attributes:
        count: all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.named: list[str] = []

    def add(self, text: str) -> None:
        """Note a difference."""
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(text)


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one soak has found.

    Args:
        differences: those that are named; `different` counts all.
        changes: later rounds against the first.
    """

    options: dict[str, Any]
    info: dict[str, Any]
    rounds: list[Round]
    balance: list[Line]
    changes: list[Change]
    different: int
    differences: list[str]
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}

    @property
    def status(self) -> int:
        """Exit status: 0 when nothing differs."""
        return 1 if self.different else 0


def changes(rounds: Sequence[Round]) -> list[Change]:
    """Later rounds against the first, where both have times."""
    if not rounds or not rounds[0].ttft_p50_s or not rounds[0].duration_s:
        return []
    first = rounds[0]
    return [
        Change(
            round=number,
            ttft_percent=100 * (row.ttft_p50_s / rounds[0].ttft_p50_s - 1),
            duration_percent=100 * (row.duration_s / first.duration_s - 1),
        )
        for number, row in enumerate(rounds[1:], start=2)
        if row.ttft_p50_s is not None and rounds[0].ttft_p50_s
    ]


def copies_of(stats: Mapping[str, Any]) -> dict[str, int]:
    """Copies that one rank has started, which are those of each; digests of all ranks together."""
    copies = stats["cache"]["copies"]
    facts = stats["ranks"]
    return {
        "backups": copies["backup"]["jobs"],
        "load_backs": copies["load_back"]["jobs"],
        "failed": sum(kind["failed"] for kind in copies.values()),
        "verified": sum(rank["verified"] for rank in facts),
        "mismatched": sum(rank["mismatched"] for rank in facts),
    }
