"""One prompt whose data is on host, a request that resumes inside it, and the bytes it will load.

Owns the way from a buffer of a layer to its bytes in host records. Tests change those between the
eviction of the device and the request, and look at what the request's first forward makes of it.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from banyan.engine.messages import Usage
from banyan.pools.device import Records
from banyan.pools.host import RecordEntry
from banyan.spec import Buffer
from banyan.tree import Match, Tier
from banyan.tree.keys import encode_tokens
from tests.parity.harness import MIB, Engine, recorded_forwards
from tests.support.families import loaded_family

PAGE = 16
BOUNDARY = 7 * PAGE
_TAIL = 2
"""Tokens of the request's own. Not one: that would be computed as decoding is. Not many: what only
the first of them read, as the C of a state space model, would not show in the last one's logits."""
_TAIL_OF = {"deepseek_v4": 13}
"""Families that read the last group of four tokens when they close the next one: three are."""

UNREAD = {
    "deepseek_v4": frozenset(
        {
            # projections and gates of an open group; none is open at a page boundary, and the next
            # group reads the last one's projections only where groups overlap, in layers 1 and 3
            *(f"compressor_kv of layer {layer}" for layer in (0, 4)),
            *(f"compressor_gate of layer {layer}" for layer in (0, 1, 3, 4)),
            *(f"indexer_gate of layer {layer}" for layer in (1, 3)),
            # its keys are its values, and it takes both from the keys
            "v of layer 2",
        }
    )
}
"""Buffers whose bytes no request that resumes at a page boundary reads."""

Change = Callable[[torch.Tensor], None]
"""Changes dtype[entries, *shape] in place: all entries of a buffer, oldest first."""


class Place(NamedTuple):
    """One buffer of one layer in the records of a component."""

    component: int
    buffer: Buffer
    entry: RecordEntry

    def __str__(self) -> str:
        return f"{self.buffer.name} of layer {self.buffer.layer}"


class Resumed(NamedTuple):
    """What became of the request: its first forward's logits, its answer, its receipt."""

    logits: torch.Tensor
    tokens: list[int]
    usage: Usage


