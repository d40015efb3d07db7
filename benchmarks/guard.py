"""Notices when a core operation does more than it did: counts instructions, not time.

    python -m benchmarks.guard            compare with the committed baseline
    python -m benchmarks.guard --record   make the present counts the baseline

Five workloads, each for three kinds of cache: a match of a path of 64 nodes; acquire and release of
that path, free and with its upper part locked; a commit of 4,096 tokens; the eviction of a tenth of
1,000 leaves; scheduler steps with 64 running requests. Page size 64; steps at page 1 too. A count
may differ from the baseline by 3 %. One that is higher by more is a slow-down; one that is lower by
more asks to be recorded, so that the gain is kept.

Python's instructions are others in every minor version, so each has a baseline of its own; some are
numpy's, whose version is noted with the counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from banyan.bench.report import make_console, versions
from banyan.cache import AllocateOutcome, PrefixCache
from banyan.lease import Lease
from banyan.spec import CacheSpec, Point
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tree import Mark, Tier, encode_tokens
from benchmarks.byteless import COMPONENTS, NullCopyEngine, byteless_stack
from benchmarks.counting import Count, count
from benchmarks.steps import SCENARIOS, Subject

BASELINE = Path(__file__).with_name("guard.json")
TOLERANCE = 0.03
RECORD = "python -m benchmarks.guard --record"

PAGE = 64
TURNS, TURN = 64, 256
SUFFIX = 4_096
LEAVES, LEAF, GOING = 1_000, 64, 100
RUNNING, STEPS = 64, 4

Prepared = Callable[[], object]
"""A workload that is ready: calling it once is what is counted."""


# ---- workloads -----------------------------------------------------------------------------------


class Prompts:
    """A cache without bytes, and prompts put into it as requests do it."""

    def __init__(self, components: str) -> None:
        spec = CacheSpec(COMPONENTS[components], PAGE)
        pages = 2 * (TURNS * TURN + LEAVES * LEAF) // PAGE
        device = [2 * LEAVES if isinstance(c.reach, Point) else pages for c in spec.components]
        options = TierOptions(write_policy=WritePolicy.NONE)
        stack = byteless_stack(spec, device, [0] * len(device))
        self.cache = PrefixCache(stack, NullCopyEngine(), options, clock=lambda: 0.0)
        self._random = np.random.default_rng(0)

    def draw(self, tokens: int) -> bytes:
        """Random tokens as key bytes."""
        return encode_tokens(self._random.integers(0, 128_000, tokens, dtype=np.int32))

    def compute(self, key: bytes) -> Lease:
        """A request that has computed all of `key` and published none of it."""
        lease = self.cache.acquire(self.cache.match(key))
        stop = len(key) // 4
        assert self.cache.allocate(lease, stop) is AllocateOutcome.OK
        self.cache.advance(lease, stop)
        return lease

    def put(self, key: bytes) -> None:
        """A request from its arrival to its end."""
        lease = self.compute(key)
        self.cache.commit(lease, key, Mark.KEEP)
        self.cache.release(lease)

    def conversation(self) -> tuple[bytes, bytes]:
        """A path of 64 nodes: the prompt that goes on from its end, and from one node before."""
        key = earlier = b""
        for _ in range(TURNS):
            earlier = key
            key += self.draw(TURN)
            self.put(key)
        return key + self.draw(1), earlier + self.draw(1)


def match_path(components: str) -> Prepared:
    """Match a path of 64 nodes."""
    prompts = Prompts(components)
    query, _ = prompts.conversation()
    assert prompts.cache.match(query).boundary == TURNS * TURN
    return lambda: prompts.cache.match(query)


def hold_path(components: str, locked_above: bool = False) -> Prepared:
    """Acquire and release such a path; another request may hold all of it but its last node."""
    prompts = Prompts(components)
    query, above = prompts.conversation()
    if locked_above:
        prompts.cache.acquire(prompts.cache.match(above))
    match = prompts.cache.match(query)
    return lambda: prompts.cache.release(prompts.cache.acquire(match))


def hold_path_locked_above(components: str) -> Prepared:
    """See `hold_path`."""
    return hold_path(components, locked_above=True)


def commit_suffix(components: str) -> Prepared:
    """Publish 4,096 computed tokens below a cached prefix of as many."""
    prompts = Prompts(components)
    prefix = prompts.draw(SUFFIX)
    prompts.put(prefix)
    key = prefix + prompts.draw(SUFFIX)
    lease = prompts.compute(key)
    assert lease.boundary == SUFFIX
    return lambda: prompts.cache.commit(lease, key, Mark.KEEP)


def evict_leaves(components: str) -> Prepared:
    """Free a tenth of 1,000 leaves of 64 tokens."""
    prompts = Prompts(components)
    stem = prompts.draw(SUFFIX)
    for _ in range(LEAVES):
        prompts.put(stem + prompts.draw(LEAF))
    tree = prompts.cache.tree
    need = [GOING * LEAF // PAGE, *[0] * (tree.width - 1)]
    assert tree.device.evictable[0] >= need[0]
    return lambda: tree.evict(Tier.DEVICE, need)


def steps(components: str, page: int = PAGE) -> Prepared:
    """Scheduler steps in which 64 requests decode a token each, without a model."""
    decode = next(s for s in SCENARIOS if s.name == "decode")
    subject = Subject(decode, components, page, RUNNING, STEPS)
    subject.settle()
    return lambda: [subject.scheduler.step() for _ in range(STEPS)]


def steps_page_1(components: str) -> Prepared:
    """The same where every token takes a page."""
    return steps(components, 1)


WORKLOADS: dict[str, Callable[[str], Prepared]] = {
    "match, 64 nodes": match_path,
    "acquire + release, free": hold_path,
    "acquire + release, locked above": hold_path_locked_above,
    "commit 4,096": commit_suffix,
    "evict 100 of 1,000 leaves": evict_leaves,
    f"{STEPS} steps, 64 running": steps,
    f"{STEPS} steps, 64 running, page 1": steps_page_1,
}


def measure(only: str = "") -> dict[str, Count]:
    """The counts of all workloads whose name has `only` in it.

    Each is run twice on a cache of its own, and the second run counts: what is done once in a
    process, such as an import, is done in the first.
    """
    counts = {}
    for workload, prepare in WORKLOADS.items():
        for components in COMPONENTS:
            name = f"{workload}, {components}"
            if only in name:
                prepare(components)()
                counts[name] = count(prepare(components))
    return counts


# ---- baseline ------------------------------------------------------------------------------------


def python_version() -> str:
    """What a baseline is for: instructions differ between minor versions of Python."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Finding:
    """One count that is not what the baseline says; `text` says what to do."""

    workload: str
    text: str


