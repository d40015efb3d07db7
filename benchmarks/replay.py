"""Replays a request trace through the real tree and controller, with pools that hold no bytes.

    python -m benchmarks.replay TRACE.jsonl [--device-tokens N] [--host-tokens N] [--json FILE]

A trace line has `input_length`, `output_length` (tokens) and `hash_ids`, one id for each block of
512 tokens of the prompt; equal ids from the start mean an equal prefix (the format of the Mooncake
trace release, FAST'25). A block becomes a page of 512 tokens. Requests run one after the other, in
the order of the trace: match, acquire, allocate and commit in chunks, release; a poll after each
applies what was copied. Time is that of the bookkeeping alone: nothing is computed or copied.
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from banyan.bench.report import machine, make_console, versions
from banyan.cache import AllocateOutcome, PrefixCache
from banyan.spec import CacheSpec
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tree import Mark
from benchmarks.byteless import COMPONENTS, NullCopyEngine, byteless_stack
from benchmarks.yardstick import yardstick_us

BLOCK = 512
CHUNK_BLOCKS = 16


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace: its block ids, and the tokens it generates."""

    blocks: tuple[int, ...]
    length: int
    output: int


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a trace, in its order."""
    requests = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            requests.append(
                TraceRequest(tuple(row["hash_ids"]), row["input_length"], row["output_length"])
            )
    return requests


class Replay:
    """A cache without bytes, and what happened to the requests run through it."""

    def __init__(self, components: str, device_tokens: int, host_tokens: int) -> None:
        spec = CacheSpec(COMPONENTS[components], BLOCK)
        tiers = []
        for tokens in (device_tokens, host_tokens):
            pages = tokens // BLOCK
            tiers.append([pages if c.reach.page_shaped else pages // 4 for c in spec.components])
        stack = byteless_stack(spec, *tiers)
        policy = WritePolicy.WRITE_THROUGH if host_tokens else WritePolicy.NONE
        self.cache = PrefixCache(
            stack, NullCopyEngine(), TierOptions(write_policy=policy, weigh_cost=False)
        )
        self.tokens: Counter[str] = Counter()
        self.seconds = {"keys": 0.0, "cache": 0.0}

    def run(self, request: TraceRequest) -> None:
        """One request from its arrival to its end."""
        began = time.perf_counter()
        key = self._key(request)
        built = time.perf_counter()
        cache, prompt = self.cache, len(key) // 4
        match = cache.match(key)
        lease = cache.acquire(match)
        self.tokens["prompt"] += prompt
        self.tokens["device"] += lease.device_len
        self.tokens["host"] += lease.host_len
        last = (prompt - 1) // BLOCK * BLOCK
        while lease.length < prompt:
            stop = min(lease.length + CHUNK_BLOCKS * BLOCK, prompt)
            if lease.length < last < stop:
                stop = last
            if cache.allocate(lease, stop) is not AllocateOutcome.OK:
                self.tokens["refused"] += 1
                cache.release(lease)
                return
            cache.advance(lease, stop)
            cache.commit(lease, key, Mark.PROMPT if stop == last else Mark.PASSED)
        cache.release(lease)
        cache.poll()
        self.seconds["keys"] += built - began
        self.seconds["cache"] += time.perf_counter() - built

    def _key(self, request: TraceRequest) -> bytes:
        """The prompt as key bytes: whole blocks by their ids, the last one perhaps in part."""
        blocks = np.repeat(np.array(request.blocks, np.int32), BLOCK)
        return blocks[: request.length].tobytes()


def replay(
    requests: list[TraceRequest], components: str, device_tokens: int, host_tokens: int, tick: Any
) -> dict[str, Any]:
    """Run a whole trace; its figures as plain data."""
    run = Replay(components, device_tokens, host_tokens)
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    for number, request in enumerate(requests):
        run.run(request)
        if number % 500 == 0:
            tick(number)
    seconds = time.perf_counter() - began
    gc.enable()
    run.cache.check()
    return {
        "components": components,
        "requests": len(requests),
        "seconds": seconds,
        "key_seconds": run.seconds["keys"],
        "us_per_request": 1e6 * seconds / max(1, len(requests)),
        "hit_rate": (run.tokens["device"] + run.tokens["host"]) / max(1, run.tokens["prompt"]),
        **{name: run.tokens[name] for name in ("prompt", "device", "host", "refused")},
        "yardstick_us": yardstick_us(),
        "nodes": sum(1 for _ in run.cache.tree.nodes()),
    }


def main(
    trace: Annotated[Path, typer.Argument(help="A trace in JSON lines.")],
    device_tokens: Annotated[int, typer.Option(help="Tokens the device holds.")] = 3_000_000,
    host_tokens: Annotated[int, typer.Option(help="Tokens the host holds; 0: none.")] = 12_000_000,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Replay a request trace without a model."""
    console = make_console()
    requests = read_trace(trace)
    rows = []
    with Progress(console=console, transient=True) as progress:
        for components in COMPONENTS:
            task = progress.add_task(components, total=len(requests))
            rows.append(
                replay(
                    requests,
                    components,
                    device_tokens,
                    host_tokens,
                    lambda n, t=task: progress.update(t, completed=n),
                )
            )
    console.print(_table(trace, rows))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        result = {"versions": versions(), "machine": machine(), "trace": trace.name, "rows": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def _table(trace: Path, rows: list[dict[str, Any]]) -> Table:
    total = rows[0]["prompt"]
    title = f"{trace.name}: {rows[0]['requests']:,} requests, {total / 1e6:.1f}M prompt tokens"
    table = Table(title=title, title_justify="left", title_style="bold")
    names = ("components", "seconds", "of it keys", "us a request", "hit rate", "device", "host")
    for name in names:
        table.add_column(name, justify="left" if name == "components" else "right")
    for row in rows:
        table.add_row(
            row["components"],
            f"{row['seconds']:.2f}",
            f"{row['key_seconds']:.2f}",
            f"{row['us_per_request']:.0f}",
            f"{row['hit_rate']:.1%}",
            f"{row['device']:,}",
            f"{row['host']:,}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
