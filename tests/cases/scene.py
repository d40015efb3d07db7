"""The notation of the cases over a `Rig`: streams, and operations in tokens.

`A[0:16]` are the first 16 tokens of stream A; `[*A[0:16], *B[0:5]]` those and five that differ.
Pools are those of the default rig unstated: P=4 W=8 DF=128 DS=64 DM=4 HF=256 HS=128 HM=8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from banyan.cache import AllocateOutcome
from banyan.lease import Lease
from banyan.spec import Point
from banyan.tree import Match, Node, Tier, encode_tokens
from banyan.tree.eviction import Freed
from tests.support.reference import Held, survey
from tests.support.rig import Rig

OK, FULL, PENDING = AllocateOutcome.OK, AllocateOutcome.FULL, AllocateOutcome.PENDING
DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Stream:
    """Endless tokens, each only in this stream and at its position."""

    def __init__(self, number: int) -> None:
        self.first = number * 100_000

    def __getitem__(self, part: slice) -> list[int]:
        return [self.first + i for i in range(part.start or 0, part.stop)]


A, B, C, D = Stream(1), Stream(2), Stream(3), Stream(4)


def start(rig: Rig, tokens: list[int], cuts: Iterable[int] = (), commit: bool = True) -> Lease:
    """A request that has computed all of `tokens`, in chunks that end at `cuts`, and runs on.

    Copies that run are only finished where it would have to wait for them.
    """
    lease = rig.acquire(tokens)
    for stop in [*(cut for cut in cuts if cut > lease.length), len(tokens)]:
        outcome = rig.compute(lease, tokens, stop)
        if outcome is PENDING:
            rig.settle()
            outcome = rig.compute(lease, tokens, stop)
        assert outcome is OK, f"no room up to {stop}"
        if commit:
            rig.commit(lease, tokens)
        rig.check()
    return lease


def insert(rig: Rig, tokens: list[int], cuts: Iterable[int] = (), settle: bool = True) -> Lease:
    """A request from beginning to end; its copies are done unless `settle` is off."""
    lease = start(rig, tokens, cuts)
    rig.cache.release(lease)
    if settle:
        rig.settle()
    rig.check()
    return lease


def match(rig: Rig, tokens: Sequence[int]) -> Match:
    """A match for exactly these tokens."""
    return rig.cache.match(encode_tokens(tokens))


def need(rig: Rig, F: int = 0, S: int = 0, M: int = 0) -> list[int]:
    """Slots by component, from tokens of full and window data and from states."""
    given = {"full": F // rig.page_size, "window": S // rig.page_size, "state": M}
    return [given[c.name] for c in rig.spec.components]


def evict(rig: Rig, tier: Tier = DEVICE, **tokens: int) -> Freed | None:
    """Evict so much, whatever is free; None when that is not there to evict."""
    freed = rig.cache.tree.evict(tier, need(rig, **tokens))
    if freed is not None:
        rig.cache.controller.give_back(freed)
    rig.check()
    return freed


def evict_all(rig: Rig, tier: Tier, name: str) -> int:
    """Evict all that may go of one component; returns how many slots."""
    component = index_of(rig, name)
    asked = [0] * len(rig.spec.components)
    asked[component] = rig.cache.tree.index[tier].evictable[component]
    freed = rig.cache.tree.evict(tier, asked)
    assert freed is not None
    rig.cache.controller.give_back(freed)
    rig.check()
    return asked[component]


def demote(rig: Rig) -> None:
    """Take everything off the device that may go; host copies stay."""
    rig.evict_device()
    rig.check()


def forget(rig: Rig, tier: Tier, name: str, tokens: Sequence[int]) -> None:
    """Take away one node's data of a window or state, as an eviction would."""
    component = index_of(rig, name)
    slots = rig.cache.tree.index[tier].remove(node_at(rig, tokens), component)
    rig.cache.tree.epoch += 1
    rig.cache.controller.allocators[tier][component].free(slots)
    rig.check()


def node_at(rig: Rig, tokens: Sequence[int]) -> Node:
    """The node that ends at the end of `tokens`."""
    found = rig.cache.match(encode_tokens([*tokens, 0]))
    assert found.full_len == len(tokens), f"{found.full_len} of {len(tokens)} tokens are there"
    node = found.path[-1]
    assert node.end == len(tokens), f"no node ends at {len(tokens)}"
    return node


def index_of(rig: Rig, name: str) -> int:
    """The component of that name."""
    return [c.name for c in rig.spec.components].index(name)


def held(rig: Rig, tier: Tier, name: str) -> list[int]:
    """Positions (tokens) at which data of a component ends, over all paths, ascending."""
    places: Held = survey(rig.cache.tree)
    return sorted(len(key) // 4 for _, key in places[tier][index_of(rig, name)])


def free(rig: Rig, tier: Tier = DEVICE) -> list[int]:
    """Free slots by component."""
    return [pool.free_count for pool in rig.cache.controller.allocators[tier]]


def capacity(rig: Rig, tier: Tier = DEVICE) -> list[int]:
    """All slots by component."""
    return [pool.capacity for pool in rig.cache.controller.allocators[tier]]


def protected(rig: Rig, name: str, tier: Tier = DEVICE) -> int:
    """Tokens, or states, that locks keep."""
    component = index_of(rig, name)
    slots = rig.cache.tree.index[tier].protected[component]
    is_state = isinstance(rig.spec.components[component].reach, Point)
    return slots if is_state else slots * rig.page_size


def end(rig: Rig, *leases: Lease) -> None:
    """Release, let every copy finish; then no lock is left and all can be evicted."""
    for lease in leases:
        rig.cache.release(lease)
    rig.settle()
    rig.check()
    for index in rig.cache.tree.index:
        assert not any(index.protected), f"locked at idle: {index.protected}"
    rig.cache.flush()
    rig.check()
    assert free(rig) == capacity(rig) and free(rig, HOST) == capacity(rig, HOST)