def baseline(path: Path | None = None) -> dict[str, Count] | None:
    """The recorded counts for this Python, or None; of the committed file unless told."""
    path = path or BASELINE
    if not path.exists():
        return None
    recorded = json.loads(path.read_text()).get(python_version())
    if recorded is None:
        return None
    return {name: Count(**counts) for name, counts in recorded["counts"].items()}


def record(counts: dict[str, Count], path: Path | None = None) -> None:
    """Make `counts` the baseline for this Python; those of others stay."""
    path = path or BASELINE
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known[python_version()] = {
        "made with": {name: versions()[name] for name in ("python", "numpy")},
        "counts": {name: asdict(found) for name, found in counts.items()},
    }
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def compare(found: dict[str, Count], recorded: dict[str, Count]) -> list[Finding]:
    """What is not within the tolerance of the baseline, or is not in both."""
    findings = [
        Finding(name, f"is not measured, but in the baseline; record it anew: {RECORD}")
        for name in recorded.keys() - found.keys()
    ]
    for name, counts in found.items():
        if name not in recorded:
            findings.append(Finding(name, f"has no baseline; record one: {RECORD}"))
            continue
        for kind, now in asdict(counts).items():
            before = getattr(recorded[name], kind)
            change = now / max(1, before) - 1
            said = f"{kind.replace('_', ' ')}: {before:,} before, {now:,} now ({change:+.1%})"
            if now - before > TOLERANCE * before:
                findings.append(Finding(name, f"does more than it did. {said}"))
            elif before - now > TOLERANCE * before:
                text = f"does less than it did. {said}. Record the new baseline: {RECORD}"
                findings.append(Finding(name, text))
    return sorted(findings, key=lambda f: f.workload)


# ---- command line --------------------------------------------------------------------------------


def table(found: dict[str, Count], recorded: dict[str, Count]) -> Table:
    """All counts beside those of the baseline."""
    shown = Table(title="Executed by the interpreter", title_justify="left", title_style="bold")
    shown.add_column("Workload")
    for name in ("Instructions", "Change", "Calls into C", "Change"):
        shown.add_column(name, justify="right")
    for name, counts in found.items():
        cells = []
        for kind, now in asdict(counts).items():
            before = getattr(recorded[name], kind) if name in recorded else None
            cells += [f"{now:,}", "-" if before is None else f"{now / max(1, before) - 1:+.1%}"]
        shown.add_row(name, *cells)
    return shown


def main(
    recording: Annotated[bool, typer.Option("--record", help="Write the baseline.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the counts here.")] = None,
) -> None:
    """Compare the work of core operations with the baseline, or record it."""
    console = make_console()
    with console.status("Counting instructions"):
        found = measure()
    recorded = baseline()
    console.print(table(found, recorded or {}))
    findings = [] if recorded is None else compare(found, recorded)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "versions": versions(),
            "counts": {name: asdict(counts) for name, counts in found.items()},
            "baseline": {name: asdict(counts) for name, counts in (recorded or {}).items()},
            "findings": [asdict(finding) for finding in findings],
        }
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    if recording:
        record(found)
        console.print(f"Recorded for Python {python_version()} in {BASELINE.name}.")
        return
    if recorded is None:
        console.print(
            f"There is no baseline for Python {python_version()}. To record one: {RECORD}"
        )
        return
    for finding in findings:
        console.print(f"{finding.workload} {finding.text}")
    raise typer.Exit(1 if findings else 0)


if __name__ == "__main__":
    typer.run(main)
