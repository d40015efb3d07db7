"""Which servers a benchmark drives: one that runs already, or fresh ones it starts itself.

Owns the configurations of `--compare` and the size of a device pool that holds so many tokens.
Knows the server's options; knows no workload.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from banyan.errors import ConfigError
from banyan.options import ServeOptions, flag, load_options, suggestion
from banyan.pools.sizing import plan_sizes
from banyan.spec import CacheSpec

HOST_RATIO = 16.0
"""Host tier of a started server, as a multiple of its device pools, when no option sizes it: enough
for every state of eight groups where the device pools hold two."""

_HOST_FIELDS = ("host_bytes", "host_ratio", "write_policy", "verify", "load_back_threshold")
_OWN_FIELDS = ("model", "host", "port")


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server to start.

    Args:
        given: the options to give, by field of `ServeOptions`; the rest have their defaults.
    """

    name: str
    given: Mapping[str, Any]

    def options(self, model: str) -> ServeOptions:
        """The options in force.

        Raises:
            ConfigError: one is bad or contradicts another.
        """
        return load_options({"model": model, **self.given})

    def arguments(self) -> list[str]:
        """The options as the command line takes them."""
        arguments: list[str] = []
        for name, value in sorted(self.given.items()):
            if isinstance(value, bool):
                arguments.append(flag(name) if value else "--no-" + flag(name)[2:])
            else:
                arguments += [flag(name), str(value)]
        return arguments


def parse_serve_args(texts: Iterable[str]) -> dict[str, Any]:
    """Server options from texts such as `state-interval=256`, with the types of their fields.

    Raises:
        ConfigError: not `name=value`, an unknown name, or a value of another type.
    """
    given: dict[str, Any] = {}
    for text in texts:
        word, equals, value = text.partition("=")
        name = word.strip().removeprefix("--").replace("-", "_")
        if not equals:
            fix = "Write name=value, such as --serve-arg state-interval=256"
            raise ConfigError("--serve-arg", f"{text!r} has no value", fix)
        if name not in ServeOptions.__struct_fields__ or name in _OWN_FIELDS:
            words = (f for f in ServeOptions.__struct_fields__ if f not in _OWN_FIELDS)
            fix = suggestion(name, words)
            raise ConfigError("--serve-arg", f"unknown server option {word!r}", fix)
        given[name] = _typed(name, value)
    return given


def _typed(name: str, text: str) -> Any:
    """`text` as TOML reads it where that is not text (numbers, true, false), else as it is."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def configurations(given: Mapping[str, Any], compare: bool) -> list[Configuration]:
    """The servers to start: as given, and under `compare` the same without parts of the cache.

    Raises:
        ConfigError: a comparison of options that switch the compared part off.
    """
    sized = {"host_bytes", "host_ratio"} & given.keys()
    wants_host = given.get("cache", True) and given.get("write_policy") != "none"
    full = dict(given)
    if wants_host and not sized:
        full["host_ratio"] = HOST_RATIO
    has_host = bool(full.get("host_ratio") or full.get("host_bytes"))
    name = "device + host" if has_host else "host off" if given.get("cache", True) else "cache off"
    if not compare:
        return [Configuration(name, full)]
    if not has_host:
        raise ConfigError(
            "--compare", f"the options given are already those of {name!r}", "Leave them out"
        )
    off = {key: value for key, value in full.items() if key not in _HOST_FIELDS}
    return [
        Configuration(name, full),
        Configuration("host off", off),
        Configuration("cache off", off | {"cache": False}),
    ]


def device_bytes_for(tokens: int, config: Any, options: ServeOptions) -> int:
    """A `--device-bytes` whose automatic split just gives `tokens` tokens of `Full` data.

    Args:
        config: the model's transformers config. With several ranks, each is taken to keep an equal
            share of the attention heads and all of everything else.
        options: everything else that sizing depends on.

    Returns:
        a size that holds them, while one byte less does not.

    Raises:
        ConfigError: no size up to a terabyte is enough.
    """
    config = _share_of(config, options.tp)
    spec = CacheSpec.from_config(config, options.page_size, options.resolved_dtype)
    pages = -(-tokens // options.page_size)
    low, high = 0, 1 << 40
    if not _holds(spec, options, pages, high):
        problem = f"no device pool of up to {high} bytes holds {tokens} tokens"
        raise ConfigError("--device-groups", problem, "Use fewer or smaller groups")
    while low + 1 < high:
        middle = (low + high) // 2
        if _holds(spec, options, pages, middle):
            high = middle
        else:
            low = middle
    return high


def _share_of(config: Any, ranks: int) -> Any:
    """The config of a model with one rank's attention heads, and the same size of each."""
    if ranks == 1:
        return config
    share = copy.deepcopy(config)
    query = int(config.num_attention_heads)
    share.head_dim = getattr(config, "head_dim", None) or config.hidden_size // query
    share.num_attention_heads = query // ranks
    if getattr(config, "num_key_value_heads", None):
        share.num_key_value_heads = max(1, config.num_key_value_heads // ranks)
    return share


def _holds(spec: CacheSpec, options: ServeOptions, pages: int, device_bytes: int) -> bool:
    try:
        plan = plan_sizes(
            spec,
            device_bytes=device_bytes,
            host_bytes=0,
            max_running=options.max_running,
            chunk=options.chunk,
            state_interval=options.state_interval,
        )
    except ConfigError:
        return False
    return plan.device[0].slots >= pages


@contextmanager
def started(console: Console, model: str, configuration: Configuration) -> Iterator[str]:
    """Start a fresh server and yield its URL; it is stopped at the end, whatever happens."""
    from banyan.server.launch import ServerProcess

    arguments = configuration.arguments()
    with ExitStack() as stack:
        with console.status(f"Starting banyan serve {model} {' '.join(arguments)}"):
            server = stack.enter_context(ServerProcess(model, arguments))
        yield server.url


def served_model(url: str) -> str:
    """The id of the one model that the server at `url` serves.

    Raises:
        ConfigError: nothing answers there, or not as expected.
    """
    return str(_get(url, "/v1/models")["data"][0]["id"])


def cache_stats(url: str) -> dict[str, Any]:
    """The server's `/v1/cache/stats`; {} from a server that has none.

    Raises:
        ConfigError: nothing answers there.
    """
    return _get(url, "/v1/cache/stats", missing_ok=True)


def _get(url: str, path: str, missing_ok: bool = False) -> dict[str, Any]:
    try:
        response = httpx.get(url + path, timeout=30)
        if missing_ok and response.status_code == httpx.codes.NOT_FOUND:
            return {}
        body: dict[str, Any] = response.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            "--url", f"{url}{path} gave no answer ({error})", "Give the URL of a running server"
        ) from error
    return body
