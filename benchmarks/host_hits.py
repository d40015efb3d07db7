"""Measures what it costs that a prompt's data is on host and not on device: TTFT over TTFT.

    python -m benchmarks.host_hits [--model NAME]... [--repeats N] [--json FILE]

In process, on the engine's core, one prompt of 1,024 tokens after another. Each is computed once,
and its copies to host are waited for. Then it is asked twice more: as it is on device, and after
all of it has been evicted from there; which of the two comes first changes from prompt to prompt.
TTFT is from `submit` to the step that brings the first token. What a load-back does not hide behind
the forward pass is the difference.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from transformers import logging as transformers_logging

from banyan.bench.model import token_source
from banyan.bench.report import machine, make_console, ms, versions
from banyan.bench.work import TokenSource
from banyan.engine.build import build_core
from banyan.engine.core import EngineCore
from banyan.engine.messages import GenerateRequest, Sampling, Usage
from banyan.engine.models import load_model
from banyan.options import ServeOptions
from banyan.tiers.controller import Shortage
from banyan.tree import Tier
from benchmarks.overhead import GEMMA

PROMPT = 1_024
TARGET = 1.15
"""What the median TTFT of host hits over that of device hits should not exceed."""
DEVICE_BYTES, HOST_BYTES = 256 << 20, 1 << 30


@dataclass(frozen=True)
class Row:
    """Medians of one model.

    Args:
        device_tokens, host_tokens: prompt tokens found by a hit of each kind.
    """

    model: str
    repeats: int
    computed_s: float
    device_s: float
    host_s: float
    device_tokens: int
    host_tokens: int

    @property
    def ratio(self) -> float:
        """TTFT of a host hit over that of a device hit."""
        return self.host_s / self.device_s

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio <= TARGET


class Asker:
    """An engine, and prompts asked of it one at a time."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._asked = 0

    def ask(self, prompt: list[int]) -> tuple[float, Usage]:
        """Seconds to the first token, and the receipt.

        Raises:
            RuntimeError: the request failed.
        """
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._asked += 1
        request = GenerateRequest(request_id=str(self._asked), prompt=prompt, sampling=sampling)
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        self.core.submit(request)
        outputs = self.core.step()
        while not outputs:
            outputs = self.core.step()
        spent = time.perf_counter() - start
        gc.enable()
        (output,) = outputs
        if output.error is not None or output.usage is None:
            raise RuntimeError(output.error)
        self.settle()
        return spent, output.usage

    def settle(self) -> None:
        """Wait for every copy that runs, and for those that its end starts."""
        cache = self.core.cache
        while cache.controller.operations:
            time.sleep(0.001)
            cache.poll()

    def evict(self) -> None:
        """Take everything off the device that has a copy on host, and all else there is."""
        cache = self.core.cache
        held = cache.tree.device.evictable
        counts = [pool.free_count + held[c] for c, pool in enumerate(cache.stack.device_slots)]
        slots = cache.controller.reserve(Tier.DEVICE, counts)
        assert not isinstance(slots, Shortage), slots
        cache.controller.free(Tier.DEVICE, slots)


def measure(model: str, repeats: int) -> Row:
    """Medians over `repeats` prompts, after one that is not counted.

    Raises:
        RuntimeError: a prompt was not found where it should have been.
    """
    loaded = load_model(model)
    options = ServeOptions(model=model, device_bytes=DEVICE_BYTES, host_bytes=HOST_BYTES)
    source = token_source(model, None, None)
    with closing(build_core(options, loaded)) as core:
        times, found = _ask_all(Asker(core), source, repeats)
    medians = {f"{kind}_s": statistics.median(seconds) for kind, seconds in times.items()}
    tokens = {f"{kind}_tokens": count for kind, count in found.items()}
    return Row(model=model, repeats=repeats, **medians, **tokens)  # type: ignore[arg-type]


def _ask_all(
    asker: Asker, source: TokenSource, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds to first tokens, and tokens found, by where a prompt's data was."""
    times: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
    found: dict[str, int] = {}
    for turn in range(-1, repeats):
        prompt = source.draw(random.Random(turn), PROMPT)
        samples = {"computed": asker.ask(prompt)}
        for kind in ("device", "host") if turn % 2 else ("host", "device"):
            if kind == "host":
                asker.evict()
            samples[kind] = asker.ask(prompt)
        for kind, (seconds, usage) in samples.items():
            if turn >= 0:
                times[kind].append(seconds)
            if kind != "computed":
                found[kind] = getattr(usage, kind)
                if usage.computed + found[kind] != PROMPT or usage.computed > PROMPT // 4:
                    raise RuntimeError(f"a {kind} hit of prompt {turn} is {usage}")
    return times, found


def table(rows: list[Row]) -> Table:
    """The rows for a person to read; what misses the target is marked."""
    title = f"Median TTFT of a prompt of {PROMPT:,} tokens, most {TARGET:g}"
    shown = Table(title=title, title_justify="left", title_style="bold")
    shown.add_column("Model")
    for name in ("Computed", "Device hit", "Host hit", "Host / device", "From host"):
        shown.add_column(name, justify="right")
    for row in rows:
        times = [ms(s) for s in (row.computed_s, row.device_s, row.host_s)]
        ratio = f"{row.ratio:.2f}" + ("" if row.met else " >")
        shown.add_row(row.model, *times, ratio, f"{row.host_tokens:,}")
    return shown


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Preset, folder or hub id; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Prompts of each model.")] = 15,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; else its own.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write medians here.")] = None,
) -> None:
    """Compare TTFT of host hits with that of device hits."""
    torch.set_num_threads(threads or torch.get_num_threads())
    transformers_logging.set_verbosity_error()
    console = make_console()
    names = model or ["tiny-linear", *([str(GEMMA)] if GEMMA.is_dir() else [])]
    rows = []
    for name in names:
        with console.status(name):
            rows.append(measure(name, repeats))
    console.print(table(rows))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        found = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        used = machine() | {"threads": torch.get_num_threads()}
        result = {"versions": versions(), "machine": used, "target": TARGET, "rows": found}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
