"""What Banyan makes of every causal model type of the installed transformers, by its config alone.

Owns the choice of a config to try. Makes no weights: a spec comes from a skeleton on the meta
device. Prints nothing; `support_table.py` renders the result.
"""

from __future__ import annotations

import contextlib
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from banyan.errors import SpecError
from banyan.spec import CacheSpec

PAGE = 128
"""A multiple of every group of tokens that a known model compresses."""
LIMIT_S = 30
"""Seconds for one config."""

SMALL: dict[str, int] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes for a config whose defaults give no model; those that the config has are taken."""

MISSING: dict[str, int] = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""The same for what some defaults leave open: taken where the config has None."""

_REASON_LEN = 150


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of one model type.

    Args:
        model_type: a key of transformers' table of causal language models.
        text_type: model type of the config's text part, the one that is served.
        components: by reach, its buffers, such as `full: k, v; point: conv`; empty when refused.
        reason: why it was refused, in short; empty when a spec was derived.
    """

    model_type: str
    text_type: str
    components: str
    reason: str


def try_all() -> Iterator[Tried]:
    """Every causal model type, in alphabetical order. Cost: about a minute."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        yield try_one(model_type)


def try_one(model_type: str) -> Tried:
    """The spec of the type's default config, or of one of small sizes where that gives none."""
    found = _tried(model_type, small=False)
    if found.components or "encoder-decoder" in found.reason:
        return found
    small = _tried(model_type, small=True)
    return small if small.components else found


def _tried(model_type: str, small: bool) -> Tried:
    text_type, components, reason = model_type, "", ""
    step = "transformers makes no config"
    try:
        with _limited(LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = _config(model_type, small)
            step = "not refused as it should be"
            components = described(CacheSpec.from_config(config, PAGE, "float32"))
            text_type = str(config.get_text_config().model_type)
    except SpecError as error:
        reason = _short(str(error))
    except TimeoutError:
        reason = f"no answer within {LIMIT_S} s"
    except Exception as error:  # whatever a config class or a model may raise; told by name
        reason = _short(f"{step}: {type(error).__name__}: {error}")
    return Tried(model_type, text_type, components, reason)


def _config(model_type: str, small: bool) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    config = kind()
    if not small:
        return config
    sizes = {name: size for name, size in SMALL.items() if hasattr(config, name)}
    sizes |= {name: n for name, n in MISSING.items() if getattr(config, name, n) is None}
    return kind(**sizes)


def described(spec: CacheSpec) -> str:
    """Reaches and buffers of a spec, without sizes."""
    parts = []
    for component in spec.components:
        if component.buffers:
            names = dict.fromkeys(b.name for b in component.buffers)
            parts.append(f"{type(component.reach).__name__.lower()}: {', '.join(names)}")
    return "; ".join(parts)


def _short(reason: str) -> str:
    """The reason's first sentence, without the name of the model type and what follows from it."""
    reason = re.sub(r"^a trial run of '[^']*' failed, so what it caches is not known: ", "", reason)
    reason = re.sub(r" (of|for) '[^']*'", "", reason, count=1)
    reason = re.sub(r"^'[^']*' is", "it is", reason)
    reason = " ".join(reason.split())
    reason = re.split(r"(?<=[a-z])\. |; use a decoder", reason)[0].rstrip(".")
    return reason if len(reason) <= _REASON_LEN else reason[: _REASON_LEN - 3].rstrip() + "..."


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body when it takes longer; main thread only."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
