"""The sheet at the end of a soak: everything that was taken has come home.

Owns what is asked of the final state, on every rank. Reads statistics, calls `check` and `flush`;
changes nothing else. Called once, when no request is open and no copy is running.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from banyan.errors import InvariantError
from banyan.soak.drive import Core, Driver
from banyan.soak.options import SoakOptions
from banyan.soak.results import Line, Round


def balance(core: Core, driver: Driver, options: SoakOptions) -> list[Line]:
    """The lines of the sheet; the last one is read after a flush.

    Mutates: the cache is empty afterwards.
    """
    stats = core.stats()
    lines = [
        *_answers(driver),
        *_oracle(stats),
        *_held(stats),
        *_copies(stats, options),
        *_tiers(stats),
        *_ranks(stats),
        _invariants(core),
        *_memory(driver.rounds, options.growth_limit),
    ]
    core.flush()
    return [*lines, _home(core.stats())]


def _answers(driver: Driver) -> Iterator[Line]:
    ended = sum(row.requests for row in driver.rounds)
    wrong = driver.differences.count
    found = f"{ended:,} of {ended:,}" if not wrong else f"{wrong:,} differences in {ended:,}"
    yield _line("answers equal to the oracle's own", found, not wrong)


def _oracle(stats: Mapping[str, Any]) -> Iterator[Line]:
    """Bytes that forward passes read."""
    facts = stats["ranks"]
    total = sum(rank["checked_bytes"] for rank in facts)
    wrong = [rank for rank in facts if rank["wrong"]]
    found = f"none in {total:,} compared"
    if wrong:
        count = sum(rank["wrong"] for rank in wrong)
        found = f"{count}, the first: {wrong[0]['first_wrong']}"
    yield _line("wrong bytes read by a forward pass", found, not wrong and total > 0)


def _held(stats: Mapping[str, Any]) -> Iterator[Line]:
    """Nothing is open, nothing is held."""
    for what, name in (("leases", "leases"), ("running copies", "operations")):
        count = stats["cache"][name]
        yield _line(what, f"{count:,}", not count)


def _copies(stats: Mapping[str, Any], options: SoakOptions) -> Iterator[Line]:
    kinds = list(stats["cache"]["copies"].values())
    failed = sum(kind["failed"] - kind["reasons"].get("cancelled", 0) for kind in kinds)
    asked = f" (faults were asked for: {options.faults:.1%})" if options.faults else ""
    yield _line("failed copies", f"{failed:,}{asked}", not failed or options.faults > 0)
    if options.verify == "all" and any(kind["jobs"] for kind in kinds):
        facts = stats["ranks"]
        verified = sum(rank["verified"] for rank in facts)
        differ = sum(rank["mismatched"] for rank in facts)
        fine = not differ and all(rank["verified"] > 0 for rank in facts)
        found = f"{verified - differ:,} of {verified:,}"
        yield _line("SHA-256 equal on both sides of a copy", found, fine)


def _tiers(stats: Mapping[str, Any]) -> Iterator[Line]:
    """Free and cached slots add up to each pool; no lock is left."""
    locked, astray = 0, []
    for tier, pools in stats["cache"]["tiers"].items():
        for name, pool in pools.items():
            locked += pool["protected"]
            if pool["free"] + pool["evictable"] + pool["protected"] != pool["capacity"]:
                astray.append(f"{tier}/{name}: {pool}")
    yield _line("locked slots", f"{locked:,}", not locked)
    yield _line("free and cached slots add up", "; ".join(astray) or "in every pool", not astray)


def _ranks(stats: Mapping[str, Any]) -> Iterator[Line]:
    """The ranks have done the same."""
    facts = stats["ranks"]
    if len(facts) == 1:
        return
    digests = {rank["digest"] for rank in facts}
    operations = facts[0]["operations"]
    found = f"{operations:,} operations, digest {facts[0]['digest']} on {len(facts)} ranks"
    if len(digests) > 1:
        found = ", ".join(f"rank {r}: {rank['digest']}" for r, rank in enumerate(facts))
    yield _line("ranks have equal histories", found, len(digests) == 1)


def _home(stats: Mapping[str, Any]) -> Line:
    """After a flush every slot is free, on every rank."""
    facts = stats["ranks"]
    slots = sum(rank["slots"] for rank in facts)
    away = [
        f"rank {number}: {rank['slots'] - rank['free_slots']:,} of {rank['slots']:,} are not"
        for number, rank in enumerate(facts)
        if rank["slots"] != rank["free_slots"]
    ]
    found = "; ".join(away) or f"all {slots:,}"
    return _line("slots home after a flush", found, not away and slots > 0)


def _invariants(core: Core) -> Line:
    try:
        core.check()
    except InvariantError as error:
        return _line("invariants", str(error), False)
    return _line("invariants", "hold", True)


def _memory(rounds: Sequence[Round], limit: float) -> Iterator[Line]:
    """Growth after the first round."""
    if len(rounds) < 2 or not rounds[0].memory_bytes:
        return
    first, last = rounds[0].memory_bytes, max(row.memory_bytes for row in rounds[1:])
    growth = last / first - 1
    found = f"{100 * growth:+.2f} % at most, of {first / (1 << 20):,.0f} MiB"
    yield _line("memory after round 1", found, growth <= limit)


def _line(what: str, found: str, fine: bool) -> Line:
    return Line(what=what, found=found, fine=fine)
