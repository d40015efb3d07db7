"""Models in GGUF files: every route to one, the same answers as from safetensors, the refusals."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from gguf_file import MERGED_ID, write_gguf
from huggingface_hub.errors import LocalEntryNotFoundError
from model_rig import Sequencer, prompt_of, reference_generate, tiny_model

from banyan.engine.models import LoadedModel, load_config, load_model, load_tokenizer
from banyan.engine.presets import EOS_ID, build_tokenizer
from banyan.errors import ConfigError

HUB_ID = "owner/some-model:quants/tiny.gguf"
CHAT = [{"role": "user", "content": "hello"}]
CHAT_TEXT = "[user]hello[answer]"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama in `models/tiny.gguf`, float32, and nothing beside it."""
    return write_gguf(tiny_model("llama"), tmp_path_factory.mktemp("gguf") / "models/tiny.gguf")


@pytest.fixture(scope="module")
def safetensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a folder of safetensors."""
    folder = tmp_path_factory.mktemp("folder")
    tiny_model("llama").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of every position of a prompt."""
    with torch.inference_mode():
        found: torch.Tensor = loaded.model(torch.tensor([prompt_of(40)])).logits
    return found


# ---- routes --------------------------------------------------------------------------------------

ROUTES: dict[str, tuple[Callable[[Path], str], str]] = {
    "file": (str, "tiny"),
    "folder": (lambda path: str(path.parent), "models"),
    "hub": (lambda _: HUB_ID, HUB_ID),
}


