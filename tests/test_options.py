"""Options: where they come from, and that every bad one is refused with its name and a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.errors import ConfigError
from banyan.options import (
    ServeOptions,
    choices,
    field_docs,
    flag,
    load_options,
    parse_bytes,
)

GIB = 1 << 30
HOST = {"host_bytes": GIB}


def refusal(config: Path | None = None, **values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_options({"model": "m", **values}, config)
    assert caught.value.fix, "every refusal says what to do"
    return caught.value


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "option", "says"),
    [
        ({"model": " "}, "MODEL", "empty"),
        ({"port": -1}, "--port", "no port"),
        ({"port": 65536}, "--port", "no port"),
        ({"page_size": 0}, "--page-size", "smallest allowed, 1"),
        ({"page_size": -16}, "--page-size", "negative"),
        ({"page_size": 16.5}, "--page-size", "does not fit"),
        ({"page_size": True}, "--page-size", "does not fit"),
        ({"device_bytes": 2}, "--device-bytes", "Plain numbers are bytes"),
        ({"device_bytes": -1}, "--device-bytes", "negative"),
        ({"host_bytes": 2}, "--host-bytes", "holds nothing"),
        ({"host_bytes": -1}, "--host-bytes", "negative"),
        ({"host_bytes": GIB, "host_ratio": 2.0}, "--host-ratio", "already sizes the host tier"),
        ({"host_ratio": 0.0}, "--host-ratio", "not a positive number"),
        ({"host_ratio": -2.0}, "--host-ratio", "not a positive number"),
        ({"host_ratio": float("nan")}, "--host-ratio", "not a positive number"),
        ({"host_ratio": float("inf")}, "--host-ratio", "not a positive number"),
        ({"host_ratio": 1e-9}, "--host-ratio", "holds nothing"),
        ({"write_policy": "write_thru", **HOST}, "--write-policy", "Did you mean 'write_through'?"),
        ({"write_policy": "write_back"}, "--write-policy", "no host tier"),
        ({"write_policy": "write_back", "host_bytes": 0}, "--write-policy", "no host tier"),
        ({"write_policy": "none", **HOST}, "--write-policy", "writes nothing to the host tier"),
        ({"evict_policy": "lrru"}, "--evict-policy", "Did you mean 'lru'?"),
        ({"evict_policy": "zzz"}, "--evict-policy", "Known: lru, lfu, slru, fifo, priority"),
        ({"chunk": 500}, "--chunk", "Write --chunk 496 or --chunk 512"),
        ({"chunk": 0, "page_size": 1}, "--chunk", "smallest allowed, 1"),
        ({"state_interval": 0}, "--state-interval", "not positive"),
        ({"state_interval": -16}, "--state-interval", "not positive"),
        ({"state_interval": 8}, "--state-interval", "Write --state-interval 16"),
        ({"state_interval": 40}, "--state-interval", "32 or --state-interval 48"),
        ({"max_running": 0}, "--max-running", "smallest allowed, 1"),
        ({"max_waiting": -1}, "--max-waiting", "negative"),
        ({"verify": "all"}, "--verify", "no host tier"),
        ({"verify": "some", **HOST}, "--verify", "Known: off, all"),
        ({"dtype": "floot16"}, "--dtype", "Did you mean 'float16'?"),
        ({"device": "gpu"}, "--device", "unknown value 'gpu'"),
        ({"load_back_threshold": 0}, "--load-back-threshold", "--load-back-threshold 16 (one"),
        ({"load_back_threshold": -1}, "--load-back-threshold", "negative"),
        ({"cache": False, **HOST}, "--no-cache", "holds nothing without the cache"),
        ({"seed": -1}, "--seed", "negative"),
        ({"order": "lifo"}, "--order", "unknown value 'lifo'"),
    ],
)
def test_refused(values: dict[str, Any], option: str, says: str) -> None:
    error = refusal(**values)
    assert error.option == option
    assert says in str(error)
    assert "\n" not in str(error)


def test_c085_interval_longer_than_a_chunk_is_served_by_cut_points() -> None:
    """C085: chunks end at every interval, so any multiple of the page size is meaningful."""
    small = load_options({"model": "m", "page_size": 4, "chunk": 8, "state_interval": 16})
    assert (small.chunk, small.state_interval) == (8, 16)
    assert refusal(page_size=4, chunk=8, state_interval=18).option == "--state-interval"


@pytest.mark.parametrize(
    "values",
    [
        {"write_policy": "write_through", "host_bytes": 0},
        {"load_back_threshold": 0},
        {"evict_policy": "unknown"},
        {"verify": "all", "host_bytes": 0},
    ],
)
def test_c137_second_tier_options_name_the_option_and_a_value(values: dict[str, Any]) -> None:
    """C137: no option of the second tier is taken that cannot take effect."""
    error = refusal(**values)
    assert error.option.startswith("--") and error.fix


def test_c128_sizes_are_totals_by_tier() -> None:
    """C128: one number per tier; the pools divide it (their sum is tested with the sizing)."""
    options = load_options({"model": "m", "device_bytes": "1GiB", "host_ratio": 2.5})
    assert options.device_bytes == GIB
    assert options.host_total == GIB * 5 // 2
    assert "together" in field_docs()["device_bytes"] and "together" in field_docs()["host_bytes"]


def test_cuda_without_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        assert load_options({"model": "m", "device": "cuda"}).device == "cuda"
    else:
        assert refusal(device="cuda").fix == "Write --device cpu"


# ---- what is derived -----------------------------------------------------------------------------


def test_defaults_are_valid_and_have_no_host_tier() -> None:
    options = load_options({"model": "m"})
    assert options == ServeOptions(model="m")
    assert (options.host_total, options.resolved_write_policy) == (0, "none")


def test_a_host_tier_is_written_through_unless_told_otherwise() -> None:
    assert load_options({"model": "m", **HOST}).resolved_write_policy == "write_through"
    back = load_options({"model": "m", "write_policy": "write_back", **HOST})
    assert back.resolved_write_policy == "write_back"


def test_auto_dtype() -> None:
    assert ServeOptions(model="m").resolved_dtype == "float32"
    assert ServeOptions(model="m", device="cuda").resolved_dtype is None
    assert ServeOptions(model="m", dtype="bfloat16").resolved_dtype == "bfloat16"


def test_options_survive_the_wire() -> None:
    options = load_options({"model": "m", "host_ratio": 1.5, "state_interval": 64, "cache": True})
    assert msgspec.json.decode(msgspec.json.encode(options), type=ServeOptions) == options


def test_every_field_is_documented() -> None:
    assert set(field_docs()) == set(ServeOptions.__struct_fields__)
    assert all(text.endswith(".") for text in field_docs().values())
    assert field_docs()["page_size"] == "Tokens per page, the unit of reuse."


def test_flags_and_choices() -> None:
    assert (flag("host_bytes"), flag("model")) == ("--host-bytes", "MODEL")
    assert choices("verify") == ("off", "all")
    assert choices("write_policy")[-1] == "none"
    assert choices("port") == ()


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("3KB", 3000),
        ("1TiB", 1 << 40),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text, "--device-bytes") == count


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("512M", "Write 512MiB or 512MB"),
        ("2g", "Write 2GiB or 2GB"),
        ("5 parsecs", "Write MiB or GiB"),
        ("-5MiB", "such as 512MiB"),
        ("", "such as 512MiB"),
        ("MiB", "such as 512MiB"),
        ("1e9", "such as 512MiB"),
    ],
)
def test_bad_sizes(text: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, "--host-bytes")
    assert caught.value.option == "--host-bytes"
    assert fix in caught.value.fix


@given(st.integers(0, 1 << 50))
def test_plain_numbers_are_exact(count: int) -> None:
    assert parse_bytes(str(count), "--device-bytes") == count


# ---- the file ------------------------------------------------------------------------------------


def toml(folder: Path, text: str) -> Path:
    path = folder / "banyan.toml"
    path.write_text(text)
    return path


def test_file_and_command_line(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "a"\npage-size = 4\nhost_bytes = "1GiB"\ncache = true\n')
    options = load_options({"page_size": 8, "port": None}, path)
    assert (options.model, options.page_size, options.host_bytes) == ("a", 8, GIB)
    assert options.port == 8000


def test_the_command_lines_host_size_replaces_the_files(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "a"\nhost-ratio = 2.0\n')
    assert load_options({"host_bytes": "1GiB"}, path).host_total == GIB
    path = toml(tmp_path, 'model = "a"\nhost-bytes = "1GiB"\n')
    assert load_options({"host_ratio": 3.0}, path).host_total == 3 * GIB
    path = toml(tmp_path, 'model = "a"\nhost-bytes = "1GiB"\nhost-ratio = 2.0\n')
    assert refusal(path).option == "--host-ratio"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("page-sise = 4\n", "unknown key 'page-sise'. Did you mean 'page-size'?"),
        ("page-size = 4\npage_size = 8\n", "gives 'page_size' twice"),
        ("page-size = \n", "is not TOML"),
        ('page-size = "4"\n', "'4' does not fit"),
        ("[server]\nport = 1\n", "unknown key 'server'"),
        ('device-bytes = "512M"\n', "Write 512MiB or 512MB"),
        ("host-bytes = 1.5\n", "does not fit"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, says: str) -> None:
    assert says in str(refusal(toml(tmp_path, text)))


def test_unreadable_file(tmp_path: Path) -> None:
    assert "No such file" in str(refusal(tmp_path / "missing.toml"))
    assert "Is a directory" in str(refusal(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in str(refusal(tmp_path / "binary.toml"))


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model was named"):
        load_options({}, toml(tmp_path, "port = 1\n"))
