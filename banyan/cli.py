"""The `banyan` command.

Owns the commands' names, their options (made from `ServeOptions`) and how errors are shown: one
line with the fix, exit status 2. Imports nothing heavy before a command runs.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import banyan
from banyan.errors import BanyanError, ConfigError
from banyan.options import ServeOptions, choices, field_docs, field_types, flag, load_options

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""typer's own errors about the command line; it has no public name for their base."""

_BYTES_FIELDS = ("device_bytes", "host_bytes")

app = typer.Typer(
    name="banyan",
    help="A prefix cache for hybrid language models, and the server around it.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"banyan {banyan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """A prefix cache for hybrid language models, and the server around it."""


# ---- serve ---------------------------------------------------------------------------------------


def _parameter(name: str) -> inspect.Parameter:
    """The command-line parameter of a field of `ServeOptions`; None means not given."""
    kind, text = _kind(name), field_docs()[name]
    default = _default_text(name)
    if name == "model":
        info: Any = typer.Argument(help=text, show_default=False, metavar="MODEL")
    else:
        flags = f"{flag(name)}/--no-{name}" if kind is bool else flag(name)
        info = typer.Option(
            flags, help=f"{text}{default}", show_default=False, metavar=_metavar(name, kind)
        )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, info],
    )


def _kind(name: str) -> type:
    """The Python type a field is read as from the command line."""
    if name in _BYTES_FIELDS or choices(name):
        return str
    for kind in (bool, int, float, str):
        if field_types()[name] in (kind, kind | None):
            return kind
    raise TypeError(f"no command-line type for the field {name!r}")


def _metavar(name: str, kind: type) -> str | None:
    if kind is bool:
        return None
    if name in _BYTES_FIELDS:
        return "SIZE"
    return "WORD" if choices(name) else {int: "N", float: "X", str: "TEXT"}[kind]


def _default_text(name: str) -> str:
    """What follows a field's help: its words, its default."""
    words = ", ".join(choices(name))
    default = _default(name)
    notes = [f"one of {words}" if words else "", f"default: {default}" if default else ""]
    text = "; ".join(note for note in notes if note)
    return f" ({text})" if text else ""


def _default(name: str) -> str:
    fields = ServeOptions.__struct_fields__
    defaults = ServeOptions.__struct_defaults__
    at = fields.index(name) - (len(fields) - len(defaults))
    value = defaults[at] if at >= 0 else None
    if isinstance(value, bool):
        return "on" if value else "off"
    if name in _BYTES_FIELDS and isinstance(value, int):
        return f"{value >> 20}MiB"
    return str(value) if isinstance(value, str | int | float) else ""


def _serve(config: Path | None, **given: Any) -> None:
    """Serve a model over HTTP, in the shape of the OpenAI API."""
    options = load_options(given, config)
    if int(os.environ.get("RANK") or 0):  # one of the ranks that torchrun or the like has started
        from banyan.engine.build import follow_if_told

        follow_if_told(options)
        return
    from banyan.server.serve import serve

    serve(options)


def _make_serve() -> Callable[..., None]:
    """`_serve` with one parameter per field of `ServeOptions`, and `--config`."""

    def command(**values: Any) -> None:
        _serve(values.pop("config"), **values)

    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option("--config", help="A TOML file of these options; the command line wins."),
        ],
    )
    parameters = [*map(_parameter, ServeOptions.__struct_fields__), config]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = _serve.__doc__
    return command


app.command("serve")(_make_serve())


# ---- the rest ------------------------------------------------------------------------------------


@app.command("inspect")
def _inspect(
    model: Annotated[str, typer.Argument(help=field_docs()["model"], metavar="MODEL")],
    page_size: Annotated[
        int, typer.Option("--page-size", metavar="N", help=field_docs()["page_size"])
    ] = 16,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="WORD",
            help="Number format of the cache: float32, bfloat16, float16, or auto, the model's own "
            "(on cpu, serve takes float32 for auto).",
        ),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a model would keep in the cache, and how much one GiB holds."""
    from banyan.engine.inspect import inspect_model

    found = asdict(inspect_model(model, page_size=page_size, dtype=dtype))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    from banyan.server.tables import inspection

    console = Console()
    for part in inspection(found):
        console.print(part)


@app.command(
    "bench",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _bench(context: typer.Context) -> None:
    """Measure a server: shared prefixes, conversations, the demo."""
    from banyan.bench.cli import app as bench_app

    raise typer.Exit(_run(bench_app, context.args or ["--help"], "banyan bench"))


@app.command(
    "soak",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _soak(context: typer.Context) -> None:
    """Run the real engine under load with a model that proves every byte it reads."""
    from banyan.soak.cli import app as soak_app

    raise typer.Exit(_run(soak_app, context.args, "banyan soak"))


def _run(commands: typer.Typer, words: list[str], name: str) -> int:
    """Run one command of an app and return its status."""
    return int(commands(words, prog_name=name, standalone_mode=False) or 0)


def main(args: Sequence[str] | None = None) -> None:
    """Entry of the `banyan` command; ends the process with its status."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        status = _run(app, words or ["--help"], "banyan")
    except ConfigError as error:
        status = _refuse(" ".join(str(error).split()))
    except BanyanError as error:
        status = _refuse(str(error))
    except UsageError as error:
        status = _refuse(error.format_message())  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _refuse(text: str) -> int:
    print(f"banyan: {text}", file=sys.stderr)
    return 2
