"""What the oracle model caches: a hand-written spec for every mix of reaches.

Owns the presets' names. A page's entry is 8 or 4 bytes a token and buffer, a state a few hundred:
small, because the oracle is there to prove placement, and every one of these bytes is compared.
"""

from __future__ import annotations

from banyan.errors import ConfigError
from banyan.options import suggestion
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

PRESETS = ("full", "full+window", "full+state", "full+window+state", "full+indexer")

WINDOW = 128
"""Tokens of the presets' window, the current one included."""


def oracle_spec(preset: str, page_size: int, window: int = WINDOW) -> CacheSpec:
    """The spec of a preset.

    Raises:
        ConfigError: an unknown preset.
    """
    if preset not in PRESETS:
        fix = suggestion(preset, PRESETS)
        raise ConfigError("--preset", f"unknown preset {preset!r}", fix)
    full = _keys_and_values(0)
    if preset in ("full", "full+indexer"):
        full += _keys_and_values(1)
    if preset == "full+indexer":
        full += tuple(Buffer("index", layer, (1,), "int32", replicated=True) for layer in (0, 1))
    parts = [Component("full", Full(), full)]
    if "window" in preset:
        parts.append(Component("window", Window(window), _keys_and_values(1)))
    if "state" in preset:
        layer = len(parts)
        states = (
            Buffer("conv", layer, (24,), "int32"),
            Buffer("recurrent", layer, (4, 16), "int32"),
        )
        parts.append(Component("state", Point(), states))
    return CacheSpec(tuple(parts), page_size)


def _keys_and_values(layer: int) -> tuple[Buffer, ...]:
    return Buffer("k", layer, (2,), "int32"), Buffer("v", layer, (1,), "int32")
