"""A cache without bytes and a model without arithmetic: what is left is bookkeeping.

Owns nothing between calls. What is measured on these parts is the tree, the controller and the
scheduler alone; slots, locks, leases and transfers are the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.engine.messages import Sampling, TokenLogprob
from banyan.engine.plans import SeqInput
from banyan.pools.allocator import SlotAllocator
from banyan.pools.assembler import PoolStack
from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool
from banyan.spec import CacheSpec, Component, Full, Point, Window
from banyan.tiers.ops import CopyDone, CopyJob, CopyTicket, OpId

COMPONENTS = {
    "full": (Component("full", Full()),),
    "full+window": (Component("full", Full()), Component("window", Window(512))),
    "full+state": (Component("full", Full()), Component("state", Point())),
}
"""What the benchmarks of the bookkeeping cache; no component has a buffer."""


def byteless_stack(spec: CacheSpec, device: Sequence[int], host: Sequence[int]) -> PoolStack:
    """Pools of components without buffers.

    Args:
        device, host: slots by component; zeros for no host tier.
    """
    parts, page = spec.components, spec.page_size
    return PoolStack(
        spec=spec,
        device=[DevicePool(c, n, page) for c, n in zip(parts, device, strict=True)],
        host=[HostPool(c, n, page, pin=False) for c, n in zip(parts, host, strict=True)],
        device_slots=[SlotAllocator(n, c.name) for c, n in zip(parts, device, strict=True)],
        host_slots=[SlotAllocator(n, c.name) for c, n in zip(parts, host, strict=True)],
    )


class _Ready:
    """A ticket of bytes that are there."""

    def wait_layer(self, layer: int) -> None:
        """Nothing to wait for."""


class NullCopyEngine:
    """A `CopyEngine` that moves nothing: a job is done a number of polls after its submission.

    Args:
        polls: how many; with 1, every job is done at the next poll.
    """

    def __init__(self, polls: int = 1) -> None:
        self._polls, self._now = polls, 0
        self._running: dict[OpId, int] = {}

    def submit(self, job: CopyJob) -> CopyTicket:
        """Note when the job will be done. Its bytes are there at once, there being none."""
        self._running[job.op_id] = self._now + self._polls
        return _Ready()

    def poll(self) -> list[CopyDone]:
        """Completions since the last call, in the order of submission. Cost: O(completions)."""
        self._now += 1
        done: list[CopyDone] = []
        for op_id, due in self._running.items():
            if due > self._now:
                break
            done.append(CopyDone(op_id, ok=True))
        for completion in done:
            del self._running[completion.op_id]
        return done

    def cancel(self, op_id: OpId) -> bool:
        """A job starts when it is submitted, so none can be taken back."""
        return False

    def close(self) -> None:
        """Nothing to stop."""


@dataclass(frozen=True)
class _Fixed:
    """The one token that the null model knows."""

    token: int = 7
    logprob: TokenLogprob | None = None


class _NoText:
    """A text stream of a model without words."""

    stopped = False

    def push(self, token: int) -> str:
        """Every token's text is empty."""
        return ""

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


class NullModel:
    """A `Model` that computes nothing: its logits are nothing, its tokens all the same."""

    def __init__(self) -> None:
        self._choice = _Fixed()

    def forward(self, seqs: Sequence[SeqInput]) -> tuple[()]:
        """Reads and writes nothing; no logits (None would say that it failed)."""
        return ()

    def sample(self, logits: tuple[()], samplers: Sequence[None]) -> list[_Fixed]:
        """The same token for every row."""
        return [self._choice] * len(samplers)

    def new_sampler(self, sampling: Sampling) -> None:
        """No state to keep."""

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> _NoText:
        """No text."""
        return _NoText()