@pytest.fixture(params=ROUTES)
def route(
    request: pytest.FixtureRequest, written: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """What to ask for, and the name that the model then has."""

    def download(repo: str, file: str, **_: Any) -> str:
        assert (repo, file) == ("owner/some-model", "quants/tiny.gguf")
        return str(written)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ask, name = ROUTES[request.param]
    return ask(written), name


def test_every_route_gives_the_logits_of_the_safetensors(
    route: tuple[str, str], safetensors: Path, written: Path
) -> None:
    ask, name = route
    loaded = load_model(ask)
    assert torch.equal(logits(loaded), logits(load_model(str(safetensors))))
    assert (loaded.name, loaded.dtype, loaded.max_length) == (name, "float32", 4096)
    assert loaded.eos_ids == {EOS_ID}
    assert loaded.fingerprint == load_model(str(written)).fingerprint


def test_every_route_gives_the_tokenizer_and_the_template(route: tuple[str, str]) -> None:
    ask, _ = route
    for tokenizer in (load_tokenizer(ask), load_model(ask).tokenizer):
        assert tokenizer.encode("hello") == [MERGED_ID, *b"llo"]
        assert tokenizer.decode(tokenizer.encode("hé!")) == "hé!"
        text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert text == CHAT_TEXT


def test_every_route_gives_the_config_alone(route: tuple[str, str]) -> None:
    ask, name = route
    loaded = load_config(ask)
    assert (loaded.name, loaded.dtype) == (name, "float32")
    expected = tiny_model("llama").config
    assert loaded.config.model_type == "llama"
    for field in ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
        assert getattr(loaded.config, field) == getattr(expected, field)


def test_the_engine_answers_as_transformers_does(written: Path) -> None:
    loaded = load_model(str(written))
    prompt = prompt_of(50, seed=3)
    answer = Sequencer.of(loaded.model, page_size=16).generate(prompt, 12, chunk=20)
    assert answer == reference_generate(tiny_model("llama"), prompt, 12)
    assert len(set(answer)) > 2


# ---- number formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_asked_dtype_is_the_one_of_every_weight(kind: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", kind=kind)
    loaded = load_model(str(path), dtype=dtype)
    assert loaded.dtype == load_config(str(path), dtype=dtype).dtype == dtype
    assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{dtype}"}
    assert logits(loaded).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")],
)
def test_auto_is_what_the_file_was_written_in(kind: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", kind=kind)
    loaded = load_model(str(path), dtype="auto")
    assert loaded.dtype == load_config(str(path)).dtype == dtype


def test_quantized_weights_are_unpacked_exactly(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", kind="Q8_0")
    found = load_model(str(path)).model.model.layers[1].mlp.down_proj.weight
    expected = tiny_model("llama").model.layers[1].mlp.down_proj.weight
    packed = gguf.quants.quantize(expected.numpy(force=True), gguf.GGMLQuantizationType.Q8_0)
    unpacked = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(found, torch.from_numpy(unpacked))
    assert not torch.equal(found, expected)


# ---- what a file says ----------------------------------------------------------------------------


def test_the_fingerprint_covers_every_byte_and_the_dtype(written: Path, tmp_path: Path) -> None:
    before = load_model(str(written)).fingerprint
    renamed = tmp_path / "other-name.gguf"
    content = bytearray(written.read_bytes())
    renamed.write_bytes(content)
    assert load_model(str(renamed)).fingerprint == before
    content[-1] ^= 1
    renamed.write_bytes(content)
    assert load_model(str(renamed)).fingerprint != before
    assert load_model(str(written), dtype="float16").fingerprint != before


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": EOS_ID + 1}
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", extra=extra)
    assert load_model(str(path)).eos_ids == {EOS_ID, EOS_ID + 1}


def test_safetensors_come_before_a_gguf_file_in_the_same_folder(
    written: Path, safetensors: Path, tmp_path: Path
) -> None:
    shutil.copytree(safetensors, tmp_path / "both")
    shutil.copy(written, tmp_path / "both")
    loaded = load_model(str(tmp_path / "both"))
    assert loaded.fingerprint == load_model(str(safetensors)).fingerprint
    assert loaded.tokenizer.encode("he") == list(b"he")


def test_a_named_file_brings_its_own_tokenizer_whatever_lies_beside_it(
    written: Path, safetensors: Path, tmp_path: Path
) -> None:
    shutil.copytree(safetensors, tmp_path / "both")
    shutil.copy(written, tmp_path / "both")
    tokenizer = load_tokenizer(str(tmp_path / "both" / "tiny.gguf"))
    assert tokenizer.encode("he") == [MERGED_ID]
    assert tokenizer.eos_token_id == EOS_ID
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == CHAT_TEXT


# ---- refusals ------------------------------------------------------------------------------------


def refusal(name: Path | str, load: Callable[[str], Any] = load_model) -> str:
    """What is said of a model that is refused."""
    with pytest.raises(ConfigError) as caught:
        load(str(name))
    return str(caught.value)


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_one_of_several_files_must_be_named(load: Callable[[str], Any], tmp_path: Path) -> None:
    for name in ("q8.gguf", "q4.gguf"):
        (tmp_path / name).touch()
    said = refusal(tmp_path, load)
    assert "several GGUF files: q4.gguf, q8.gguf" in said
    assert f"such as {tmp_path / 'q4.gguf'}" in said


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
@pytest.mark.parametrize("whole", [True, False])
def test_the_parts_of_one_model_are_refused_with_the_fix(
    whole: bool, load: Callable[[str], Any], tmp_path: Path
) -> None:
    for part in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (tmp_path / part).touch()
    said = refusal(tmp_path if whole else tmp_path / "big-00002-of-00002.gguf", load)
    assert "one of the 2 parts of big" in said and "llama-gguf-split --merge big-0000" in said


def test_a_part_is_not_even_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **_: asked.append(a[1]))
    assert "one of the 3 parts of big" in refusal("owner/name:q/big-00001-of-00003.gguf")
    assert asked == []


def test_a_single_part_is_a_whole_model(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00001.gguf"
    shutil.copy(written, path)
    for name in (path, tmp_path):
        assert load_model(str(name)).eos_ids == {EOS_ID}


def test_a_file_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo: str, file: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(f"no route to {repo} for {file}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    said = refusal(HUB_ID)
    assert "no route to owner/some-model for quants/tiny.gguf" in said and HUB_ID in said


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_an_architecture_transformers_does_not_read(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), path, architecture="telepathy")
    said = refusal(path, load)
    assert "GGUF model with architecture telepathy is not supported" in said
    assert "or the model's safetensors" in said


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_a_missing_package_is_named(
    package: str, load: Callable[[str], Any], written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal(written, load)
    assert f"needs the package {package}" in said and f"Run pip install {package}" in said


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_damaged_files_are_config_errors(
    damage: str, load: Callable[[str], Any], written: Path, tmp_path: Path
) -> None:
    whole = written.read_bytes()
    content = {"empty": b"", "text": b"not a model, but a text", "cut": whole[:200]}[damage]
    (tmp_path / "tiny.gguf").write_bytes(content)
    assert f"{tmp_path / 'tiny.gguf'} could not be loaded: " in refusal(tmp_path, load)


def test_a_download_that_stopped_early_is_a_config_error(written: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(written.read_bytes()[:-1000])
    assert "could not be loaded" in refusal(tmp_path)


def test_a_missing_weight_is_not_made_up(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), path, without="blk.2.ffn_up.weight")
    assert "it has no model.layers.2.mlp.up_proj.weight (1 such in all)" in refusal(path)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"extra": {"llama.rope.scaling.type": "linear"}}, "llama.rope.scaling.type = linear"),
    ],
)
def test_scaled_positions_are_refused_and_not_ignored(
    options: dict[str, Any], names: str, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", **options)
    said = refusal(path)
    assert f"scales its positions ({names})" in said and "Use the model's safetensors" in said


def test_a_scaling_of_none_is_no_scaling(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "none"}
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", extra=extra)
    assert load_model(str(path)).eos_ids == {EOS_ID}


def test_another_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("x")
    assert "notes.txt is a file, but no .gguf file" in refusal(path)
