"""What a model's layers cache, as data: components, their reach, and the buffers of each slot.

Owns the vocabulary (`Full`, `Window`, `Point`, `Buffer`, `Component`, `CacheSpec`) and its
derivation from a transformers config. Knows no tensor, no tree and no tier, and imports neither
torch nor transformers. Everything here is immutable and may be used from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from banyan.errors import SpecError

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class Full:
    """To resume at boundary b, every page of [0, b) must be present."""

    page_shaped: bool = True

    def first_needed(self, boundary: int, page_size: int) -> int:
        """Page-aligned position from which data must be present to resume at `boundary`."""
        return 0

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Window:
    """To resume at b, the last `ceil((size - 1) / page_size)` pages before b must be present.

    Args:
        size: the attention window in tokens, the current token included.
    """

    size: int
    page_shaped: bool = True

    def __post_init__(self) -> None:
        if self.size < 2:
            raise SpecError(f"a window of {self.size} tokens keeps nothing; use at least 2")

    def first_needed(self, boundary: int, page_size: int) -> int:
        """Page-aligned position from which data must be present to resume at `boundary`."""
        return max(0, boundary - page_size * math.ceil((self.size - 1) / page_size))

    def __str__(self) -> str:
        return f"window({self.size})"


@dataclass(frozen=True, slots=True)
class Point:
    """To resume at b, one state taken exactly at b must be present."""

    page_shaped: bool = False

    def first_needed(self, boundary: int, page_size: int) -> int:
        """A state covers only its own boundary."""
        return boundary

    def __str__(self) -> str:
        return "point"


Reach: TypeAlias = Full | Window | Point


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor of one layer, addressed by its component's slot ids.

    Args:
        name: what it holds, such as `k`, `v`, `conv`, `recurrent`.
        layer: the model layer it belongs to.
        shape: per token for `Full` and `Window`, per state for `Point`.
        dtype: a key of `DTYPE_BYTES`.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise SpecError(f"buffer {self.name}: unknown dtype {self.dtype!r}; use one of {known}")

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's entry (page-shaped) or of one state."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Component:
    """A reach and the buffers that share its slots: one slot, one set of bytes."""

    name: str
    reach: Reach
    buffers: tuple[Buffer, ...] = ()

    @property
    def entry_bytes(self) -> int:
        """Bytes per token (page-shaped) or per state, all layers."""
        return sum(b.entry_bytes for b in self.buffers)

    def record_bytes(self, page_size: int) -> int:
        """Bytes of one slot, all layers: a page's or a state's record."""
        return self.entry_bytes * (page_size if self.reach.page_shaped else 1)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that own a buffer here, ascending."""
        return tuple(sorted({b.layer for b in self.buffers}))


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All cached data of a model: components, and the page size they share.

    The first component is always `Full` (it may have no buffers, for a model with no full
    attention: the tree then only indexes); `Window` and `Point` components follow.

    Raises:
        SpecError: no component, first one not `Full`, more than one `Full`, repeated names, or a
            page size below 1.
    """

    components: tuple[Component, ...]
    page_size: int = 16

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise SpecError(f"page size {self.page_size} is below 1; use 1 or more tokens")
        if not self.components or not isinstance(self.components[0].reach, Full):
            raise SpecError("the first component must be Full (give it no buffers if none exist)")
        if sum(isinstance(c.reach, Full) for c in self.components) > 1:
            raise SpecError("several Full components: make their buffers buffers of one component")
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            raise SpecError(f"component names repeat: {names}")
        owners = [(b.layer, b.name) for c in self.components for b in c.buffers]
        if len(set(owners)) != len(owners):
            raise SpecError("two buffers share one (layer, name)")

    @property
    def num_layers(self) -> int:
        """One more than the highest layer that caches anything."""
        return 1 + max((b.layer for c in self.components for b in c.buffers), default=-1)

    def layer_components(self, layer: int) -> tuple[int, ...]:
        """Indices of the components that own a buffer of `layer`, ascending."""
        return tuple(i for i, c in enumerate(self.components) if layer in c.layers)

    @staticmethod
    def from_config(config: Any, page_size: int = 16, dtype: str | None = None) -> CacheSpec:
        """Derive the spec from a transformers config, by its layer types alone.

        Args:
            config: a `transformers` text config (or one that has a text part).
            page_size: tokens per page.
            dtype: dtype of the model's activations; default, the config's own, else float32.

        Raises:
            SpecError: a layer type or shape that no component can hold, with what and why.
        """
        return _from_config(config, page_size, dtype)


# ---- derivation from a transformers config -------------------------------------------------------

LayerKind: TypeAlias = Literal["full", "window", "state", "none"]

_KIND_OF_TYPE: dict[str, tuple[LayerKind, ...]] = {
    "full_attention": ("full",),
    "sliding_attention": ("window",),
    "linear_attention": ("state",),
    "moe": ("none",),
    "mlp": ("none",),
}


def _from_config(config: Any, page_size: int, dtype: str | None) -> CacheSpec:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _refuse_unsupported(text)
    dtype = dtype or str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    full: list[Buffer] = []
    windows: dict[int, list[Buffer]] = {}
    states: list[Buffer] = []
    for layer, layer_type in enumerate(_layer_types(text)):
        if layer_type not in _KIND_OF_TYPE:
            known = ", ".join(_KIND_OF_TYPE)
            raise SpecError(
                f"layer {layer} of {_model_type(text)!r} has type {layer_type!r}, which no "
                f"component holds yet; supported layer types: {known}"
            )
        for kind in _KIND_OF_TYPE[layer_type]:
            if kind == "full":
                full.extend(_attention_buffers(text, layer, dtype))
            elif kind == "window":
                size = _required(text, "sliding_window", f"sliding layer {layer}")
                windows.setdefault(size, []).extend(_attention_buffers(text, layer, dtype))
            elif kind == "state":
                states.extend(_gated_delta_buffers(text, layer, dtype))
    components = [Component("full", Full(), tuple(full))]
    for size, buffers in sorted(windows.items()):
        name = "window" if len(windows) == 1 else f"window{size}"
        components.append(Component(name, Window(size), tuple(buffers)))
    if states:
        components.append(Component("state", Point(), tuple(states)))
    return CacheSpec(tuple(components), page_size)


def _layer_types(text: Any) -> Iterable[str]:
    """The config's layer types; where it names none, those its own fields imply."""
    types = getattr(text, "layer_types", None)
    if types is not None:
        return [str(t) for t in types]
    sliding = getattr(text, "sliding_window", None) is not None
    count = int(_required(text, "num_hidden_layers", "the model"))
    return ["sliding_attention" if sliding else "full_attention"] * count