class Trial:
    """An engine that knows a prompt of `BOUNDARY` tokens and some more, with checkpoints there and
    one page before.

    The request shares `BOUNDARY` tokens with it and has less than a page of its own, so it
    publishes nothing and can be repeated: between two of them the device is emptied.

    Args:
        family: a key of `FAMILIES`.
        answer: tokens that the request is answered with.
        options: of the engine.
    """

    def __init__(self, family: str, answer: int = 1, **options: Any) -> None:
        source = random.Random(family)
        known = source.choices(range(32, 127), k=BOUNDARY + PAGE + 9)
        tail = source.choices(range(32, 127), k=_TAIL_OF.get(family, _TAIL))
        tail[0] = known[BOUNDARY] % 94 + 32  # another token than the known one
        self.asked = [*known[:BOUNDARY], *tail]
        self._answer = answer
        self.engine = Engine(
            loaded_family(family),
            page_size=PAGE,
            chunk=2 * PAGE,
            max_running=1,
            device_bytes=16 * MIB,
            host_bytes=32 * MIB,
            **options,
        )
        # the last page boundary of each prompt is a checkpoint
        for stop in (BOUNDARY - PAGE + 1, BOUNDARY + 1, len(known)):
            self.engine.answer([known[:stop]], 1)
        self.engine.settle()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    @property
    def stack(self) -> Any:
        """The pools of both tiers."""
        return self.engine.cache.stack

    def selects(self, layer: int) -> bool:
        """Whether the layer has an indexer, which selects what its attention sees."""
        return any(p.entry.layer == layer and "indexer" in p.entry.name for p in self.places)

    @property
    def places(self) -> list[Place]:
        """Every buffer that the records of any component carry."""
        return [
            Place(
                c, next(b for b in pool.component.buffers if (b.layer, b.name) == entry[:2]), entry
            )
            for c, pool in enumerate(self.stack.host)
            for entry in pool.layout.entries
        ]

    def resume(self) -> Resumed:
        """Empty the device, then ask; the request can resume at the boundary, from host alone."""
        self.engine.evict_device()
        match = self._match()
        assert (match.boundary, match.device_boundary) == (BOUNDARY, 0)
        with recorded_forwards() as logits:
            ((tokens, usage),) = self.engine.answer([self.asked], self._answer)
        self.engine.settle()
        return Resumed(logits[0], tokens, usage)

    def _match(self) -> Match:
        return self.engine.cache.match(encode_tokens(self.asked))

    def slots(self, component: int, tier: Tier, boundary: int = BOUNDARY) -> npt.NDArray[np.int32]:
        """Slots on `tier` of what resuming at `boundary` needs of a component, oldest first."""
        reach = self.engine.cache.spec.components[component].reach
        low = reach.first_needed(boundary, PAGE)
        parts: list[npt.NDArray[np.int32]] = []
        for node in self._match().path:
            if reach.page_shaped:
                first, last = max(low, node.start), min(boundary, node.end)
                span = slice((first - node.start) // PAGE, (last - node.start) // PAGE)
            else:
                first, last, span = boundary - 1, boundary if node.end == boundary else 0, slice(1)
            if first < last:
                held = node.parts[tier][component].slots
                assert held is not None, node
                parts.append(held[span])
        return np.concatenate(parts)

    def device_bytes(self) -> dict[str, Records]:
        """By buffer and layer, what the device holds of the boundary: uint8[slots, bytes]."""
        found = {}
        for place in self.places:
            slots = self.slots(place.component, Tier.DEVICE)
            records = self.stack.device[place.component].read_records(slots)
            start = place.entry.offset
            found[str(place)] = records[:, start : start + place.entry.nbytes]
        return found

    @contextmanager
    def changed(self, place: Place, change: Change) -> Iterator[None]:
        """Let the host records that the request will load hold changed values of one buffer.

        Mutates: the host pool, until the end of the context; then all is as it was. What was found
        to be wrong meanwhile and dropped stays as it is: its slots may hold other records by then.
        """
        pool = self.stack.host[place.component]
        slots = torch.from_numpy(self.slots(place.component, Tier.HOST)).long()
        columns = torch.arange(place.entry.offset, place.entry.offset + place.entry.nbytes)
        where = (slots[:, None], columns)
        before = pool.data[where]
        values = before.clone().view(getattr(torch, place.buffer.dtype))
        change(values.view(-1, *place.buffer.shape))
        changed = values.view(torch.uint8)
        pool.data[where] = changed
        yield
        if torch.equal(pool.data[where], changed):
            pool.data[where] = before

    @contextmanager
    def earlier_state(self, component: int) -> Iterator[None]:
        """Let the host record of the state at the boundary hold that of one page before it.

        Mutates: the host pool, until the end of the context; then all is as it was.
        """
        pool = self.stack.host[component]
        (right,) = self.slots(component, Tier.HOST).tolist()
        (earlier,) = self.slots(component, Tier.HOST, BOUNDARY - PAGE).tolist()
        before = pool.data[right].clone()
        pool.data[right] = pool.data[earlier]
        yield
        pool.data[right] = before


def flips(place: Place, selective: bool) -> Iterator[Change]:
    """Changes of one bit each, of which one must show: the sign of the newest entry's largest
    element, and nothing else. Where attention selects its entries, that one need not be selected,
    nor need a key of the indexer change the selection: then further elements and entries follow.

    Of a convolution's state it is the newest column: the oldest one is as wide as the kernel away
    from the next token, so nothing reads it.

    Args:
        selective: whether the layer selects what it attends to.
    """
    backs, ranks = (4 * PAGE, 4) if selective else (1, 1)
    for back, rank in itertools.product(range(backs), range(ranks)):
        yield functools.partial(_flip, place.buffer.name, back, rank)


def _flip(name: str, back: int, rank: int, entries: torch.Tensor) -> None:
    """Flip the sign of the element of the given rank by size, `back` entries before the newest."""
    if back >= len(entries):
        return
    entry = entries[-1 - back]
    part = entry[..., -1] if name.startswith("conv") else entry
    index = np.unravel_index(
        int(part.abs().flatten().sort(descending=True).indices[rank]), part.shape
    )
    assert part[index] != 0, "the sign of zero says nothing"
    part[index] = -part[index]  # of a float, nothing but its sign bit


def leave_out(entries: torch.Tensor) -> None:
    """All bytes of the buffer zero, as if it had not been restored."""
    entries.zero_()
