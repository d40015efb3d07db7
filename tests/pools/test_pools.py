"""Device and host pools: shapes, exact bytes, the record layout, and the generic assembler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from banyan.errors import PoolError
from banyan.pools.assembler import assemble
from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool, RecordLayout
from banyan.pools.plan import SizePlan
from banyan.spec import Buffer, CacheSpec, Component, Full
from tests.support.stacks import (
    byteless_spec,
    every_dtype_spec,
    fill_device,
    hybrid_spec,
    indexed_spec,
    plan_of,
    slots,
    stack_of,
)

SPECS = [hybrid_spec(), indexed_spec(), every_dtype_spec(), byteless_spec(), hybrid_spec(1)]


def test_device_buffers_have_the_shapes_that_layers_use() -> None:
    full, window, state = stack_of(hybrid_spec(4, "bfloat16"), device=6).device
    assert full.buffers[3, "v"].shape == (6, 4, 2, 3)
    assert window.buffers[5, "k"].shape == (6, 4, 1, 5)
    assert state.buffers[4, "recurrent"].shape == (6, 2, 3, 5)
    assert full.buffers[0, "k"].dtype == torch.bfloat16
    assert state.buffers[1, "recurrent"].dtype == torch.float32
    for pool in (full, window, state):
        for buffer in pool.buffers.values():
            assert buffer.is_contiguous()
            assert not buffer.any()


def test_no_two_buffers_overlap() -> None:
    for spec in SPECS:
        for pool in stack_of(spec, device=3).device:
            for number, buffer in enumerate(pool.buffers.values()):
                buffer.fill_(number + 1)
            for number, buffer in enumerate(pool.buffers.values()):
                assert (buffer == number + 1).all()


@pytest.mark.parametrize("spec", SPECS)
def test_a_record_has_a_place_for_every_buffer(spec: CacheSpec) -> None:
    """C065: the layout is a manifest of all buffers of a slot, without gaps, by layer."""
    for part in spec.components:
        layout = RecordLayout(part, spec.page_size)
        assert {(e.layer, e.name) for e in layout.entries} == {
            (b.layer, b.name) for b in part.buffers
        }
        assert [e.layer for e in layout.entries] == sorted(e.layer for e in layout.entries)
        stop = 0
        for entry in layout.entries:
            assert entry.offset == stop
            stop += entry.nbytes
        assert stop == layout.record_bytes == part.record_bytes(spec.page_size)
        spans = [layout.layer_span(layer) for layer in layout.layers]
        assert sum(span[1] for span in spans if span) == stop
        assert layout.layer_span(99) is None


@pytest.mark.parametrize("spec", SPECS)
def test_strips_cover_the_record_once(spec: CacheSpec) -> None:
    for part in spec.components:
        layout = RecordLayout(part, spec.page_size)
        places = [
            (buffer.layer, buffer.name, strip.offset + i * strip.step, strip.nbytes)
            for strip in layout.strips
            for i, buffer in enumerate(strip.buffers)
        ]
        assert sorted(places, key=lambda p: p[2]) == [tuple(e) for e in layout.entries]


def test_uniform_layers_make_one_strip() -> None:
    part = hybrid_spec().components[0]
    assert len(RecordLayout(part, 4).strips) == 1
    assert len(RecordLayout(hybrid_spec().components[2], 4).strips) == 3


def test_read_records_is_the_layout_of_the_buffers() -> None:
    """Against a record put together by hand from the typed buffers."""
    spec = hybrid_spec(3, "bfloat16")
    stack = stack_of(spec)
    fill_device(stack, seed=4)
    order = slots(7, 0, 11)
    for pool in stack.device:
        by_hand = []
        for slot in order.tolist():
            parts = [
                pool.buffers[e.layer, e.name][slot].contiguous().view(-1).view(torch.uint8)
                for e in pool.layout.entries
            ]
            by_hand.append(torch.cat(parts).numpy())
        assert (pool.read_records(order) == np.stack(by_hand)).all()


def test_write_records_touches_nothing_else() -> None:
    stack = stack_of(hybrid_spec())
    written = fill_device(stack)
    pool = stack.device[0]
    new = np.full((2, pool.record_bytes), 7, np.uint8)
    pool.write_records(slots(5, 2), new)
    expected = written[0].copy()
    expected[[5, 2]] = 7
    assert (pool.read_records(np.arange(pool.slots, dtype=np.int32)) == expected).all()


def test_slots_outside_a_device_pool_are_refused() -> None:
    pool = stack_of(hybrid_spec(), device=4).device[0]
    with pytest.raises(PoolError, match="outside the device pool of 4"):
        pool.read_records(slots(0, 4))
    with pytest.raises(PoolError, match="outside"):
        pool.write_records(slots(-1), np.zeros((1, pool.record_bytes), np.uint8))
    with pytest.raises(PoolError, match=r"must be uint8\[1, "):
        pool.write_records(slots(0), np.zeros((1, 3), np.uint8))


def test_a_host_record_is_contiguous() -> None:
    part = hybrid_spec().components[2]
    pool = HostPool(part, 5, 4, pin=False)
    assert pool.data.shape == (5, part.record_bytes(4))
    assert pool.data.is_contiguous()
    assert pool.nbytes == 5 * pool.record_bytes
    assert pool.digests == [None] * 5


@pytest.mark.parametrize("spec", SPECS)
def test_assemble_allocates_what_the_plan_says(spec: CacheSpec) -> None:
    """C064, C128: every buffer on both tiers, and not one byte more than planned."""
    plan = plan_of(spec, 5, 9)
    stack = assemble(spec, plan)
    assert [p.nbytes for p in stack.device] == [s.total_bytes for s in plan.device]
    assert [p.nbytes for p in stack.host] == [s.total_bytes for s in plan.host]
    assert stack.device_bytes == plan.device_bytes
    assert stack.host_bytes == plan.host_bytes
    assert [a.capacity for a in stack.device_slots] == [5] * len(spec.components)
    assert [a.capacity for a in stack.host_slots] == [9] * len(spec.components)
    for pool, host in zip(stack.device, stack.host, strict=True):
        assert pool.layout.entries == host.layout.entries
        assert pool.nbytes == sum(b.nbytes for b in pool.buffers.values())
    names = {a.name for a in stack.device_slots + stack.host_slots}
    assert len(names) == 2 * len(spec.components)


def test_without_a_host_tier_there_are_no_host_pools() -> None:
    stack = assemble(hybrid_spec(), plan_of(hybrid_spec(), 4, 0))
    assert stack.host == []
    assert stack.host_bytes == 0
    assert [a.capacity for a in stack.host_slots] == [0, 0, 0]


def test_a_plan_for_another_spec_is_refused() -> None:
    """C064: a component that the plan does not carry is refused at start."""
    spec = hybrid_spec()
    good = plan_of(spec, 4, 4)
    short = SizePlan(good.device[:2], good.host, good.reaches, 4, "full")
    with pytest.raises(PoolError, match="device plan"):
        assemble(spec, short)
    with pytest.raises(PoolError, match="host plan"):
        assemble(spec, SizePlan(good.device, good.host[1:], good.reaches, 4, "full"))
    with pytest.raises(PoolError, match="device plan"):
        assemble(hybrid_spec(8), good)


def test_an_empty_pool_holds_nothing() -> None:
    part = Component("full", Full(), (Buffer("k", 0, (2,), "float16"),))
    pool = DevicePool(part, 0, 4)
    assert pool.nbytes == 0
    assert pool.read_records(np.empty(0, np.int32)).shape == (0, 16)
