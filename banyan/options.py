"""The options of a server: one frozen record, where they come from, and what makes them wrong.

Owns `ServeOptions` (each field documented below itself; the command line's help is made from that
text), byte sizes, the TOML file, and every check that needs no model. Knows no pool and no tensor;
imports torch only to answer whether CUDA is there. Immutable, usable from any thread.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from banyan.errors import ConfigError

WritePolicyName = Literal["write_through", "write_through_selective", "write_back", "none"]
EvictPolicyName = Literal["lru", "lfu", "slru", "fifo", "priority"]

_MIN_TIER_BYTES = 4096


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `banyan serve` can be told. Build it directly, or with `load_options`."""

    model: str
    """A folder, .gguf file, hub id (or hub id:file.gguf), or tiny-full, tiny-swa, ..."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    page_size: int = 16
    """Tokens per page, the unit of reuse."""
    tp: int = 1
    """Tensor-parallel ranks, each a process with its part of the model and of every pool."""
    device_bytes: int = 1 << 30
    """Bytes for all device pools of a rank together, such as 512MiB or 2GiB."""
    host_bytes: int | None = None
    """Bytes for the host pools of all ranks together; without it or --host-ratio, no host tier."""
    host_ratio: float | None = None
    """Size of the host tier as a multiple of all ranks' device pools, instead of --host-bytes."""
    write_policy: WritePolicyName | None = None
    """When device data is copied to host; write_through where there is a host tier."""
    evict_policy: EvictPolicyName = "lru"
    """Which prefixes go first; windows and states among them always by last use."""
    chunk: int = 512
    """Most prompt tokens computed in one step; a multiple of --page-size, or less than one page."""
    state_interval: int | None = None
    """Tokens between checkpoints of a long prompt; without it only where prompts branch and end."""
    checkpoints: int | None = None
    """Most checkpoints that one prompt takes; by default 8, fewer where the pools are small."""
    max_running: int = 16
    """Most requests computed together."""
    max_waiting: int = 1024
    """Most requests waiting; more are answered with 503."""
    verify: Literal["off", "all"] = "off"
    """Compare a SHA-256 of every record on both sides of every copy."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and cache; auto is float32 on cpu, else the model's own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """Threads that the model computes with on cpu; torch's own choice without it."""
    load_back_threshold: int = 64
    """Fewest tokens worth copying from host to device; below, they are computed again."""
    cache: bool = True
    """Keep what was computed for later requests."""
    seed: int = 0
    """Seed of the engine's random source, for requests that bring none."""
    order: Literal["fcfs", "longest_prefix"] = "fcfs"
    """Which waiting request starts first."""

    @property
    def host_total(self) -> int:
        """Bytes of the host tier, from either option; 0 when there is none."""
        if self.host_ratio is not None:
            return int(self.host_ratio * self.device_bytes * self.tp)
        return self.host_bytes or 0

    @property
    def resolved_write_policy(self) -> WritePolicyName:
        """The write policy in force: the one given, else by whether there is a host tier."""
        if self.write_policy is not None:
            return self.write_policy
        return "write_through" if self.host_total else "none"

    @property
    def resolved_dtype(self) -> str | None:
        """dtype to load the model in; None means the model's own."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else None

    def validate(self) -> None:
        """Check everything that can be known before the model is loaded.

        Raises:
            ConfigError: the first bad or contradictory option.
        """
        for check in (_check_types, _check_ranges, _check_pages, _check_host, _check_cache):
            check(self)
        _check_device(self)


def flag(name: str) -> str:
    """The option as the user writes it: `page_size` is `--page-size`; the model is `MODEL`."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


