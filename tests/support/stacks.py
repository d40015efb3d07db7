"""Specs and pool stacks for tests of pools and copies, and bytes to fill them with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.plan import PoolSize, SizePlan
from banyan.spec import DTYPE_BYTES, Buffer, CacheSpec, Component, Full, Point, Window

Slots = npt.NDArray[np.int32]


def slots(*ids: int) -> Slots:
    """int32[n] of the given ids."""
    return np.array(ids, np.int32)


def kv(layers: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> tuple[Buffer, ...]:
    """K and V buffers of some layers."""
    return tuple(Buffer(name, layer, shape, dtype) for layer in layers for name in "kv")


def hybrid_spec(page_size: int = 4, dtype: str = "float32") -> CacheSpec:
    """Full, window and state layers of odd shapes; the states have two dtypes and three buffers."""
    state = tuple(
        Buffer(name, layer, shape, kind)
        for layer in (1, 4)
        for name, shape, kind in (
            ("conv", (5, 3), dtype),
            ("recurrent", (2, 3, 5), "float32"),
            ("extra", (7,), "uint8"),
        )
    )
    return CacheSpec(
        (
            Component("full", Full(), kv((0, 3), (2, 3), dtype)),
            Component("window", Window(9), kv((2, 5, 6), (1, 5), dtype)),
            Component("state", Point(), state),
        ),
        page_size,
    )


def indexed_spec(page_size: int = 4) -> CacheSpec:
    """Full attention whose slots also carry an index key and a draft model's KV: unequal shapes."""
    layers = (0, 1, 2)
    main = kv(layers, (2, 4), "bfloat16")
    index = tuple(Buffer("index", layer, (6,), "uint8") for layer in layers)
    draft = kv((7,), (1, 3), "float16")
    return CacheSpec((Component("full", Full(), main + index + draft),), page_size)


def every_dtype_spec(page_size: int = 3) -> CacheSpec:
    """One buffer of every dtype that a spec can name."""
    buffers = tuple(Buffer(name, 0, (3,), name) for name in DTYPE_BYTES)
    return CacheSpec((Component("full", Full(), buffers),), page_size)


def byteless_spec(page_size: int = 4) -> CacheSpec:
    """A model without full attention: the first component only indexes."""
    state = (Buffer("recurrent", 0, (3, 3), "float32"),)
    return CacheSpec((Component("full", Full()), Component("state", Point(), state)), page_size)


def plan_of(spec: CacheSpec, device: int, host: int) -> SizePlan:
    """A plan with equally many slots for every component; `host` 0 means no host tier."""

    def sizes(count: int) -> tuple[PoolSize, ...]:
        return tuple(
            PoolSize(c.name, count, c.record_bytes(spec.page_size)) for c in spec.components
        )

    reaches = tuple(c.reach for c in spec.components)
    name = spec.components[0].name
    return SizePlan(sizes(device), sizes(host) if host else (), reaches, spec.page_size, name)


def stack_of(spec: CacheSpec, device: int = 12, host: int = 16) -> PoolStack:
    """A CPU stack with equally many slots for every component."""
    return assemble(spec, plan_of(spec, device, host))


def fill_device(stack: PoolStack, seed: int = 0) -> list[npt.NDArray[np.uint8]]:
    """Write random bytes to every device slot; returns uint8[slots, record_bytes] by component."""
    rng = np.random.default_rng(seed)
    written = []
    for pool in stack.device:
        records = rng.integers(0, 256, (pool.slots, pool.record_bytes), dtype=np.uint8)
        pool.write_records(np.arange(pool.slots, dtype=np.int32), records)
        written.append(records)
    return written


def device_records(stack: PoolStack) -> list[npt.NDArray[np.uint8]]:
    """All device bytes, uint8[slots, record_bytes] by component."""
    return [p.read_records(np.arange(p.slots, dtype=np.int32)) for p in stack.device]
