"""`banyan inspect` as records: figures worked out by hand from the configs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_file import write_gguf
from model_rig import CONFIGS, tiny_model
from transformers import T5Config
from transformers.utils import logging

from banyan.engine.inspect import (
    BufferRow,
    Capacity,
    ComponentRow,
    component_rows,
    inspect_model,
    prefix_bytes,
    whole_model,
)
from banyan.engine.presets import PRESETS
from banyan.errors import ConfigError, SpecError
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

KV = (2, 32)
"""Two heads of 32 channels: 64 numbers, 256 bytes in float32; keys and values 512 a token."""


def kv_rows(layers: int, dtype: str = "float32") -> tuple[BufferRow, ...]:
    return tuple(BufferRow(name, KV, dtype, 1, layers) for name in ("k", "v"))


def test_tiny_full() -> None:
    """Six layers of 512 bytes a token; a page of 16 tokens; 2**30 // 49,152 is 21,845 pages."""
    found = inspect_model("tiny-full")
    assert (found.model, found.family, found.layers) == ("tiny-full", "qwen3", 6)
    assert (found.dtype, found.page_size, found.page_bytes) == ("float32", 16, 49_152)
    assert found.components == (
        ComponentRow("full", "full", 6, kv_rows(6), 3_072, None, 49_152, 349_520, None),
    )
    assert found.one_gib == Capacity(349_520, 4_096, 256 * 49_152, 85)


def test_tiny_swa() -> None:
    """One full layer, five of window 64: four pages back. A long prompt has the GiB less these."""
    found = inspect_model("tiny-swa")
    assert (found.family, found.layers, found.page_bytes) == ("gemma3_text", 6, 8_192 + 40_960)
    assert found.components == (
        ComponentRow("full", "full", 1, kv_rows(1), 512, None, 8_192, 2_097_152, None),
        ComponentRow("window", "window(64)", 5, kv_rows(5), 2_560, None, 40_960, 419_424, None),
    )
    assert found.one_gib == Capacity(2_096_832, 4_096, 256 * 8_192 + 4 * 40_960, 474)


def test_tiny_linear() -> None:
    """Two full layers, six with a state: 256 x 4 and 4 x 32 x 32 numbers, 20,480 bytes."""
    found = inspect_model("tiny-linear")
    assert (found.family, found.layers, found.page_bytes) == ("qwen3_5_text", 8, 16_384)
    states = (
        BufferRow("conv", (256, 4), "float32", 1, 6),
        BufferRow("recurrent", (4, 32, 32), "float32", 1, 6),
    )
    assert found.components == (
        ComponentRow("full", "full", 2, kv_rows(2), 1_024, None, 16_384, 1_048_576, None),
        ComponentRow("state", "point", 6, states, None, 122_880, 122_880, None, 8_738),
    )
    assert found.one_gib == Capacity(1_048_448, 4_096, 256 * 16_384 + 122_880, 248)


def test_half_the_bytes_and_twice_the_page() -> None:
    found = inspect_model("tiny-swa", page_size=32, dtype="bfloat16")
    full, window = found.components
    assert (full.token_bytes, full.record_bytes) == (256, 256 * 32)
    assert (window.token_bytes, window.buffers) == (1_280, kv_rows(5, "bfloat16"))
    assert found.one_gib.prompt_bytes == 128 * 256 * 32 + 2 * 1_280 * 32


@pytest.mark.parametrize("page_size", [1, 16, 48, 5_000])
@pytest.mark.parametrize("name", PRESETS)
def test_the_long_prompt_fits_and_one_page_more_does_not(name: str, page_size: int) -> None:
    longest = inspect_model(name, page_size=page_size).one_gib.longest_prompt
    spec = CacheSpec.from_config(PRESETS[name](), page_size)
    assert longest is not None and longest % page_size == 0
    pages = longest // page_size
    assert prefix_bytes(spec, pages) <= 1 << 30 < prefix_bytes(spec, pages + 1)


def test_a_prompt_that_does_not_fill_its_last_page_takes_it_whole() -> None:
    assert inspect_model("tiny-full", page_size=5_000).one_gib.prompt_bytes == 5_000 * 3_072


def test_entries_of_several_tokens() -> None:
    """Three halves in one entry per four tokens: 1.5 bytes a token, 24 a page."""
    packed = Buffer("c", 1, (3,), "float16", stride=4)
    spec = CacheSpec((Component("full", Full(), (Buffer("k", 0, (8,)), packed)),), 16)
    (row,) = component_rows(spec)
    assert (row.layers, row.token_bytes, row.record_bytes) == (2, 33.5, 16 * 32 + 24)
    assert row.buffers[1] == BufferRow("c", (3,), "float16", 4, 1)


def test_without_full_attention_a_prompt_may_have_any_length() -> None:
    state = Component("state", Point(), (Buffer("s", 0, (1 << 20,)),))
    window = Component("window", Window(33), (Buffer("k", 1, (4,)),))
    spec = CacheSpec((Component("full", Full()), window, state), 16)
    rows = component_rows(spec)
    assert (rows[0].record_bytes, rows[0].gib_tokens) == (0, None)
    assert (rows[2].gib_states, rows[2].state_bytes) == (256, 4 << 20)
    assert whole_model(spec) == Capacity(None, 4_096, (4 << 20) + 2 * 16 * 16, 255)


def test_a_state_larger_than_a_gib_leaves_room_for_nothing() -> None:
    state = Component("state", Point(), (Buffer("s", 0, (1 << 31,), "int8"),))
    spec = CacheSpec((Component("full", Full(), (Buffer("k", 1, (4,)),)), state), 16)
    found = whole_model(spec)
    assert (found.longest_prompt, found.prompts, component_rows(spec)[1].gib_states) == (0, 0, 0)


def test_a_folder_needs_only_its_config(tmp_path: Path) -> None:
    """gpt-oss: layers take turns; two heads of 16 channels, 256 bytes a token and layer."""
    CONFIGS["gpt-oss"]().save_pretrained(tmp_path / "only-config")
    found = inspect_model(str(tmp_path / "only-config"))
    assert (found.model, found.family, found.layers) == ("only-config", "gpt_oss", 4)
    costs = [(c.name, c.reach, c.layers, c.token_bytes) for c in found.components]
    assert costs == [("full", "full", 2, 512), ("window", "window(32)", 2, 512)]


def test_a_gguf_file_as_its_folder_of_safetensors(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path / "folder")
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", kind="F16")
    found = inspect_model(str(path))
    expected = inspect_model(str(tmp_path / "folder"), dtype="float16")
    assert (found.model, found.dtype, found.layers) == ("tiny", "float16", 4)
    assert found.components == expected.components
    assert found.components[0].token_bytes == 4 * 2 * 2 * 16 * 2


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot find 'tiny-ful'"):
        inspect_model("tiny-ful")
    with pytest.raises(ConfigError, match="--dtype: 'int7' is unknown"):
        inspect_model("tiny-full", dtype="int7")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        inspect_model(str(tmp_path))
    with pytest.raises(SpecError, match="page size 0"):
        inspect_model("tiny-full", page_size=0)
    T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="'t5' is an encoder-decoder model"):
        inspect_model(str(tmp_path))


def test_transformers_remarks_come_back_afterwards() -> None:
    before = logging.get_verbosity()
    inspect_model("tiny-linear")
    with pytest.raises(ConfigError):
        inspect_model("tiny-ful")
    assert logging.get_verbosity() == before
