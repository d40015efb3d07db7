"""What a model would keep in a cache, and how much of it fits: `banyan inspect`, as plain records.

Owns the records that the terminal and `--json` show. Reads a model's config, never its weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from banyan.engine.models import load_config
from banyan.spec import CacheSpec, Component

GIB = 1 << 30
PROMPT_TOKENS = 4096
"""Length of the prompts that `Capacity.prompts` counts."""


@dataclass(frozen=True, slots=True)
class BufferRow:
    """Buffers of a component that are alike but for their layer.

    Args:
        shape: of one entry: of `stride` tokens, or of a state.
        layers: how many layers have one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: int
    layers: int


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """A component and what it costs.

    Args:
        layers: how many layers own a buffer of it.
        token_bytes: all layers; None for states. A fraction where entries hold several tokens.
        state_bytes: all layers; None for page-shaped components.
        record_bytes: of one page, or of one state.
        gib_tokens: tokens of whole pages that fit in one GiB; None for states and without bytes.
        gib_states: states that fit in one GiB; None for page-shaped components.
    """

    name: str
    reach: str
    layers: int
    buffers: tuple[BufferRow, ...]
    token_bytes: float | None
    state_bytes: int | None
    record_bytes: int
    gib_tokens: int | None
    gib_states: int | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one GiB holds of the whole model, where all components share it.

    Args:
        longest_prompt: tokens of a single prompt that is kept with the checkpoint at its end;
            None when a longer one costs no more.
        prompt_tokens, prompt_bytes: length of an ordinary prompt, and what it takes with the
            checkpoint at its end.
        prompts: so many of them fit.
    """

    longest_prompt: int | None
    prompt_tokens: int
    prompt_bytes: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model as its cache sees it.

    Args:
        family: the config's `model_type`.
        layers: of the model, those that cache nothing included.
        page_bytes: of one page of all page-shaped components together.
    """

    model: str
    family: str
    layers: int
    dtype: str
    page_size: int
    components: tuple[ComponentRow, ...]
    page_bytes: int
    one_gib: Capacity


def inspect_model(name_or_path: str, *, page_size: int = 16, dtype: str = "auto") -> Inspection:
    """What the model of that name would keep in a cache.

    Args:
        name_or_path, dtype: as `load_config` takes them.

    Raises:
        ConfigError: there is no such model, or a bad dtype.
        SpecError: a model that no `CacheSpec` can represent, or a page size that does not fit it.
    """
    with _quiet():
        loaded = load_config(name_or_path, dtype=dtype)
        spec = CacheSpec.from_config(loaded.config, page_size, loaded.dtype)
    return Inspection(
        model=loaded.name,
        family=str(loaded.config.model_type),
        layers=int(loaded.config.num_hidden_layers),
        dtype=loaded.dtype,
        page_size=page_size,
        components=component_rows(spec),
        page_bytes=sum(c.record_bytes(page_size) for c in spec.components if c.reach.page_shaped),
        one_gib=whole_model(spec),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on missing fast kernels: no model is going to run."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def component_rows(spec: CacheSpec) -> tuple[ComponentRow, ...]:
    """A row per component, in the spec's order."""
    return tuple(_component_row(part, spec.page_size) for part in spec.components)


def _component_row(part: Component, page_size: int) -> ComponentRow:
    paged, record = part.reach.page_shaped, part.record_bytes(page_size)
    fits = GIB // record if record else None
    return ComponentRow(
        name=part.name,
        reach=str(part.reach),
        layers=len(part.layers),
        buffers=_buffer_rows(part),
        token_bytes=part.entry_bytes if paged else None,
        state_bytes=None if paged else record,
        record_bytes=record,
        gib_tokens=fits * page_size if paged and fits is not None else None,
        gib_states=None if paged else fits,
    )


def _buffer_rows(part: Component) -> tuple[BufferRow, ...]:
    alike = Counter((b.name, b.shape, b.dtype, b.stride) for b in part.buffers)
    return tuple(BufferRow(*kind, layers=layers) for kind, layers in alike.items())


def prefix_bytes(spec: CacheSpec, pages: int) -> int:
    """Bytes of a cached prompt of `pages` pages that can be resumed at its end: what each component
    needs there, and one state."""
    boundary = pages * spec.page_size
    total = 0
    for part in spec.components:
        needed = boundary - part.reach.first_needed(boundary, spec.page_size)
        records = needed // spec.page_size if part.reach.page_shaped else 1
        total += records * part.record_bytes(spec.page_size)
    return total


def whole_model(spec: CacheSpec) -> Capacity:
    """What one GiB holds where all components share it."""
    page = spec.page_size
    prompt_bytes = prefix_bytes(spec, -(-PROMPT_TOKENS // page))
    longest = None
    if every_page := spec.components[0].record_bytes(page):
        pages = range(GIB // every_page + 1)
        fitting = bisect_right(pages, GIB, key=lambda n: prefix_bytes(spec, n))
        longest = max(0, fitting - 1) * page
    return Capacity(longest, PROMPT_TOKENS, prompt_bytes, GIB // prompt_bytes)
