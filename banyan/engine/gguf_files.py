"""Models in one GGUF file, read by transformers' own GGUF support.

Owns what that support leaves to the caller: the packages it needs, the number format to load in,
and the refusal of files that it would read wrongly without a word. Knows no cache. Called at start.
"""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from banyan.engine.sources import Source
from banyan.errors import ConfigError

PACKAGES = ("gguf", "accelerate")
"""What transformers imports to read a GGUF file; each is named as pip names it."""

_DTYPE_OF_FILE_TYPE = {1: torch.float16, 32: torch.bfloat16}
"""By `general.file_type`; all other types are float32, or blocks that are unpacked to it."""

READ_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
)
"""What transformers raises on files that are damaged, or lack a key that it expects."""

_SCALED_BY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def check_gguf(source: Source) -> dict[str, Any]:
    """Refuse what cannot be read, or would be read wrongly; return the file's metadata.

    Transformers ignores rotary scaling in GGUF files: such a model would load and answer, wrongly.

    Returns:
        by GGUF key; lists of strings are given as their length only.

    Raises:
        ConfigError: a package is missing, it is no GGUF file, or its positions are scaled.

    Cost: milliseconds; no tensor is read.
    """
    _require_packages()
    path = source.place
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    scaled = [name for name in _SCALED_BY_TENSORS if name in tensors]
    key = f"{metadata['general.architecture']}.rope.scaling.type"
    if metadata.get(key, "none") != "none":
        scaled.append(f"{key} = {metadata[key]}")
    if scaled:
        raise ConfigError(
            "model",
            f"{path} scales its positions ({', '.join(scaled)}), which transformers does not read "
            "from a GGUF file: the answers would be wrong",
            "Use the model's safetensors",
        )
    return dict(metadata)


def own_dtype(metadata: dict[str, Any]) -> torch.dtype:
    """The number format that the file was written in: float16, bfloat16, else float32.

    Args:
        metadata: of `check_gguf`.
    """
    return _DTYPE_OF_FILE_TYPE.get(metadata.get("general.file_type", 0), torch.float32)


def end_of_turn(metadata: dict[str, Any]) -> frozenset[int]:
    """The token that ends an answer in a chat, where the file names one beside the end of text."""
    token = metadata.get("tokenizer.ggml.eot_token_id")
    return frozenset() if token is None else frozenset((int(token),))


def read_gguf_model(source: Source, dtype: torch.dtype) -> Any:
    """The model of a GGUF file in ordinary modules, every block unpacked to `dtype`, on CPU.

    Raises:
        ConfigError: an architecture that transformers does not read from GGUF, a file that lacks
            some of its weights, or a damaged one.

    Cost: reads the file and unpacks it: several times its size in memory.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **source.arguments,
        )
    except READ_ERRORS as error:
        raise _unreadable(source.place, error) from error
    if missing := sorted(report["missing_keys"]):
        raise _unreadable(source.place, f"it has no {missing[0]} ({len(missing)} such in all)")
    return model


def read_gguf_config(source: Source) -> Any:
    """The config that a GGUF file's metadata make; of an architecture that transformers reads.

    Raises:
        ConfigError: another architecture, or a damaged file.

    Cost: parses the vocabulary: 4 s for 49,152 tokens.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.folder, **source.arguments)
    except READ_ERRORS as error:
        raise _unreadable(source.place, error) from error


def read_gguf_tokenizer(source: Source) -> Any:
    """The tokenizer and the chat template of a GGUF file, whatever lies beside it in its folder.

    Raises:
        ConfigError: a kind of tokenizer that transformers does not read from GGUF, or a damaged
            file.

    Cost: parses the vocabulary, and derives merges that the file does not list.
    """
    from transformers import AutoTokenizer

    # Transformers prefers a tokenizer.json in the same folder; in one of its own there is none.
    with TemporaryDirectory() as alone:
        try:
            Path(alone, source.place.name).symlink_to(source.place.resolve())
            return AutoTokenizer.from_pretrained(alone, **source.arguments)
        except READ_ERRORS as error:
            raise _unreadable(source.place, error) from error


def _unreadable(path: Path, why: object) -> ConfigError:
    """The refusal of a file that transformers could not read."""
    why = repr(why) if isinstance(why, LookupError) else why
    return ConfigError(
        "model",
        f"{path} could not be loaded: {why}",
        "Use a GGUF file of an architecture that this transformers reads, or the model's "
        "safetensors",
    )


def _require_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "model",
            f"a GGUF file needs the package {' and '.join(missing)}, which banyan-cache requires "
            "but which is not installed",
            f"Run pip install {' '.join(missing)}",
        )
