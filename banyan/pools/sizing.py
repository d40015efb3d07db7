"""How many slots each component gets on each tier, from one honest byte budget per tier.

Owns the split and its reasons. Knows no tensor and no tree; pure arithmetic, callable anywhere.

The split follows the mix a cache is expected to hold. For every `spacing` tokens of cached prefix
there is one checkpoint: `spacing` tokens of full pages, one window's reach of window pages (but no
more than the pages between two checkpoints), and one state. On device the running requests come
first, each with room for a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from banyan.errors import ConfigError
from banyan.pools.plan import PoolSize, SizePlan, reach_pages
from banyan.spec import CacheSpec, Component, Point, Window

__all__ = ["PoolSize", "SizePlan", "plan_sizes"]

DEFAULT_SPACING = 512
"""Tokens between two checkpoints where no state interval says otherwise."""

RUNNING_STATES = 3
"""States of a running request: the one read, the one written, and a kept checkpoint."""

BYTELESS_TOKENS = 1 << 18
"""A component without buffers costs no bytes, so it gets slots for this many tokens at least: it
must never be what refuses a long request."""

_SHARE_SLACK = 1e-9
"""Shares that sum to 1 but for rounding are taken as 1."""


def plan_sizes(
    spec: CacheSpec,
    *,
    device_bytes: int,
    host_bytes: int,
    max_running: int,
    chunk: int,
    state_interval: int | None,
    device_split: dict[str, float] | None = None,
    host_split: dict[str, float] | None = None,
    ranks: int = 1,
) -> SizePlan:
    """Divide the byte budget of each tier between the components.

    Args:
        device_bytes: bound on the sum of all device pools of one rank.
        host_bytes: bound on the sum of all host pools of the node, all its `ranks` together; 0: no
            host tier.
        max_running: requests that run together, at most.
        chunk: tokens of a prefill chunk, at most.
        state_interval: tokens between two state checkpoints; None: `DEFAULT_SPACING`.
        device_split, host_split: share of the tier's budget (0 to 1) for components by name;
            those not named divide the rest as the expected mix asks.
        ranks: ranks on this node. Each has the spec's slots on host; replicated buffers of a slot
            are there once.

    Raises:
        ConfigError: an option out of range, or a budget too small for one request of one chunk
            (device) or one boundary (host): names the smallest that works.

    Upholds: INV-22.
    """
    _check_options(device_bytes, host_bytes, max_running, chunk, state_interval, ranks)
    mix = [_Demand.of(c, spec, chunk, state_interval) for c in spec.components]
    device, limit = _Tier("device", device_bytes, max_running, device_split or {}).divide(mix)
    host: tuple[PoolSize, ...] = ()
    host_limit: str | None = None
    if host_bytes:
        tier = _Tier("host", host_bytes, 1, host_split or {})
        host, host_limit = tier.divide([d.on_host(ranks) for d in mix])
    elif host_split:
        raise ConfigError("--host-split", "there is no host tier to split", "Set --host-bytes")
    reaches = tuple(c.reach for c in spec.components)
    return SizePlan(device, host, reaches, spec.page_size, limit, host_limit)


def _check_options(
    device_bytes: int,
    host_bytes: int,
    max_running: int,
    chunk: int,
    state_interval: int | None,
    ranks: int,
) -> None:
    least = {
        "--device-bytes": (device_bytes, 0),
        "--host-bytes": (host_bytes, 0),
        "--max-running": (max_running, 1),
        "--chunk": (chunk, 1),
        "--state-interval": (1 if state_interval is None else state_interval, 1),
        "--tp": (ranks, 1),
    }
    for option, (value, bound) in least.items():
        if value < bound:
            raise ConfigError(option, f"{value} is below {bound}", f"Use {bound} or more")


@dataclass(frozen=True, slots=True)
class _Demand:
    """What one component needs: slots at least, and slots per checkpoint of the expected mix.

    Args:
        slot: what one slot is and costs on the tier.
        replicated_bytes: of a record, those equal on every rank.
        first: slots without which nothing works: one running request, or one boundary on host.
        boundary: slots of the shortest prefix that has every component's whole reach.
        per_checkpoint: slots for each further checkpoint.
        byteless: slots to give when the component has no buffers, whatever the budget.
    """

    slot: PoolSize
    replicated_bytes: int
    first: int
    boundary: int
    per_checkpoint: float
    byteless: int

    @property
    def name(self) -> str:
        return self.slot.component

    @property
    def slot_bytes(self) -> int:
        return self.slot.slot_bytes

    @staticmethod
    def of(part: Component, spec: CacheSpec, chunk: int, interval: int | None) -> _Demand:
        page = spec.page_size
        spacing = max(interval or DEFAULT_SPACING, page)
        reach = part.reach
        longest = max(reach_pages(c.reach, page) for c in spec.components)
        chunk_pages = math.ceil(chunk / page) + 1
        slot = PoolSize(part.name, 1, part.record_bytes(page))
        replicated = part.only(replicated=True).record_bytes(page)
        byteless = math.ceil(BYTELESS_TOKENS / page)
        if isinstance(reach, Point):
            return _Demand(slot, replicated, RUNNING_STATES, 1, 1.0, byteless)
        if isinstance(reach, Window):
            pages = reach_pages(reach, page)
            each = min(pages, spacing / page)
            return _Demand(slot, replicated, pages + chunk_pages, pages, each, byteless)
        boundary = max(1, longest)
        return _Demand(slot, replicated, longest + chunk_pages, boundary, spacing / page, byteless)

    def on_host(self, ranks: int) -> _Demand:
        """The same mix where nothing runs: the least is one boundary. One slot is on all ranks."""
        shared = self.replicated_bytes if ranks > 1 else 0
        slot = replace(self.slot, shared_bytes=shared, ranks=ranks)
        return replace(self, slot=slot, first=self.boundary)


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier's budget, and how to divide it.

    Args:
        running: times every demand's `first` is set aside, if the budget allows.
        split: shares of the budget that the caller fixed, by component name.
    """

    name: str
    budget: int
    running: int
    split: dict[str, float]

    def divide(self, mix: list[_Demand]) -> tuple[tuple[PoolSize, ...], str]:
        """Slots for every demand, and the name of the pool that runs out first.

        The sum of bytes never exceeds the budget.
        """
        self._check_split(mix)
        slots: dict[str, int] = {}
        rest = self.budget
        for d in (d for d in mix if d.name in self.split):
            nbytes = min(rest, math.floor(self.budget * Fraction(self.split[d.name])))
            slots[d.name] = nbytes // d.slot_bytes
            if slots[d.name] < d.first:
                raise self._too_small(mix)
            rest -= nbytes
        unnamed = [d for d in mix if d.name not in self.split]
        if _least(unnamed) > rest:
            raise self._too_small(mix)
        slots.update(self._automatic(unnamed, rest))
        sizes = tuple(replace(d.slot, slots=slots[d.name]) for d in mix)
        return sizes, self._limiting(mix, slots)

    def _automatic(self, mix: list[_Demand], budget: int) -> dict[str, int]:
        """First what runs, then checkpoints of the mix, then whatever still fits."""
        least = _least(mix)
        running = min(self.running, budget // least) if least else self.running
        slots = {d.name: running * d.first for d in mix}
        left = budget - running * least
        per_checkpoint = sum(d.per_checkpoint * d.slot_bytes for d in mix)
        checkpoints = left / per_checkpoint if per_checkpoint else 0.0
        for d in mix:
            more = int(checkpoints * d.per_checkpoint)
            if d.slot_bytes:
                more = min(more, left // d.slot_bytes)
                left -= more * d.slot_bytes
            slots[d.name] += more
        for d in mix:
            if d.slot_bytes:
                slots[d.name] += left // d.slot_bytes
                left %= d.slot_bytes
            else:
                slots[d.name] = max(slots[d.name], d.byteless)
        return slots

    def _limiting(self, mix: list[_Demand], slots: dict[str, int]) -> str:
        """The pool that, beside what runs, holds the fewest checkpoints of the mix."""
        sized = [d for d in mix if d.slot_bytes] or mix
        running = min(self.running, *(slots[d.name] // d.first for d in sized))
        return min(sized, key=lambda d: (slots[d.name] - running * d.first) / d.per_checkpoint).name

    def _check_split(self, mix: list[_Demand]) -> None:
        option = f"--{self.name}-split"
        known = [d.name for d in mix if d.slot_bytes]
        for name, share in self.split.items():
            if name not in known:
                raise ConfigError(option, f"no pool {name!r}", f"Use some of {', '.join(known)}")
            if not 0 < share <= 1:
                raise ConfigError(option, f"{name}={share:g} is no share", "Use 0 < share <= 1")
        total = sum(self.split.values())
        without = [name for name in known if name not in self.split]
        if total > 1 + _SHARE_SLACK:
            raise ConfigError(option, f"the shares sum to {total:g}", "Keep the sum at 1 or below")
        if without and total > 1 - _SHARE_SLACK:
            left_out = ", ".join(without)
            raise ConfigError(option, f"nothing is left for {left_out}", "Keep the sum below 1")

    def _too_small(self, mix: list[_Demand]) -> ConfigError:
        what = "one request of one chunk" if self.name == "device" else "one boundary"
        shares = ", ".join(f"{name}={share:g}" for name, share in self.split.items())
        under = f" under --{self.name}-split {shares}" if shares else ""
        return ConfigError(
            f"--{self.name}-bytes",
            f"{self.budget:,} bytes cannot hold {what}, which takes {_least(mix):,}{under}",
            f"Set it to at least {self._smallest(mix):,}",
        )

    def _smallest(self, mix: list[_Demand]) -> int:
        """A budget that works; without a split, the smallest."""
        unnamed = [d for d in mix if d.name not in self.split]
        shares = {name: Fraction(share) for name, share in self.split.items()}
        needs = [math.ceil(_least([d]) / shares[d.name]) for d in mix if d.name in shares]
        if _least(unnamed):
            needs.append(math.ceil(_least(unnamed) / (1 - sum(shares.values()))))
        return max(needs, default=0)


def _least(mix: list[_Demand]) -> int:
    """Bytes without which nothing works."""
    return sum(d.first * d.slot_bytes for d in mix)
