"""Builds the pools and allocators of any spec from a size plan: one generic path, no model branch.

Owns nothing afterwards: the `PoolStack` is handed to the cache, the copy engine and the runner.
Called once, at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from banyan.errors import PoolError
from banyan.pools.allocator import SlotAllocator
from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool
from banyan.pools.lanes import Lane, device_lanes, host_lane, joined
from banyan.pools.plan import SizePlan
from banyan.pools.shared import HostSharing
from banyan.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class PoolStack:
    """Everything that holds bytes or slot ids, by component index.

    Args:
        device: each has all buffers of its component.
        host: empty when there is no host tier; `host_slots` then have capacity 0. The pool of the
            component's first lane: all its buffers, unless some are in shared memory.
        lanes: by component, what copies move between; default, each device pool with its host pool.
    """

    spec: CacheSpec
    device: list[DevicePool]
    host: list[HostPool]
    device_slots: list[SlotAllocator]
    host_slots: list[SlotAllocator]
    lanes: list[tuple[Lane, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.lanes:
            pairs = zip(self.device, self.host, strict=False)
            self.lanes.extend((Lane(device, host),) for device, host in pairs)

    def written_lanes(self, component: int) -> tuple[Lane, ...]:
        """The component's lanes that this rank backs up."""
        return tuple(lane for lane in self.lanes[component] if lane.writes)

    @property
    def device_bytes(self) -> int:
        """Bytes of all device pools together."""
        return sum(pool.nbytes for pool in self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host pools together; shared memory counts on the rank that writes it."""
        return sum(x.host.nbytes for lanes in self.lanes for x in lanes if x.writes)


def assemble(
    spec: CacheSpec,
    plan: SizePlan,
    *,
    device: torch.device | str = "cpu",
    shared: HostSharing | None = None,
) -> PoolStack:
    """Allocate what `plan` says, and nothing else.

    Args:
        spec: the model's components.
        plan: slots per component and tier, made by `plan_sizes` for the same spec.
        device: where the device pools live; host pools are pinned when it is a CUDA device.
        shared: memory for the host copy of replicated buffers, where `plan` is for several ranks
            of a node. Every rank then calls this with an equal plan.

    Raises:
        PoolError: the plan was made for other components, or counts on sharing where there is
            none, or the reverse; or the shared memory cannot be had.

    Upholds: INV-11 (every buffer of the spec is in the stack, on every tier), INV-22.
    """
    _check_plan(spec, plan, sharing=shared is not None)
    pin = torch.device(device).type == "cuda"
    page = spec.page_size
    parts = spec.components
    host_capacity = [s.slots for s in plan.host] or [0] * len(parts)
    divided = shared is not None and bool(plan.host)
    pools = [
        device_lanes(c, s.slots, page, device, divided=divided)
        for c, s in zip(parts, plan.device, strict=True)
    ]
    lanes = [
        tuple(host_lane(pool, s.slots, page, pin, shared) for pool in own)
        for own, s in zip(pools, plan.host, strict=False)
    ]
    return PoolStack(
        spec=spec,
        device=[joined(c, p[0].slots, page, p) for c, p in zip(parts, pools, strict=True)],
        host=[own[0].host for own in lanes],
        device_slots=[
            SlotAllocator(s.slots, f"device/{c.name}")
            for c, s in zip(parts, plan.device, strict=True)
        ],
        host_slots=[
            SlotAllocator(n, f"host/{c.name}") for c, n in zip(parts, host_capacity, strict=True)
        ],
        lanes=lanes,
    )


def _check_plan(spec: CacheSpec, plan: SizePlan, *, sharing: bool) -> None:
    """Refuse a plan for other components, or for another way of keeping replicated buffers."""
    page = spec.page_size
    for tier, sizes in (("device", plan.device), ("host", plan.host)):
        planned = [(s.component, s.record_bytes) for s in sizes]
        wanted = [(c.name, c.record_bytes(page)) for c in spec.components]
        if planned != wanted and (tier == "device" or planned):
            raise PoolError(f"the {tier} plan is for {planned}, the spec has {wanted}")
    for part, size in zip(spec.components, plan.host, strict=False):
        wanted_shared = part.only(replicated=True).record_bytes(page) if sharing else 0
        if size.shared_bytes != wanted_shared:
            raise PoolError(
                f"{part.name}: the host plan shares {size.shared_bytes} bytes of a record between "
                f"ranks, the pools would share {wanted_shared}; plan for the ranks of the node, "
                "and give them shared memory"
            )