def _refuse_unsupported(text: Any) -> None:
    """Raise for fields that change what is cached in ways no component describes yet."""
    refused = {
        "kv_lora_rank": "latent attention (MLA)",
        "index_topk": "indexed sparse attention",
        "kv_sharing_modes": "layers that share another layer's KV",
        "num_kv_shared_layers": "layers that share another layer's KV",
        "attention_chunk_size": "chunked attention",
        "compress_ratios": "compressed attention",
        "is_encoder_decoder": "an encoder-decoder model",
    }
    for field, what in refused.items():
        if getattr(text, field, None):
            raise SpecError(
                f"{_model_type(text)!r} uses {what} ({field}={getattr(text, field)!r}), "
                "which no component holds yet"
            )


def _attention_buffers(text: Any, layer: int, dtype: str) -> tuple[Buffer, Buffer]:
    heads = int(_required(text, "num_attention_heads", f"attention layer {layer}"))
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    hidden = int(_required(text, "hidden_size", f"attention layer {layer}"))
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    shape = (kv_heads, head_dim)
    return Buffer("k", layer, shape, dtype), Buffer("v", layer, shape, dtype)


def _gated_delta_buffers(text: Any, layer: int, dtype: str) -> tuple[Buffer, Buffer]:
    """Conv and recurrent state of a gated delta net layer (the latter is kept in float32)."""
    where = f"linear-attention layer {layer}"
    key_heads, value_heads, key_dim, value_dim, kernel = (
        int(_required(text, f"linear_{field}", where))
        for field in (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_dim",
        )
    )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (
        Buffer("conv", layer, (channels, kernel), dtype),
        Buffer("recurrent", layer, (value_heads, key_dim, value_dim), "float32"),
    )


def _required(text: Any, field: str, where: str) -> Any:
    value = getattr(text, field, None)
    if value is None:
        raise SpecError(f"{_model_type(text)!r}: {where} needs the config field {field!r}")
    return value


def _model_type(text: Any) -> str:
    return str(getattr(text, "model_type", type(text).__name__))
