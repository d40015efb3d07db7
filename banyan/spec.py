"""What a model's layers cache, as data: components, their reach, and the buffers of each slot.

Owns the vocabulary (`Full`, `Window`, `Point`, `Buffer`, `Component`, `CacheSpec`) and its
derivation from a transformers config. Knows no tensor, no tree and no tier, and imports neither
torch nor transformers. Everything here is immutable and may be used from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from banyan.errors import SpecError
from banyan.observe import LayerData, observe_config

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
        shape: per entry for `Full` and `Window`, per state for `Point`.
        dtype: a key of `DTYPE_BYTES`.
        stride: tokens per entry of a `Full` component: 1, or more where a layer keeps one
            compressed entry for each `stride` tokens. Pages are whole multiples of it.
        replicated: every tensor-parallel rank holds equal bytes here (MLA latents, indexer keys,
            states that the model's plan does not divide), not a shard of its own.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    stride: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise SpecError(f"buffer {self.name}: a stride of {self.stride} tokens; use 1 or more")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise SpecError(f"buffer {self.name}: unknown dtype {self.dtype!r}; use one of {known}")

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: of a token, of `stride` tokens, or of a state."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Component:
    """A reach and the buffers that share its slots: one slot, one set of bytes."""

    name: str
    reach: Reach
    buffers: tuple[Buffer, ...] = ()

    @property
    def entry_bytes(self) -> float:
        """Bytes per token (page-shaped; a fraction where strides do not divide them) or per state,
        all layers."""
        exact = math.fsum(b.entry_bytes / b.stride for b in self.buffers)
        return int(exact) if exact.is_integer() else exact

    def record_bytes(self, page_size: int) -> int:
        """Bytes of one slot, all layers: a page's or a state's record."""
        return sum(b.entry_bytes * self.entries(b, page_size) for b in self.buffers)

    def only(self, *, replicated: bool) -> Component:
        """The same slots with some of the buffers: those equal on all ranks, or the others."""
        return replace(self, buffers=tuple(b for b in self.buffers if b.replicated is replicated))

    def entries(self, buffer: Buffer, page_size: int) -> int:
        """Entries of `buffer` in one slot."""
        return page_size // buffer.stride if self.reach.page_shaped else 1

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
        for component in self.components:
            for b in component.buffers:
                if b.stride > 1 and not isinstance(component.reach, Full):
                    raise SpecError(f"buffer {b.name}: only a Full component may have a stride")
                if self.page_size % b.stride:
                    raise SpecError(
                        f"page size {self.page_size} is no multiple of {b.stride}, the tokens that "
                        f"layer {b.layer} keeps in one entry of {b.name!r}; use a page size of "
                        f"{math.lcm(*(x.stride for x in component.buffers))} or a multiple"
                    )

    @property
    def num_layers(self) -> int:
        """One more than the highest layer that caches anything."""
        return 1 + max((b.layer for c in self.components for b in c.buffers), default=-1)

    def layer_components(self, layer: int) -> tuple[int, ...]:
        """Indices of the components that own a buffer of `layer`, ascending."""
        return tuple(i for i, c in enumerate(self.components) if layer in c.layers)

    @staticmethod
    def from_config(config: Any, page_size: int = 16, dtype: str | None = None) -> CacheSpec:
        """Derive the spec from a transformers config, by what a model of it would cache.

        Args:
            config: a `transformers` text config (or one that has a text part).
            page_size: tokens per page.
            dtype: dtype of the model's activations; default, the config's own, else float32.

        Raises:
            SpecError: a layer that no component can hold, with what and why.

        Cost: a trial run of a skeleton without weights, see `observe_config`.
        """
        return _from_config(config, page_size, dtype)

    @staticmethod
    def from_layers(layers: Sequence[LayerData], page_size: int = 16) -> CacheSpec:
        """The spec of a model whose layers keep `layers`, as `observe_model` reports them.

        Raises:
            SpecError: nothing is cached at all, or the page size does not fit a stride.
        """
        if not any(layer.held for layer in layers):
            raise SpecError("no layer of this model caches anything")
        return CacheSpec(tuple(_components_of(layers)), page_size)


# ---- derivation from a transformers config -------------------------------------------------------


def _from_config(config: Any, page_size: int, dtype: str | None) -> CacheSpec:
    if getattr(config, "is_encoder_decoder", False):
        raise SpecError(
            f"{_model_type(config)!r} is an encoder-decoder model, whose prompt is not a prefix of "
            "its answer; use a decoder-only model"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    dtype = dtype or str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
    return CacheSpec.from_layers(observe_config(text, dtype), page_size)


def _components_of(layers: Sequence[LayerData]) -> Iterator[Component]:
    """One `Full`, one `Window` for each size, one `Point`, of those that hold anything."""
    full: list[Buffer] = []
    windows: dict[int, list[Buffer]] = {}
    states: list[Buffer] = []
    for index, layer in enumerate(layers):
        for held in layer.held:
            buffer = Buffer(held.name, index, held.shape, held.dtype, held.stride)
            if not held.per_token:
                states.append(buffer)
            elif layer.window is None or held.stride > 1:
                full.append(buffer)
            else:
                windows.setdefault(layer.window, []).append(buffer)
    yield Component("full", Full(), tuple(full))
    for size, buffers in sorted(windows.items()):
        name = "window" if len(windows) == 1 else f"window{size}"
        yield Component(name, Window(size), tuple(buffers))
    if states:
        yield Component("state", Point(), tuple(states))


def _model_type(text: Any) -> str:
    return str(getattr(text, "model_type", type(text).__name__))
