"""What a benchmark must know of a model before it asks: its tokens and its cache spec.

Loads configs and tokenizers, never weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from banyan.bench.work import TextTokens, TokenSource, Vocabulary
from banyan.errors import ConfigError


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model that `banyan serve` would find under that name.

    Raises:
        ConfigError: there is none to be found.
    """
    from banyan.engine import models

    try:
        return models.load_tokenizer(model)
    except ConfigError as error:
        raise ConfigError(
            "--model",
            f"no tokenizer found for {model!r} ({error.problem})",
            "Name what the server serves, or give --vocab-size",
        ) from error


def load_config(model: str) -> Any:
    """The transformers config of a model that `banyan serve` would find under that name.

    Raises:
        ConfigError: there is none to be found.
    """
    from banyan.engine import models

    try:
        return models.load_config(model).config
    except ConfigError as error:
        raise ConfigError(
            "--model", f"no model found under {model!r} ({error.problem})", error.fix
        ) from error


def token_source(model: str, text: Path | None, vocab_size: int | None) -> TokenSource:
    """Where prompts come from: a text file's tokens, else the model's ordinary vocabulary.

    Args:
        vocab_size: draw from `[0, vocab_size)` instead, asking no tokenizer.

    Raises:
        ConfigError: an unreadable text, a vocabulary that is empty, or no tokenizer.
    """
    if text is not None and vocab_size is not None:
        raise ConfigError("--vocab-size", "--text already says which tokens", "Give one of them")
    if vocab_size is not None:
        if vocab_size < 1:
            raise ConfigError("--vocab-size", f"{vocab_size} is below 1", "Use 1 or more")
        return Vocabulary(vocab_size)
    tokenizer = load_tokenizer(model)
    if text is not None:
        return TextTokens(tuple(encode(tokenizer, _read(text))))
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return Vocabulary(len(tokenizer), frozenset(special))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` alone, without the special tokens a tokenizer puts around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--text", f"cannot read {path}: {error}", "Give a text file") from error
