"""Ranks of one node in one process: they share memory as processes would, by descriptor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.plan import SizePlan
from banyan.pools.shared import SharedHost
from banyan.spec import CacheSpec
from tests.support.stacks import fill_device, plan_of


@dataclass
class Relay:
    """One rank's `Exchange` where ranks of one process call one after the other, the writer first.

    Attributes:
        told: what the writer has said, oldest first.
    """

    told: list[bytes]
    heard: int = 0

    def __call__(self, message: bytes | None) -> bytes:
        """Say `message`, or hear the next one."""
        if message is not None:
            self.told.append(message)
        self.heard += 1
        return self.told[self.heard - 1]


@contextmanager
def sharing_ranks(ranks: int, *, pin: bool = False) -> Iterator[list[SharedHost]]:
    """What the ranks of a node share, the writer first."""
    told: list[bytes] = []
    shares = [SharedHost(Relay(told), writes=rank == 0, pin=pin) for rank in range(ranks)]
    try:
        yield shares
    finally:
        for share in shares:
            share.close()


def node_stacks(
    spec: CacheSpec,
    plan: SizePlan,
    shares: Sequence[SharedHost],
    device: torch.device | str = "cpu",
) -> list[PoolStack]:
    """A stack for each rank, in order."""
    return [assemble(spec, plan, device=device, shared=share) for share in shares]


def replicated(spec: CacheSpec, *names: str) -> CacheSpec:
    """The spec with the buffers of these names equal on every rank."""
    parts = (
        replace(c, buffers=tuple(replace(b, replicated=b.name in names) for b in c.buffers))
        for c in spec.components
    )
    return CacheSpec(tuple(parts), spec.page_size)


def shared_plan(spec: CacheSpec, device: int, host: int, ranks: int) -> SizePlan:
    """Equally many slots for every component, on each of `ranks` that share what is replicated."""
    plan = plan_of(spec, device, host)
    equal = [c.only(replicated=True).record_bytes(spec.page_size) for c in spec.components]
    sizes = zip(plan.host, equal, strict=True)
    return replace(plan, host=tuple(replace(s, shared_bytes=n, ranks=ranks) for s, n in sizes))


def fill_ranks(stacks: Sequence[PoolStack], seed: int = 0) -> None:
    """Random bytes in every device slot: equal on all ranks where buffers are replicated."""
    for rank, stack in enumerate(stacks):
        fill_device(stack, seed=100 * seed + rank)
        for component, pool, first in zip(
            stack.spec.components, stack.device, stacks[0].device, strict=True
        ):
            for b in component.buffers:
                if b.replicated:
                    own, equal = (p.buffers[b.layer, b.name] for p in (pool, first))
                    own.view(torch.uint8).copy_(equal.view(torch.uint8))
