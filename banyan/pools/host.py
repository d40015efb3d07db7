"""Host memory of one component, page-first: all bytes of a slot, all layers, in one record.

Owns the record layout (which byte of a record is which layer's) and the host bytes. Knows no tree
and no thread. A slot's bytes and digest belong to whoever owns the slot: the scheduler thread, or
the copy engine between a job's submission and its completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from banyan.spec import Buffer, Component


class RecordEntry(NamedTuple):
    """Where one buffer's bytes lie in a record, in bytes."""

    layer: int
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Buffers of one shape and dtype at evenly spaced places of a record.

    A strip is one strided block on either side, `[buffers, slots, nbytes]` on device and
    `[slots, buffers, nbytes]` on host, so one call copies it, whatever the number of layers.

    Args:
        buffers: in record order, so by layer.
        offset: bytes before the first buffer in the record.
        step: bytes from one buffer to the next.
        nbytes: bytes of each.
    """

    buffers: tuple[Buffer, ...]
    offset: int
    step: int
    nbytes: int

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Half-open range of the strip's buffers that belong to `layer`; empty if none."""
        first = sum(b.layer < layer for b in self.buffers)
        return first, first + sum(b.layer == layer for b in self.buffers)


class RecordLayout:
    """The manifest of a record: every buffer of a component has its place, in layer order.

    Entries are sorted by layer, and within a layer in the component's own order, without gaps:
    a layer's bytes are contiguous, and so is the whole record.

    Args:
        component: whose buffers the record holds.
        page_size: tokens per page; a `Point` record holds one state instead.
    """

    def __init__(self, component: Component, page_size: int) -> None:
        self._buffers = sorted(component.buffers, key=lambda b: b.layer)
        entries: list[RecordEntry] = []
        offset = 0
        for buffer in self._buffers:
            nbytes = buffer.entry_bytes * component.entries(buffer, page_size)
            entries.append(RecordEntry(buffer.layer, buffer.name, offset, nbytes))
            offset += nbytes
        self.entries: tuple[RecordEntry, ...] = tuple(entries)
        self.record_bytes: int = offset
        self.layers: tuple[int, ...] = component.layers

    def layer_span(self, layer: int) -> tuple[int, int] | None:
        """(offset, nbytes) of a layer's bytes in a record; None when it owns none."""
        own = [e for e in self.entries if e.layer == layer]
        return (own[0].offset, sum(e.nbytes for e in own)) if own else None

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """The record as strips, by shape or by name, whichever gives fewer."""
        by_shape = self._grouped(lambda b: (b.shape, b.dtype, b.stride))
        by_name = self._grouped(lambda b: (b.name, b.shape, b.dtype, b.stride))
        return min(by_shape, by_name, key=len)

    def _grouped(self, key: Callable[[Buffer], object]) -> tuple[Strip, ...]:
        """Extend the strip of the same key while the spacing stays even; else begin another."""
        strips: list[Strip] = []
        current: dict[object, int] = {}
        for buffer, entry in zip(self._buffers, self.entries, strict=True):
            at = current.get(key(buffer))
            grown = None if at is None else _extended(strips[at], buffer, entry)
            if at is not None and grown is not None:
                strips[at] = grown
                continue
            current[key(buffer)] = len(strips)
            strips.append(Strip((buffer,), entry.offset, entry.nbytes, entry.nbytes))
        return tuple(strips)


def _extended(strip: Strip, buffer: Buffer, entry: RecordEntry) -> Strip | None:
    """The strip with one buffer more, or None when its spacing would become uneven."""
    count = len(strip.buffers)
    step = entry.offset - strip.offset if count == 1 else strip.step
    if strip.offset + count * step != entry.offset:
        return None
    return Strip((*strip.buffers, buffer), strip.offset, step, strip.nbytes)


class HostPool:
    """One record per slot, contiguous, so that it is one object for storage and one checksum.

    Args:
        component: whose records these are.
        slots: capacity.
        page_size: tokens per page.
        pin: page-lock the memory, for copies from and to a CUDA device.
        memory: uint8[slots * record_bytes] that the ranks of a node share, to be used; default,
            memory of this process alone.

    Attributes:
        data: uint8[slots, record_bytes] on CPU.
        digests: SHA-256 of each slot's record as this rank's device had it, set by a backup under
            verify; else None. Every rank has its own.
    """

    def __init__(
        self,
        component: Component,
        slots: int,
        page_size: int,
        pin: bool,
        memory: Tensor | None = None,
    ) -> None:
        self.component = component
        self.slots = slots
        self.layout = RecordLayout(component, page_size)
        shape = (slots, self.layout.record_bytes)
        if memory is None:
            self.data = torch.zeros(shape, dtype=torch.uint8, pin_memory=pin)
        else:
            self.data = memory.view(shape)
        self.digests: list[bytes | None] = [None] * slots

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.data.nbytes

    @property
    def record_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        return self.layout.record_bytes