@cache
def field_docs() -> dict[str, str]:
    """The text below each field of `ServeOptions`, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(ServeOptions)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for stmt, below in itertools.pairwise(body):
        if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            docs[stmt.target.id] = str(below.value.value)
    return docs


@cache
def field_types() -> dict[str, Any]:
    """The resolved annotation of each field, by field name."""
    hints = typing.get_type_hints(ServeOptions)
    return {name: hints[name] for name in ServeOptions.__struct_fields__}


def choices(name: str) -> tuple[str, ...]:
    """The words a field may take, or () when it is not a choice."""
    kinds = [field_types()[name], *typing.get_args(field_types()[name])]
    found = [typing.get_args(k) for k in kinds if typing.get_origin(k) is Literal]
    return found[0] if found else ()


# ---- sources -------------------------------------------------------------------------------------


def load_options(given: Mapping[str, Any], config: Path | None = None) -> ServeOptions:
    """Merge defaults, a TOML file and what was given (which wins), and validate.

    Args:
        given: by field name; None means not given. Byte sizes may be texts such as `2GiB`.
        config: a TOML file of the same names (dashes or underscores).

    Raises:
        ConfigError: an unreadable file, an unknown key, or a bad or contradictory value.
    """
    values = _read_toml(config) if config else {}
    chosen = {name: value for name, value in given.items() if value is not None}
    for one, other in (("host_bytes", "host_ratio"), ("host_ratio", "host_bytes")):
        if one in chosen and other not in chosen:
            values.pop(other, None)
    values |= chosen
    if "model" not in values:
        raise ConfigError("MODEL", "no model was named", "Write for example: serve tiny-linear")
    for name in ("device_bytes", "host_bytes"):
        if isinstance(values.get(name), str):
            values[name] = parse_bytes(values[name], flag(name))
    options = ServeOptions(**values)
    options.validate()
    return options


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            "--config", f"cannot read {path}: {reason}", "Give a readable TOML file"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("--config", f"{path} is not TOML: {error}", "Correct it") from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in ServeOptions.__struct_fields__:
            fix = suggestion(key, (f.replace("_", "-") for f in ServeOptions.__struct_fields__))
            raise ConfigError("--config", f"{path} has the unknown key {key!r}", fix)
        if name in values:
            raise ConfigError("--config", f"{path} gives {name!r} twice", "Remove one of them")
        values[name] = value
    return values


_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str, option: str) -> int:
    """Bytes from `512MiB`, `1.5GiB`, `2GB` or a plain integer.

    Raises:
        ConfigError: naming `option`, when the text is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None:
        raise ConfigError(
            option, f"{text!r} is not a size", "Write bytes or a size such as 512MiB or 2GiB"
        )
    number, unit = found.groups()
    by_fold = {name.lower(): factor for name, factor in _UNITS.items()}
    if unit.lower() not in by_fold:
        prefix = unit[:1].upper()
        known = prefix in tuple("KMGT")
        fix = f"Write {number}{prefix}iB or {number}{prefix}B" if known else "Write MiB or GiB"
        raise ConfigError(option, f"{text!r} has the unknown unit {unit!r}", fix)
    factor = by_fold[unit.lower()]
    return int(float(number) * factor) if "." in number else int(number) * factor


