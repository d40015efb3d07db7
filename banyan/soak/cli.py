"""`banyan soak` on the command line.

Owns the options and their help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from banyan.bench.report import make_console
from banyan.engine.oracle_presets import PRESETS
from banyan.errors import ConfigError
from banyan.options import parse_bytes, suggestion
from banyan.soak.options import SoakOptions
from banyan.soak.run import run_soak

app = typer.Typer(help="Run the real engine under load with a model that proves what it reads.")

_LOAD, _ENGINE, _TROUBLE, _RESULT = "Load", "Engine", "Disturbances", "Results"
_DEFAULTS = SoakOptions()


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


@app.command()
def soak(
    workload: Annotated[
        str, _option("shared-prefix, or multi-turn: --groups are then clients.", _LOAD)
    ] = _DEFAULTS.workload,
    groups: Annotated[
        int, _option("Groups of prompts that begin alike.", _LOAD)
    ] = _DEFAULTS.groups,
    prompts_per_group: Annotated[
        int, _option("Prompts of each group.", _LOAD)
    ] = _DEFAULTS.prompts_per_group,
    shared: Annotated[
        int, _option("Tokens that a group shares; of multi-turn, of a first message.", _LOAD)
    ] = _DEFAULTS.shared,
    question: Annotated[
        int, _option("Tokens of each prompt's own, or of each later message.", _LOAD)
    ] = _DEFAULTS.question,
    output: Annotated[int, _option("Tokens to answer, exactly.", _LOAD)] = _DEFAULTS.output,
    rounds: Annotated[int, _option("Times that all prompts are sent.", _LOAD)] = _DEFAULTS.rounds,
    shuffle: Annotated[
        bool, _option("Send each round in an order of its own.", _LOAD)
    ] = _DEFAULTS.shuffle,
    seed: Annotated[int, _option("Decides prompts and disturbances.", _LOAD)] = _DEFAULTS.seed,
    tp: Annotated[int, _option("Ranks.", _ENGINE)] = _DEFAULTS.tp,
    preset: Annotated[
        str, _option(f"What the model caches: {', '.join(PRESETS)}.", _ENGINE)
    ] = _DEFAULTS.preset,
    page_size: Annotated[int, _option("Tokens per page.", _ENGINE)] = _DEFAULTS.page_size,
    device_bytes: Annotated[
        str | None,
        _option(
            "Bytes of a rank's device pools; without it, what the prompts leave in the cache, "
            "divided by --host-ratio.",
            _ENGINE,
        ),
    ] = None,
    host_ratio: Annotated[
        float, _option("Size of the host tier as a multiple of the device's.", _ENGINE)
    ] = _DEFAULTS.host_ratio,
    write_policy: Annotated[
        str, _option("When device data is copied to host.", _ENGINE)
    ] = _DEFAULTS.write_policy,
    evict_policy: Annotated[
        str, _option("Which prefixes go first.", _ENGINE)
    ] = _DEFAULTS.evict_policy,
    verify: Annotated[
        str, _option("off, or all: compare a SHA-256 of every record copied.", _ENGINE)
    ] = _DEFAULTS.verify,
    chunk: Annotated[
        int, _option("Most prompt tokens computed in one step.", _ENGINE)
    ] = _DEFAULTS.chunk,
    max_running: Annotated[
        int, _option("Most requests computed together.", _ENGINE)
    ] = _DEFAULTS.max_running,
    prefill_us_per_token: Annotated[
        float, _option("Emulate: sleep so many microseconds per prefill token.", _ENGINE)
    ] = 0.0,
    decode_ms: Annotated[
        float, _option("Emulate: sleep so many milliseconds per decode step.", _ENGINE)
    ] = 0.0,
    aborts: Annotated[
        float, _option("Share of requests aborted at a random moment.", _TROUBLE)
    ] = 0.0,
    flush_every: Annotated[int, _option("Flush every so many steps.", _TROUBLE)] = 0,
    faults: Annotated[float, _option("Share of copies that fail.", _TROUBLE)] = 0.0,
    detach: Annotated[
        bool,
        _option("Without host tier for the middle third of every round.", _TROUBLE, "--detach"),
    ] = False,
    check_every: Annotated[
        int, _option("Verify every invariant every so many steps.", _TROUBLE)
    ] = 0,
    growth_limit: Annotated[
        float, _option("Share by which memory may grow after round 1.", _RESULT)
    ] = _DEFAULTS.growth_limit,
    json: Annotated[Path | None, _option("Write everything found here.", _RESULT)] = None,
) -> None:
    """Play a workload through scheduler, cache and tiers with the oracle, and balance the books.

    The oracle is a model that computes nothing: each cached byte is a function of the tokens before
    it, and every byte that a step reads is compared with that. Status 1 on any difference.
    """
    given = dict(locals())
    path = given.pop("json")
    size = given.pop("device_bytes")
    given["device_bytes"] = None if size is None else parse_bytes(size, "--device-bytes")
    for name, known in _WORDS.items():
        if given[name] not in known:
            option = "--" + name.replace("_", "-")
            fix = suggestion(given[name], known)
            raise ConfigError(option, f"unknown value {given[name]!r}", fix)
    raise typer.Exit(run_soak(SoakOptions(**given), make_console(), path))


_WORDS = {
    "workload": ("shared-prefix", "multi-turn"),
    "preset": PRESETS,
    "verify": ("off", "all"),
    "write_policy": ("write_through", "write_through_selective", "write_back", "none"),
    "evict_policy": ("lru", "lfu", "slru", "fifo", "priority"),
}
