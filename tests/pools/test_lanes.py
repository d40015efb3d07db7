"""Lanes: whose buffers have their host copy where, and the component as one pool all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from banyan.errors import PoolError
from banyan.pools.assembler import assemble
from banyan.pools.lanes import Lane
from banyan.spec import CacheSpec
from tests.support.node import node_stacks, replicated, shared_plan, sharing_ranks
from tests.support.stacks import byteless_spec, hybrid_spec, indexed_spec, plan_of, stack_of

EVERY_NAME = ("k", "v", "index", "conv", "recurrent", "extra")


def names(lane: Lane) -> set[tuple[int, str]]:
    """Buffers of a lane."""
    return set(lane.device.buffers)


def test_replicated_buffers_have_a_lane_of_their_own() -> None:
    spec = replicated(indexed_spec(), "index")
    with sharing_ranks(2) as shares:
        writer, reader = node_stacks(spec, shared_plan(spec, 5, 7, 2), shares)
    for stack, writes in ((writer, True), (reader, False)):
        own, shared = stack.lanes[0]
        assert names(shared) == {(layer, "index") for layer in (0, 1, 2)}
        assert names(own) == set(stack.device[0].buffers) - names(shared)
        assert (own.shared, own.writes, shared.shared, shared.writes) == (0, 1, 1, writes)
        assert own.device.slots == shared.device.slots == 5
        assert own.host.slots == shared.host.slots == 7
        assert stack.host[0] is own.host
        assert stack.written_lanes(0) == ((own, shared) if writes else (own,))
    shared_hosts = [stack.lanes[0][1].host for stack in (writer, reader)]
    shared_hosts[0].data[3] = 9
    assert bool((shared_hosts[1].data[3] == 9).all())
    own_hosts = [stack.lanes[0][0].host for stack in (writer, reader)]
    own_hosts[0].data[3] = 9
    assert not own_hosts[1].data.any()


def test_a_component_that_is_replicated_throughout_has_one_lane() -> None:
    spec = replicated(hybrid_spec(), "conv", "recurrent", "extra")
    with sharing_ranks(2) as shares:
        writer, reader = node_stacks(spec, shared_plan(spec, 5, 7, 2), shares)
    for stack, writes in ((writer, True), (reader, False)):
        assert [len(own) for own in stack.lanes] == [1, 1, 1]
        assert [own[0].shared for own in stack.lanes] == [False, False, True]
        assert stack.lanes[2][0].writes is writes
        assert stack.lanes[2][0].device is stack.device[2]
    assert writer.host_bytes - reader.host_bytes == writer.host[2].nbytes > 0


@pytest.mark.parametrize("spec", [hybrid_spec(), indexed_spec(), byteless_spec()])
def test_alone_every_component_is_one_lane(spec: CacheSpec) -> None:
    """Replicated or not: a rank that shares nothing keeps its records whole."""
    for own in (spec, replicated(spec, *EVERY_NAME)):
        stack = stack_of(own)
        assert [len(lanes) for lanes in stack.lanes] == [1] * len(spec.components)
        for (lane,), device, host in zip(stack.lanes, stack.device, stack.host, strict=True):
            assert lane.device is device and lane.host is host
            assert not lane.shared and lane.writes
    with sharing_ranks(1) as shares:
        (stack,) = node_stacks(spec, plan_of(spec, 3, 4), shares)
        assert not any(lane.shared for lanes in stack.lanes for lane in lanes)
        assert shares[0].nbytes == 0


@pytest.mark.parametrize("shared", [("index",), ("k",), ("v", "index"), ("k", "v", "index")])
def test_the_device_pool_of_a_component_is_the_same_whatever_its_lanes(
    shared: tuple[str, ...],
) -> None:
    """Layers, records and checks see one pool: its buffers, their place in a record, its bytes."""
    spec = replicated(indexed_spec(), *shared)
    (whole,) = stack_of(spec, device=6).device
    with sharing_ranks(1) as shares:
        (stack,) = node_stacks(spec, shared_plan(spec, 6, 4, 1), shares)
    (pool,) = stack.device
    assert pool.buffers.keys() == whole.buffers.keys()
    assert (pool.slots, pool.device, pool.nbytes) == (6, whole.device, whole.nbytes)
    assert (pool.record_bytes, pool.layout.entries) == (whole.record_bytes, whole.layout.entries)
    records = np.random.default_rng(0).integers(0, 256, (6, pool.record_bytes), dtype=np.uint8)
    order = np.array([4, 0, 5, 1, 3, 2], np.int32)
    for each in (pool, whole):
        each.write_records(order, records)
        assert np.array_equal(each.read_records(order), records)
    for key, buffer in whole.buffers.items():
        assert pool.buffers[key].is_contiguous()
        assert pool.buffers[key].dtype == buffer.dtype
        seen, wanted = (x.view(-1).view(torch.uint8) for x in (pool.buffers[key], buffer))
        assert torch.equal(seen, wanted)
    for lane in stack.lanes[0]:
        for key, buffer in lane.device.buffers.items():
            assert buffer.data_ptr() == pool.buffers[key].data_ptr()


def test_a_plan_and_its_memory_must_agree_on_what_is_shared() -> None:
    spec = replicated(indexed_spec(), "index")
    with pytest.raises(PoolError, match="plan for the ranks"):
        assemble(spec, shared_plan(spec, 4, 4, 2))
    with sharing_ranks(1) as (share,):
        with pytest.raises(PoolError, match="plan for the ranks"):
            assemble(spec, plan_of(spec, 4, 4), shared=share)
        stack = assemble(spec, plan_of(spec, 4, 0), shared=share)
        assert stack.lanes == [] and stack.host_bytes == 0 and share.nbytes == 0
        assert len(stack.device[0].buffers) == len(spec.components[0].buffers)