def suggestion(word: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown word: the nearest known one, else all of them."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(words)}"


# ---- checks --------------------------------------------------------------------------------------


def _check_types(options: ServeOptions) -> None:
    """Every value has its field's type; words are known ones."""
    for name, kind in field_types().items():
        value = getattr(options, name)
        words = choices(name)
        if words and isinstance(value, str) and value not in words:
            raise ConfigError(flag(name), f"unknown value {value!r}", suggestion(value, words))
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(
                flag(name), f"{value!r} does not fit ({error})", _doc_as_fix(name)
            ) from error


def _doc_as_fix(name: str) -> str:
    words = choices(name)
    return f"Write one of {', '.join(words)}" if words else f"It is: {field_docs()[name]}"


def _check_ranges(options: ServeOptions) -> None:
    smallest = {
        "page_size": 1,
        "tp": 1,
        "device_bytes": _MIN_TIER_BYTES,
        "chunk": 1,
        "max_running": 1,
        "checkpoints": 1,
        "max_waiting": 0,
        "seed": 0,
        "load_back_threshold": 1,
        "threads": 1,
    }
    if not options.model.strip():
        raise ConfigError("MODEL", "the model's name is empty", "Write for example tiny-linear")
    for name, least in smallest.items():
        value = getattr(options, name)
        if value is not None and value < least:
            what = "is negative" if value < 0 else f"is below the smallest allowed, {least}"
            raise ConfigError(flag(name), f"{value} {what}", _range_fix(options, name, least))
    if not 0 <= options.port <= 65535:
        raise ConfigError("--port", f"{options.port} is no port", "Write 0 to 65535")


def _range_fix(options: ServeOptions, name: str, least: int) -> str:
    if name == "load_back_threshold":
        return (
            "A copy of no tokens gains nothing; write at least 1, "
            f"or --load-back-threshold {max(1, options.page_size)} (one page)"
        )
    if name == "device_bytes":
        return "Plain numbers are bytes; write a unit, such as 512MiB"
    return f"Write {least} or more"


def _check_pages(options: ServeOptions) -> None:
    page, chunk, interval = options.page_size, options.chunk, options.state_interval
    if chunk > page and chunk % page:
        raise ConfigError(
            "--chunk",
            f"{chunk} is not a multiple of --page-size {page}",
            _multiples(chunk, page, "--chunk"),
        )
    if interval is None:
        return
    if interval <= 0:
        raise ConfigError(
            "--state-interval",
            f"{interval} is not positive",
            "Leave the option out to keep states only where prompts branch and end",
        )
    if interval % page:
        raise ConfigError(
            "--state-interval",
            f"{interval} is not a multiple of --page-size {page}",
            _multiples(interval, page, "--state-interval"),
        )


def _multiples(value: int, page: int, option: str) -> str:
    below = value // page * page
    either = f"{below} or {option} {below + page}" if below else f"{below + page}"
    return f"Write {option} {either}"


def _check_host(options: ServeOptions) -> None:
    given, ratio = options.host_bytes, options.host_ratio
    if given is not None and ratio is not None:
        raise ConfigError(
            "--host-ratio", f"--host-bytes {given} already sizes the host tier", "Give one of them"
        )
    if ratio is not None and not 0 < ratio < float("inf"):
        raise ConfigError(
            "--host-ratio", f"{ratio} is not a positive number", "Write for example --host-ratio 2"
        )
    if given is not None and given < 0:
        raise ConfigError("--host-bytes", f"{given} is negative", "Write 0 for no host tier")
    if 0 < options.host_total < _MIN_TIER_BYTES:
        option = "--host-bytes" if given is not None else "--host-ratio"
        raise ConfigError(
            option,
            f"a host tier of {options.host_total} bytes holds nothing",
            "Plain numbers are bytes; write a size such as --host-bytes 2GiB",
        )
    _check_host_use(options)


def _check_host_use(options: ServeOptions) -> None:
    """Options of the host tier need one, and a host tier needs something written to it."""
    fix = "Give --host-bytes, or leave the option out"
    if not options.host_total and options.write_policy not in (None, "none"):
        raise ConfigError(
            "--write-policy",
            f"{options.write_policy} copies to host, but there is no host tier",
            fix,
        )
    if not options.host_total and options.verify != "off":
        raise ConfigError(
            "--verify", "it compares copies to and from host, but there is no host tier", fix
        )
    if options.host_total and options.write_policy == "none":
        raise ConfigError(
            "--write-policy",
            "none writes nothing to the host tier that was asked for",
            "Write write_through, or leave --host-bytes and --host-ratio out",
        )


def _check_cache(options: ServeOptions) -> None:
    if not options.cache and options.host_total:
        raise ConfigError(
            "--no-cache",
            f"a host tier of {options.host_total} bytes holds nothing without the cache",
            "Leave out --no-cache, or --host-bytes and --host-ratio",
        )


def _check_device(options: ServeOptions) -> None:
    if options.device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "--device", "cuda was asked for, but torch finds no CUDA device", "Write --device cpu"
        )
