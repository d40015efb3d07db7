"""Banyan: one radix tree and two tiers for everything a hybrid language model caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window

if TYPE_CHECKING:
    from banyan.cache import PrefixCache

__version__ = "0.1.0"
__all__ = [
    "Buffer",
    "CacheSpec",
    "Component",
    "Full",
    "Point",
    "PrefixCache",
    "Window",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import `PrefixCache` (and with it torch) only when it is asked for."""
    if name == "PrefixCache":
        from banyan.cache import PrefixCache

        return PrefixCache
    raise AttributeError(f"module 'banyan' has no attribute {name!r}")
