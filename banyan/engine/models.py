"""Loads a model: a built-in preset, a folder, a GGUF file, or one of these from the hub.

Owns what becomes of a model's files (`sources.py` says which they are): weights, tokenizer, config,
fingerprint. Knows no cache and no request. Called once, at start; the result is read-only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError

from banyan.engine.gguf_files import (
    READ_ERRORS,
    check_gguf,
    end_of_turn,
    own_dtype,
    read_gguf_config,
    read_gguf_model,
    read_gguf_tokenizer,
)
from banyan.engine.presets import PRESETS, build_preset, build_tokenizer
from banyan.engine.sharding import shard
from banyan.engine.sources import CONFIG, MODEL, TOKENIZER, Source, find_source
from banyan.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HASH_CHUNK_BYTES = 1 << 22


DEFAULT_LENGTH = 32_768
"""Tokens of a prompt and its answer, for models that are made for any number."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the engine needs to know of it.

    Args:
        model: a `transformers` causal language model in eval mode.
        tokenizer: has `encode`, `decode`, `apply_chat_template` and `chat_template`.
        config: the text part of the model's config.
        name: what clients call it.
        eos_ids: tokens that end an answer.
        fingerprint: equal for equal weights, config and dtype; 32 hex digits.
    """

    model: Any
    tokenizer: Any
    config: Any
    name: str
    eos_ids: frozenset[int]
    fingerprint: str

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together that the model was made for."""
        return longest_input(self.config)

    @property
    def dtype(self) -> str:
        """Of the activations, and so of cached keys and values: `float32`, `bfloat16`, ..."""
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """What is known of a model without its weights.

    Args:
        config: the text part of the model's config; its `dtype` is the one to load it in.
        name: what clients call it.
    """

    config: Any
    name: str

    @property
    def dtype(self) -> str:
        """Of the activations, and so of cached keys and values: `float32`, `bfloat16`, ..."""
        return str(self.config.dtype).removeprefix("torch.")


def longest_input(config: Any) -> int:
    """Tokens that a model of this config was made for, prompt and answer together; `DEFAULT_LENGTH`
    for one that names no bound (relative positions, or none)."""
    for field in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return DEFAULT_LENGTH


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model is to run: on a device, whole or as one rank's part."""

    device: torch.device
    ranks: int = 1
    rank: int = 0

    def put(self, model: Any) -> Any:
        """Move `model` there, in eval mode.

        Raises:
            ConfigError: it cannot be divided between so many ranks.
        """
        model.eval()
        if self.ranks == 1:
            return model.to(self.device)
        return shard(model, self.ranks, self.rank, self.device)


def load_model(
    name_or_path: str,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    ranks: int = 1,
    rank: int = 0,
) -> LoadedModel:
    """Load a preset by name, a folder or a GGUF file by path, or either from the hub.

    With several ranks every one of them calls this, and gets its part of the same model: with the
    weights and the fingerprint of the whole one.

    Args:
        name_or_path: `tiny-full`; `./folder` with config.json, *.safetensors and a tokenizer, or
            with one GGUF file; `./file.gguf`; `owner/name` or `owner/name:file.gguf` (from the
            local hub cache, else online).
        dtype: a key of `DTYPES`, or `auto` for the one the model was saved in (of a GGUF file with
            quantized weights: float32).
        device: where to run it; `cuda` is the process's current device.
        ranks: processes that the model is divided between; `torch.distributed` is initialised.
        rank: of this process.

    Raises:
        ConfigError: unknown name, incomplete folder, unreachable hub, bad dtype or device, an
            architecture that transformers does not know or does not read from GGUF, a model that
            cannot be divided between `ranks`.

    Cost: reads all weights twice. A GGUF file is unpacked to `dtype`, so it takes the memory of the
    unpacked model, and a vocabulary of 262,144 tokens takes a minute to parse. With several ranks,
    each holds the whole model in the machine's memory until it has taken its part.
    """
    wanted, place = _dtype(dtype), _Place(_device(device), ranks, rank)
    if name_or_path in PRESETS:
        return _load_preset(name_or_path, wanted or torch.float32, place)
    source = find_source(name_or_path, MODEL)
    return _load_gguf(source, wanted, place) if source.gguf else _load_folder(source, wanted, place)


