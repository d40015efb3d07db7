"""Builds the pools and allocators of any spec from a size plan: one generic path, no model branch.

Owns nothing afterwards: the `PoolStack` is handed to the cache, the copy engine and the runner.
Called once, at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from banyan.errors import PoolError
from banyan.pools.allocator import SlotAllocator
from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool
from banyan.pools.plan import SizePlan
from banyan.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class PoolStack:
    """Everything that holds bytes or slot ids, by component index.

    Args:
        host: empty when there is no host tier; `host_slots` then have capacity 0.
    """

    spec: CacheSpec
    device: list[DevicePool]
    host: list[HostPool]
    device_slots: list[SlotAllocator]
    host_slots: list[SlotAllocator]

    @property
    def device_bytes(self) -> int:
        """Bytes of all device pools together."""
        return sum(pool.nbytes for pool in self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host pools together."""
        return sum(pool.nbytes for pool in self.host)


def assemble(spec: CacheSpec, plan: SizePlan, *, device: torch.device | str = "cpu") -> PoolStack:
    """Allocate what `plan` says, and nothing else.

    Args:
        spec: the model's components.
        plan: slots per component and tier, made by `plan_sizes` for the same spec.
        device: where the device pools live; host pools are pinned when it is a CUDA device.

    Raises:
        PoolError: the plan was made for other components.

    Upholds: INV-11 (every buffer of the spec is in the stack, on every tier), INV-22.
    """
    for tier, sizes in (("device", plan.device), ("host", plan.host)):
        planned = [(s.component, s.record_bytes) for s in sizes]
        wanted = [(c.name, c.record_bytes(spec.page_size)) for c in spec.components]
        if planned != wanted and (tier == "device" or planned):
            raise PoolError(f"the {tier} plan is for {planned}, the spec has {wanted}")
    pin = torch.device(device).type == "cuda"
    page = spec.page_size
    parts = spec.components
    host_capacity = [s.slots for s in plan.host] or [0] * len(parts)
    return PoolStack(
        spec=spec,
        device=[
            DevicePool(c, s.slots, page, device) for c, s in zip(parts, plan.device, strict=True)
        ],
        host=[HostPool(c, s.slots, page, pin) for c, s in zip(parts, plan.host, strict=False)],
        device_slots=[
            SlotAllocator(s.slots, f"device/{c.name}")
            for c, s in zip(parts, plan.device, strict=True)
        ],
        host_slots=[
            SlotAllocator(n, f"host/{c.name}") for c, n in zip(parts, host_capacity, strict=True)
        ],
    )
