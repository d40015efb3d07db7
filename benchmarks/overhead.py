"""Measures what the engine costs over a bare `transformers` loop, at batch 1 with the cache off.

    python -m benchmarks.overhead [--model NAME]... [--json FILE]

Both sides run in this process, take turns request by request, and compute the same: a prompt of
1,024 random tokens in the engine's chunks of at most 512, then 64 greedy tokens one by one. The
bare side is the model's `forward` with a `DynamicCache`, and an argmax. The engine's side is
everything between `submit` and the last output: scheduling, slots, masks, the gathering of past
keys, sampling, detokenizing. On a machine that does other work, use one thread: torch's threads
wait for each other by spinning.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers import logging as transformers_logging

from banyan.bench.model import token_source
from banyan.bench.report import machine, make_console, ms, versions
from banyan.engine.build import build_core
from banyan.engine.messages import GenerateRequest, Sampling
from banyan.engine.models import LoadedModel, load_model
from banyan.options import ServeOptions

PROMPT, CHUNK, DECODE = 1_024, 512, 64
GEMMA = Path(".demo/gemma-3-270m")


@dataclass(frozen=True)
class Timing:
    """Seconds of one request: up to its first token, and from there to its last."""

    prefill_s: float
    decode_s: float
    tokens: tuple[int, ...]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


Side = Callable[[list[int]], Timing]


def bare_side(model: Any, chunks: list[int]) -> Side:
    """A plain loop around the model; `chunks` are the lengths the prompt is computed in."""

    @torch.inference_mode()
    def run(prompt: list[int]) -> Timing:
        start = time.perf_counter()
        cache = DynamicCache(config=model.config)
        for ids in torch.tensor([prompt]).split(chunks, dim=1):
            out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[0, -1].argmax()
        tokens = [int(token)]
        first = time.perf_counter()
        for _ in range(DECODE - 1):
            ids = token.view(1, 1)
            out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[0, -1].argmax()
            tokens.append(int(token))
        return Timing(first - start, time.perf_counter() - first, tuple(tokens))

    return run


def engine_side(name: str, loaded: LoadedModel) -> Side:
    """The engine's core, driven as its process drives it."""
    options = ServeOptions(model=name, cache=False, chunk=CHUNK, max_running=1)
    core = build_core(options, loaded)
    sampling = Sampling(max_tokens=DECODE, temperature=0.0, ignore_eos=True)

    def run(prompt: list[int]) -> Timing:
        start = time.perf_counter()
        first = None
        tokens: list[int] = []
        core.submit(GenerateRequest(request_id="r", prompt=prompt, sampling=sampling))
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.tokens:
                    first = first or time.perf_counter()
                tokens += output.tokens
        end = time.perf_counter()
        assert first is not None
        return Timing(first - start, end - first, tuple(tokens))

    return run


def chunks_of(engine: Side, model: Any, prompt: list[int]) -> list[int]:
    """The lengths in which the engine computes a prompt, seen by watching the model."""
    lengths: list[int] = []

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    engine(prompt)
    handle.remove()
    chunks = lengths[: len(lengths) - (DECODE - 1)]
    assert sum(chunks) == len(prompt), lengths
    return chunks


def measure(name: str, repeats: int, console: Console) -> dict[str, Any]:
    """Medians of both sides over `repeats` interleaved requests, after two of each to warm up."""
    source = token_source(name, None, None)
    with console.status(f"Loading {name}"):
        loaded = load_model(name)
        engine = engine_side(name, loaded)
        chunks = chunks_of(engine, loaded.model, source.draw(random.Random("chunks"), PROMPT))
    sides = {"bare": bare_side(loaded.model, chunks), "engine": engine}
    timings: dict[str, list[Timing]] = {side: [] for side in sides}
    differing = 0
    for turn in range(-2, repeats):
        prompt = source.draw(random.Random(turn), PROMPT)
        with console.status(f"{name}: {max(0, turn)} of {repeats}"):
            pair = {side: _undisturbed(run, prompt) for side, run in sides.items()}
        if turn >= 0:
            differing += pair["bare"].tokens != pair["engine"].tokens
            for side, timing in pair.items():
                timings[side].append(timing)
    fixed = {"model": name, "repeats": repeats, "chunks": chunks, "differing": differing}
    return fixed | {
        f"{side}_{part}": statistics.median(getattr(t, part) for t in timings[side])
        for side in sides
        for part in ("prefill_s", "decode_s", "total_s")
    }


def _undisturbed(run: Side, prompt: list[int]) -> Timing:
    gc.collect()
    gc.disable()
    try:
        return run(prompt)
    finally:
        gc.enable()


def _table(rows: list[dict[str, Any]]) -> Table:
    title = f"{PROMPT:,} tokens in chunks of {CHUNK}, then {DECODE}; cache off"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("Model", "Part", "transformers", "engine", "Cost"):
        table.add_column(heading, justify="left" if heading in ("Model", "Part") else "right")
    for row in rows:
        for part in ("prefill", "decode", "total"):
            bare, engine = row[f"bare_{part}_s"], row[f"engine_{part}_s"]
            name = row["model"] if part == "prefill" else ""
            table.add_row(name, part, ms(bare), ms(engine), f"{100 * (engine / bare - 1):+.1f} %")
    return table


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Preset, folder or hub id; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Requests per side and model.")] = 15,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; else its own.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write medians here.")] = None,
) -> None:
    """Compare the engine with a bare loop."""
    torch.set_num_threads(threads or torch.get_num_threads())
    transformers_logging.set_verbosity_error()
    console = make_console()
    names = model or ["tiny-linear", "tiny-swa", *([str(GEMMA)] if GEMMA.is_dir() else [])]
    rows = [measure(name, repeats, console) for name in names]
    console.print(_table(rows))
    for row in rows:
        if row["differing"]:
            console.print(f"{row['model']}: {row['differing']} answers differ between the sides")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        used = {"threads": torch.get_num_threads()}
        result = {"versions": versions(), "machine": machine() | used, "rows": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