def load_tokenizer(name_or_path: str) -> Any:
    """The tokenizer alone, found by the same rules; for a process that runs no model.

    Raises:
        ConfigError: unknown name, incomplete folder, unreachable hub.
    """
    if name_or_path in PRESETS:
        return build_tokenizer()
    source = find_source(name_or_path, TOKENIZER)
    if not source.gguf:
        return _folder_tokenizer(source)
    check_gguf(source)
    return read_gguf_tokenizer(source)


def load_config(name_or_path: str, *, dtype: str = "auto") -> LoadedConfig:
    """The config alone, found by the same rules: reads no weights, and of a hub id only its config.

    Args:
        dtype: as `load_model` takes it; `auto` is float32 for a config that names none.

    Raises:
        ConfigError: unknown name, no config, unreachable hub, bad dtype, unknown architecture.
    """
    wanted = _dtype(dtype)
    if name_or_path in PRESETS:
        return _loaded_config(PRESETS[name_or_path](), name_or_path, wanted)
    from transformers import AutoConfig

    source = find_source(name_or_path, CONFIG)
    if source.gguf:
        wanted = wanted or own_dtype(check_gguf(source))
        return _loaded_config(read_gguf_config(source), source.name, wanted)
    try:
        config = AutoConfig.from_pretrained(source.folder, **source.arguments)
    except READ_ERRORS as error:
        raise _folder_refusal(source, error) from error
    return _loaded_config(config, source.name, wanted)


def _loaded_config(config: Any, name: str, wanted: torch.dtype | None) -> LoadedConfig:
    """Mutates: sets the dtype of the config's text part."""
    text = config.get_text_config()
    text.dtype = wanted or text.dtype or config.dtype or torch.float32
    return LoadedConfig(text, name)


def _load_preset(name: str, dtype: torch.dtype, place: _Place) -> LoadedModel:
    model = build_preset(name).to(dtype)
    model.config.dtype = dtype
    digest = xxhash.xxh3_128(f"{name} {dtype}".encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return _loaded(place.put(model), build_tokenizer(), name, digest.hexdigest())


def _load_folder(source: Source, dtype: torch.dtype | None, place: _Place) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    tokenizer = _folder_tokenizer(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype or "auto", **source.arguments
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise _folder_refusal(source, error) from error
    files = [source.folder / "config.json", *sorted(source.folder.glob("*.safetensors"))]
    fingerprint = _digest(files, f"{model.dtype}")
    return _loaded(place.put(model), tokenizer, source.name, fingerprint)


def _load_gguf(source: Source, dtype: torch.dtype | None, place: _Place) -> LoadedModel:
    metadata = check_gguf(source)
    model = read_gguf_model(source, dtype or own_dtype(metadata))
    tokenizer = read_gguf_tokenizer(source)
    fingerprint = _digest([source.place], f"{model.dtype}")
    more_eos = end_of_turn(metadata)
    return _loaded(place.put(model), tokenizer, source.name, fingerprint, more_eos)


def _folder_tokenizer(source: Source) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.folder, **source.arguments)
    except READ_ERRORS as error:
        raise _folder_refusal(source, error) from error


def _folder_refusal(source: Source, why: Exception) -> ConfigError:
    return ConfigError(
        "model",
        f"{source.folder} could not be loaded: {why}",
        "Use a folder saved by save_pretrained, model and tokenizer, of an architecture that this "
        "transformers knows",
    )


def _loaded(
    model: Any, tokenizer: Any, name: str, fingerprint: str, more_eos: Iterable[int] = ()
) -> LoadedModel:
    eos: set[int] = set(more_eos)
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        eos.update([value] if isinstance(value, int) else value or [])
    config = model.config.get_text_config()
    return LoadedModel(model, tokenizer, config, name, frozenset(eos), fingerprint)


def _digest(files: Iterable[Path], dtype: str) -> str:
    """Digest of the files' bytes and the dtype. Cost: one read of all of them, some 3 GB/s."""
    digest = xxhash.xxh3_128(dtype.encode())
    for path in files:
        digest.update(f"{path.suffix} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _dtype(name: str) -> torch.dtype | None:
    """The torch dtype, or None for the model's own."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError("--dtype", f"{name!r} is unknown", f"Use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("--device", f"{device!r} is no device", "Use cpu or cuda") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "this machine has no CUDA device", "Use cpu")
    return place
