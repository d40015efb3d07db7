"""Server options are read, compared servers differ in the cache alone, sizes hold what they say."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import FakeServer, serving

from banyan.bench.model import load_config, token_source
from banyan.bench.target import (
    Configuration,
    cache_stats,
    configurations,
    device_bytes_for,
    parse_serve_args,
    served_model,
)
from banyan.bench.work import Vocabulary
from banyan.engine.presets import PRESETS
from banyan.errors import ConfigError
from banyan.pools.sizing import plan_sizes
from banyan.spec import CacheSpec


def test_serve_args_have_the_types_of_their_options() -> None:
    given = parse_serve_args(
        ["state-interval=256", "--verify=all", "host_ratio=2.5", "cache=false"]
    )
    assert given == {"state_interval": 256, "verify": "all", "host_ratio": 2.5, "cache": False}


@pytest.mark.parametrize(
    "text", ["state-interval", "state-intervall=3", "model=tiny-full", "port=1", "=3"]
)
def test_a_serve_arg_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_serve_args([text])
    assert refused.value.option == "--serve-arg"


def test_compared_configurations_differ_in_the_cache_alone() -> None:
    given = {"page_size": 32, "device_bytes": 1 << 24, "verify": "all", "load_back_threshold": 32}
    full, no_host, no_cache = configurations(given, compare=True)
    assert (full.name, no_host.name, no_cache.name) == ("device + host", "host off", "cache off")
    options = [c.options("tiny-linear") for c in (full, no_host, no_cache)]
    assert [o.host_total for o in options] == [16 << 24, 0, 0]
    assert [o.cache for o in options] == [True, True, False]
    assert {(o.page_size, o.device_bytes, o.chunk) for o in options} == {(32, 1 << 24, 512)}


def test_a_configuration_is_named_by_what_it_has() -> None:
    names = [
        configurations(given, compare=False)[0].name
        for given in ({}, {"host_bytes": 0}, {"write_policy": "none"}, {"cache": False})
    ]
    assert names == ["device + host", "host off", "host off", "cache off"]


def test_comparing_without_a_host_tier_is_refused() -> None:
    given: dict[str, Any]
    for given in ({"host_bytes": 0}, {"cache": False}):
        with pytest.raises(ConfigError) as refused:
            configurations(given, compare=True)
        assert refused.value.option == "--compare"


def test_arguments_are_those_of_the_command_line() -> None:
    given = {"page_size": 16, "cache": False, "verify": "off"}
    assert Configuration("x", given).arguments() == [
        "--no-cache",
        "--page-size",
        "16",
        "--verify",
        "off",
    ]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_device_size_holds_the_tokens_and_no_more(preset: str, page_size: int) -> None:
    config = load_config(preset)
    options = Configuration("x", {"page_size": page_size, "chunk": 256}).options(preset)
    spec = CacheSpec.from_config(config, page_size, "float32")

    def tokens(device_bytes: int) -> int:
        plan = plan_sizes(
            spec,
            device_bytes=device_bytes,
            host_bytes=0,
            max_running=options.max_running,
            chunk=options.chunk,
            state_interval=None,
        )
        return plan.device[0].slots * page_size

    size = device_bytes_for(4_000, config, options)
    assert tokens(size) >= 4_000 > tokens(size - 1)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model found"):
        load_config("./no-such-folder")
    with pytest.raises(ConfigError, match="no tokenizer found"):
        token_source("./no-such-folder", None, None)


def test_a_presets_tokens_are_its_bytes() -> None:
    source = token_source("tiny-swa", None, None)
    assert isinstance(source, Vocabulary)
    assert source.size == 261
    assert source.special == frozenset(range(256, 261))
    assert token_source("./no-such-folder", None, 50) == Vocabulary(50)


def test_the_running_server_says_what_it_serves() -> None:
    with serving(FakeServer()) as url:
        assert served_model(url) == "fake"
        assert cache_stats(url) == {"requests": 0}
    with pytest.raises(ConfigError) as refused:
        served_model(url)
    assert refused.value.option == "--url"
