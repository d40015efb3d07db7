"""Finds and loads a model: a built-in preset, a local folder, or a hub id.

Owns the rules by which a name is understood and what a refusal says. Knows no cache and no
request. Called once, at start; the result is read-only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash
from safetensors import SafetensorError

from banyan.engine.presets import PRESETS, build_preset, build_tokenizer
from banyan.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_S = 10.0
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HASH_CHUNK_BYTES = 1 << 22


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
        return int(self.config.max_position_embeddings)

    @property
    def dtype(self) -> str:
        """Of the activations, and so of cached keys and values: `float32`, `bfloat16`, ..."""
        return str(self.model.dtype).removeprefix("torch.")


def load_model(
    name_or_path: str, *, dtype: str = "float32", device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a preset by name, a folder by path, or a hub id (from the local hub cache, else online).

    Args:
        name_or_path: `tiny-full`, `./folder` with config.json, *.safetensors and a tokenizer, or
            `owner/name`.
        dtype: a key of `DTYPES`, or `auto` for the one the model was saved in.
        device: where to run it.

    Raises:
        ConfigError: unknown name, incomplete folder, unreachable hub, bad dtype or device.
    """
    wanted, place = _dtype(dtype), _device(device)
    if name_or_path in PRESETS:
        return _load_preset(name_or_path, wanted or torch.float32, place)
    folder, name = _find_folder(name_or_path)
    return _load_folder(folder, name, wanted, place)


def load_tokenizer(name_or_path: str) -> Any:
    """The tokenizer alone, found by the same rules; for a process that runs no model.

    Raises:
        ConfigError: unknown name, incomplete folder, unreachable hub.
    """
    if name_or_path in PRESETS:
        return build_tokenizer()
    from transformers import AutoTokenizer

    folder, _ = _find_folder(name_or_path)
    _require_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model",
            f"the tokenizer of {folder} could not be loaded: {error}",
            "Use a folder saved by save_pretrained, model and tokenizer",
        ) from error


def _load_preset(name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    model = build_preset(name).to(dtype)
    model.config.dtype = dtype
    digest = xxhash.xxh3_128(f"{name} {dtype}".encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return _loaded(model.to(device), build_tokenizer(), name, digest.hexdigest())


def _load_folder(
    folder: Path, name: str, dtype: torch.dtype | None, device: torch.device
) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _require_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            "model",
            f"{folder} could not be loaded: {error}",
            "Use a folder saved by save_pretrained, of an architecture this transformers knows",
        ) from error
    fingerprint = _folder_digest(folder, f"{model.dtype}")
    return _loaded(model.eval().to(device), tokenizer, name, fingerprint)


def _loaded(model: Any, tokenizer: Any, name: str, fingerprint: str) -> LoadedModel:
    eos: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        eos.update([value] if isinstance(value, int) else value or [])
    config = model.config.get_text_config()
    return LoadedModel(model, tokenizer, config, name, frozenset(eos), fingerprint)


def _find_folder(name_or_path: str) -> tuple[Path, str]:
    """The folder that a path or hub id names, and what to call the model."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if _HUB_ID.fullmatch(name_or_path):
        return _hub_folder(name_or_path), name_or_path
    _unknown(name_or_path, "there is no preset and no folder of that name")


def _hub_folder(repo: str) -> Path:
    """The hub's snapshot of `repo`; without a network, the one in the local hub cache."""
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(
            repo, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S
        )
    except OSError as error:
        why = str(error).splitlines()[0]
        _unknown(repo, f"there is no folder of that name, and the hub did not give it ({why})")
    return Path(folder)


def _unknown(name: str, why: str) -> NoReturn:
    raise ConfigError(
        "model",
        f"cannot find {name!r}: {why}",
        f"Use a preset ({', '.join(PRESETS)}), a folder with config.json, *.safetensors and a "
        "tokenizer, or a hub id (owner/name) that this machine can reach",
    )


def _require_files(folder: Path) -> None:
    missing = [
        pattern
        for pattern in ("config.json", "*.safetensors", "tokenizer*")
        if not any(folder.glob(pattern))
    ]
    if missing:
        raise ConfigError(
            "model",
            f"{folder} has no {', no '.join(missing)}",
            "Use a folder saved by save_pretrained, model and tokenizer",
        )


def _folder_digest(folder: Path, dtype: str) -> str:
    """Digest of the config and the weights. Cost: one read of all weights, some 3 GB/s."""
    digest = xxhash.xxh3_128(dtype.encode())
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
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
