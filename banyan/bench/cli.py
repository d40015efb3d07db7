"""`banyan bench`: the benchmarks on the command line.

Owns the options and their help. Each command drives a running server (`--url`) or starts its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from banyan.bench import target
from banyan.bench.drive import Pace
from banyan.bench.model import load_config, token_source
from banyan.bench.report import make_console
from banyan.bench.run import Benchmark, finish
from banyan.bench.target import Configuration, configurations, parse_serve_args
from banyan.bench.work import MultiTurn, SharedPrefix, Workload
from banyan.errors import ConfigError
from banyan.options import parse_bytes

app = typer.Typer(
    no_args_is_help=True,
    help="Measure a server: TTFT, ITL, and where prompt tokens came from.",
)

_SERVER, _LOAD, _RESULT = "Server", "Load", "Results"

Model = Annotated[
    str | None,
    typer.Option(
        help="Model to serve; with --url, where its tokenizer is.", rich_help_panel=_SERVER
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="Drive this running server; else start one.", rich_help_panel=_SERVER),
]
PageSize = Annotated[int | None, typer.Option(help="Tokens per page.", rich_help_panel=_SERVER)]
DeviceBytes = Annotated[
    str | None,
    typer.Option(help="Bytes of all device pools, such as 64MiB.", rich_help_panel=_SERVER),
]
HostBytes = Annotated[
    str | None,
    typer.Option(
        help=f"Bytes of all host pools; default {target.HOST_RATIO:g} times the device pools.",
        rich_help_panel=_SERVER,
    ),
]
Tp = Annotated[
    int | None,
    typer.Option(help="Tensor-parallel ranks, each a process.", rich_help_panel=_SERVER),
]
ServeArg = Annotated[
    list[str] | None,
    typer.Option(
        help="Any other option of banyan serve, as name=value; may be repeated.",
        rich_help_panel=_SERVER,
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Play the same again without the host tier, and without the cache.",
        rich_help_panel=_SERVER,
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Cut prompts from this text instead of random tokens.", rich_help_panel=_LOAD
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        help="Draw random tokens below this; else ask the tokenizer.", rich_help_panel=_LOAD
    ),
]
RequestRate = Annotated[
    float,
    typer.Option(help="Mean requests per second; 0 or inf: all at once.", rich_help_panel=_LOAD),
]
Concurrency = Annotated[
    int,
    typer.Option(help="Requests on their way at a time; 0: no bound.", rich_help_panel=_LOAD),
]
Shuffle = Annotated[
    bool, typer.Option(help="Send each round in an order of its own.", rich_help_panel=_LOAD)
]
Seed = Annotated[
    int, typer.Option(help="Decides prompts, orders and arrivals.", rich_help_panel=_LOAD)
]
Json = Annotated[
    Path | None, typer.Option(help="Write every sample here.", rich_help_panel=_RESULT)
]
Png = Annotated[Path | None, typer.Option(help="Draw the picture here.", rich_help_panel=_RESULT)]

CONCURRENCY = 2
"""Requests on their way at a time by default: what is on its way fits a device pool of two groups
even when all belong to different ones, and TTFT is not mostly queueing."""


@dataclass(frozen=True, slots=True)
class _Common:
    """The options that both commands share, after parsing."""

    model: str | None
    url: str | None
    given: dict[str, Any]
    compare: bool
    text: Path | None
    vocab_size: int | None
    pace: Pace
    json: Path | None
    png: Path | None


@app.command("shared-prefix")
def shared_prefix(
    groups: Annotated[int, typer.Option(help="Groups of prompts that begin alike.")] = 8,
    prompts_per_group: Annotated[int, typer.Option(help="Prompts of each group.")] = 8,
    shared: Annotated[int, typer.Option(help="Tokens that a group's prompts share.")] = 1024,
    question: Annotated[int, typer.Option(help="Tokens of each prompt's own.")] = 128,
    output: Annotated[int, typer.Option(help="Tokens to answer, exactly.")] = 16,
    rounds: Annotated[int, typer.Option(help="Times that all prompts are sent.")] = 3,
    fresh_questions: Annotated[
        bool, typer.Option("--fresh-questions", help="New questions in every round.")
    ] = False,
    device_groups: Annotated[
        int | None,
        typer.Option(help="Size the device pools to hold so many groups.", rich_help_panel=_SERVER),
    ] = None,
    model: Model = None,
    url: Url = None,
    tp: Tp = None,
    page_size: PageSize = None,
    device_bytes: DeviceBytes = None,
    host_bytes: HostBytes = None,
    serve_arg: ServeArg = None,
    compare: Compare = False,
    text: Text = None,
    vocab_size: VocabSize = None,
    request_rate: RequestRate = 0.0,
    concurrency: Concurrency = CONCURRENCY,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    json: Json = None,
    png: Png = None,
) -> None:
    """Groups of prompts share their beginnings; all of them return in every round."""
    workload = SharedPrefix(
        groups=groups,
        prompts_per_group=prompts_per_group,
        shared=shared,
        question=question,
        output=output,
        rounds=rounds,
        shuffle=shuffle,
        fresh_questions=fresh_questions,
        seed=seed,
    )
    given = _given(tp, page_size, device_bytes, host_bytes, serve_arg)
    pace = Pace(request_rate, concurrency, seed)
    common = _Common(model, url, given, compare, text, vocab_size, pace, json, png)
    if device_groups is not None:
        given["device_bytes"] = _size_for(common, device_groups * workload.group_tokens)
    raise typer.Exit(_bench("shared-prefix", workload, common))


@app.command("multi-turn")
def multi_turn(
    clients: Annotated[int, typer.Option(help="Conversations held at the same time.")] = 8,
    rounds: Annotated[int, typer.Option(help="Turns of each conversation.")] = 4,
    first: Annotated[int, typer.Option(help="Tokens of the first message.")] = 512,
    message: Annotated[int, typer.Option(help="Tokens of each later message.")] = 128,
    output: Annotated[int, typer.Option(help="Tokens of each answer, exactly.")] = 64,
    model: Model = None,
    url: Url = None,
    tp: Tp = None,
    page_size: PageSize = None,
    device_bytes: DeviceBytes = None,
    host_bytes: HostBytes = None,
    serve_arg: ServeArg = None,
    compare: Compare = False,
    text: Text = None,
    vocab_size: VocabSize = None,
    request_rate: RequestRate = 0.0,
    concurrency: Concurrency = CONCURRENCY,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    json: Json = None,
    png: Png = None,
) -> None:
    """Clients talk in turns; every prompt is the whole conversation so far."""
    workload = MultiTurn(
        clients=clients,
        rounds=rounds,
        first=first,
        message=message,
        output=output,
        shuffle=shuffle,
        seed=seed,
    )
    given = _given(tp, page_size, device_bytes, host_bytes, serve_arg)
    pace = Pace(request_rate, concurrency, seed)
    common = _Common(model, url, given, compare, text, vocab_size, pace, json, png)
    raise typer.Exit(_bench("multi-turn", workload, common))


def _given(
    tp: int | None,
    page_size: int | None,
    device_bytes: str | None,
    host_bytes: str | None,
    serve_arg: list[str] | None,
) -> dict[str, Any]:
    """The server options that were given, by field of `ServeOptions`."""
    given = parse_serve_args(serve_arg or ())
    named = {
        "tp": tp,
        "page_size": page_size,
        "device_bytes": device_bytes and parse_bytes(device_bytes, "--device-bytes"),
        "host_bytes": host_bytes and parse_bytes(host_bytes, "--host-bytes"),
    }
    for name, value in named.items():
        if value is not None and given.setdefault(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise ConfigError("--serve-arg", f"{option} is given twice", "Give it once")
    return given


def _size_for(common: _Common, tokens: int) -> int:
    if common.url is not None:
        raise ConfigError("--device-groups", "the server at --url has its size", "Leave it out")
    if "device_bytes" in common.given:
        raise ConfigError("--device-groups", "--device-bytes is given too", "Give one of them")
    model = _model_to_serve(common)
    options = Configuration("sizing", common.given).options(model)
    return target.device_bytes_for(tokens, load_config(model), options)


def _model_to_serve(common: _Common) -> str:
    if common.model is None:
        fix = "Write for example --model tiny-linear, or --url of a running server"
        raise ConfigError("--model", "no model was named", fix)
    return common.model


def _bench(name: str, workload: Workload, common: _Common) -> int:
    """Run the benchmark; returns the exit code."""
    console = make_console()
    model = common.model
    if common.url is not None:
        _refuse_server_options(common)
        model = model or target.served_model(common.url)
    else:
        model = _model_to_serve(common)
    source = token_source(model, common.text, common.vocab_size)
    bench = Benchmark(name, model, workload, source, common.pace, console)
    if common.url is not None:
        runs = [bench.drive(common.url, common.url)]
    else:
        chosen = configurations(common.given, common.compare)
        for configuration in chosen:
            configuration.options(model)
        runs = [bench.start_and_drive(configuration) for configuration in chosen]
    return finish(bench.report(runs), console, common.json, common.png)


def _refuse_server_options(common: _Common) -> None:
    """A running server cannot be given options."""
    if common.compare:
        fix = "Leave out --url, so that servers with other options can be started"
        raise ConfigError("--compare", "it starts servers of its own", fix)
    if common.given:
        options = ", ".join("--" + name.replace("_", "-") for name in sorted(common.given))
        fix = "Give them to banyan serve, or leave out --url"
        raise ConfigError("--url", f"the running server does not take {options}", fix)
