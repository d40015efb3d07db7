"""Lanes: a component's buffers, divided by who has their host copy.

Owns the pairing of device and host pools that copies move between. With one rank, or nothing
replicated, a component is one lane. Where ranks of a node share what is equal on all of them, its
replicated buffers are a lane of their own, whose host records are in shared memory and written by
one rank. All lanes of a component have the same slot ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool
from banyan.pools.shared import HostSharing
from banyan.spec import Component


@dataclass(frozen=True, slots=True)
class Lane:
    """Buffers of a component whose bytes travel together.

    Args:
        device, host: pools of these buffers alone; the same layout on both.
        shared: all ranks of the node have the one host pool.
        writes: this rank backs up into it; of a shared one, a single rank does.
    """

    device: DevicePool
    host: HostPool
    shared: bool = False
    writes: bool = True


def device_lanes(
    component: Component, slots: int, page_size: int, device: torch.device | str, *, divided: bool
) -> list[DevicePool]:
    """Device pools of a component's lanes: of its own buffers first, then of the replicated ones.

    Args:
        divided: replicated buffers are a lane of their own, if there are any.
    """
    parts = [component.only(replicated=flag) for flag in (False, True)] if divided else [component]
    return [DevicePool(part, slots, page_size, device) for part in parts if part.buffers] or [
        DevicePool(component, slots, page_size, device)
    ]


def joined(component: Component, slots: int, page_size: int, parts: list[DevicePool]) -> DevicePool:
    """The whole component as one device pool over the memory of its lanes."""
    if len(parts) == 1:
        return parts[0]
    return DevicePool(component, slots, page_size, parts[0].device, parts)


def host_lane(
    device: DevicePool, slots: int, page_size: int, pin: bool, sharing: HostSharing | None
) -> Lane:
    """Give a lane's device pool its host pool: a shared one if its buffers are replicated.

    Args:
        sharing: of the ranks of this node; None when each has all its bytes to itself.
    """
    part = device.component
    if sharing is None or not slots or not any(b.replicated for b in part.buffers):
        return Lane(device, HostPool(part, slots, page_size, pin))
    memory = sharing.allocate(part.name, slots * device.record_bytes)
    host = HostPool(part, slots, page_size, pin, memory)
    return Lane(device, host, shared=True, writes=sharing.writes)
