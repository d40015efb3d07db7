"""How records cross the bus between a CUDA device and pinned host memory.

Owns the staging buffers of one copy. Knows no event, no queue and no tree; called with the copy
stream current. It enqueues and waits for nothing.

Device pools are layer-first and host records page-first, so one side is strided, and torch has no
asynchronous strided copy between host and device. Therefore records are built in a small staging
buffer on the device, where strides cost little, and cross the bus in contiguous pieces of pinned
memory. A backup moves whole records. A load-back moves groups of layers, large enough for the bus
(`PIECE_BYTES`) and small enough that the first layers arrive early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool, RecordLayout
from banyan.tiers.moves import Pairing
from banyan.tiers.ops import Slots

PIECE_BYTES = 1 << 20
"""A load-back's contiguous pieces are at least this long, unless the whole record is shorter."""

_STAGING_BYTES = 64 << 20
"""Bytes staged at a time, in device memory beside the pools; a gather holds as many again."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers of a component whose bytes cross the bus together.

    Args:
        layers: ascending.
        offset, nbytes: their contiguous place in a record.
    """

    layers: tuple[int, ...]
    offset: int
    nbytes: int


def layer_groups(layout: RecordLayout, piece_bytes: int) -> tuple[LayerGroup, ...]:
    """Cut a record at layer boundaries into pieces of at least `piece_bytes`, but the last."""
    groups: list[LayerGroup] = []
    layers: list[int] = []
    start = stop = 0
    for layer in layout.layers:
        span = layout.layer_span(layer)
        stop += span[1] if span else 0
        layers.append(layer)
        if stop - start >= piece_bytes or layer == layout.layers[-1]:
            groups.append(LayerGroup(tuple(layers), start, stop - start))
            layers, start = [], stop
    return tuple(groups)


def chunks(src: Slots, dst: Slots, nbytes: int) -> Iterator[tuple[Slots, Slots]]:
    """Pairs of slots, as many at a time as the staging buffer holds."""
    if nbytes == 0:
        return
    step = max(1, _STAGING_BYTES // nbytes)
    for start in range(0, len(src), step):
        yield src[start : start + step], dst[start : start + step]


def _index(slots: Slots, device: torch.device) -> Tensor:
    """int64[n] on `device`, without waiting for the stream: it travels from pinned memory."""
    index = torch.from_numpy(slots.astype(np.int64))
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _word(layout: RecordLayout) -> int:
    """Bytes of the widest integer that divides every entry: indexing moves one per GPU thread."""
    common = math.gcd(*(entry.nbytes for entry in layout.entries))
    return next(size for size in _WORDS if common % size == 0)


def backup_records(device: DevicePool, host: HostPool, src: Slots, dst: Slots) -> None:
    """Enqueue a gather of whole records into staging, then one copy per run of host slots.

    Args:
        src: int32[n] device slots. dst: int32[n] host slots.
    """
    staging = torch.empty((len(src), host.record_bytes), dtype=torch.uint8, device=device.device)
    index = _index(src, device.device)
    word = _word(device.layout)
    words = staging.view(_WORDS[word])
    for strip, stack in zip(device.layout.strips, device.stacks, strict=True):
        if strip.nbytes == 0:
            continue
        place = words.as_strided(
            (len(strip.buffers), len(src), strip.nbytes // word),
            (strip.step // word, host.record_bytes // word, 1),
            strip.offset // word,
        )
        place.copy_(stack.view(_WORDS[word]).index_select(1, index))
    order = np.arange(len(dst), dtype=np.int32)
    for first, to, length in Pairing.of(order, dst).runs:
        host.data[to : to + length].copy_(staging[first : first + length], non_blocking=True)


def load_group(
    device: DevicePool, host: HostPool, group: LayerGroup, src: Slots, dst: Slots
) -> None:
    """Enqueue a copy of a group's bytes of each record into staging, then a scatter to its layers.

    Args:
        src: int32[n] host slots. dst: int32[n] device slots.
    """
    staging = torch.empty((len(src), group.nbytes), dtype=torch.uint8, device=device.device)
    _fetch(host, group, src, staging)
    index = _index(dst, device.device)
    word = _word(device.layout)
    words = staging.view(_WORDS[word])
    for strip, stack in zip(device.layout.strips, device.stacks, strict=True):
        start, stop = strip.layer_range(group.layers[0])[0], strip.layer_range(group.layers[-1])[1]
        if start == stop or strip.nbytes == 0:
            continue
        values = words.as_strided(
            (stop - start, len(src), strip.nbytes // word),
            (strip.step // word, group.nbytes // word, 1),
            (strip.offset + start * strip.step - group.offset) // word,
        )
        stack[start:stop].view(_WORDS[word]).index_copy_(1, index, values)


def _fetch(host: HostPool, group: LayerGroup, src: Slots, staging: Tensor) -> None:
    """One copy per run of host slots where the group is the whole record, else one per slot."""
    order = np.arange(len(src), dtype=np.int32)
    for first, to, length in Pairing.of(src, order).runs:
        if group.nbytes == host.record_bytes:
            staging[to : to + length].copy_(host.data[first : first + length], non_blocking=True)
            continue
        for at in range(length):
            piece = host.data[first + at, group.offset : group.offset + group.nbytes]
            staging[to + at].copy_(piece, non_blocking=True)
