"""The check of a whole cache (INV-01 to INV-09) and its figures, kept apart from what they check.

Reads a `PrefixCache` and changes nothing. Called from the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from banyan.errors import InvariantError
from banyan.tree.check import Hold, findings, holds_of_lease
from banyan.tree.node import Tier

if TYPE_CHECKING:
    from banyan.cache import PrefixCache


def check(cache: PrefixCache) -> None:
    """Raise `InvariantError` with all findings, or return. Cost: O(nodes + slots)."""
    found = findings(cache.tree, holds(cache))
    for tier in Tier:
        for component in range(cache.tree.width):
            found += _conservation(cache, tier, component)
    if found:
        raise InvariantError(found)


def holds(cache: PrefixCache) -> Iterator[Hold]:
    """Every lock that leases and running operations have."""
    for lease in cache.leases:
        if lease.loading is None and not lease.broken:
            yield from holds_of_lease(cache.tree, lease.node, lease.lock_start)
        if lease.borrowed is not None:
            yield Hold(Tier.DEVICE, lease.borrowed, 0)
    for op in cache.controller.operations.values():
        for tier, node in op.paths:
            yield Hold(tier, node, 0)
        for claim in op.claims:
            if claim.component:
                yield Hold(claim.pinned, claim.node, claim.component)


def owners(cache: PrefixCache, tier: Tier, component: int) -> dict[str, npt.NDArray[np.int32]]:
    """Slots by who has them: `tree`, `requests`, `transfers`; each int32[n]."""
    parts: dict[str, list[npt.NDArray[np.int32]]] = {"tree": [], "requests": [], "transfers": []}
    for node in cache.tree.nodes():
        slots = node.parts[tier][component].slots
        if slots is not None:
            parts["tree"].append(slots)
    if tier is Tier.DEVICE:
        for lease in cache.leases:
            if component in cache.tree.need.points:
                owned = np.array(lease.states(component).owned, np.int32)
            else:
                owned = lease.pages(component).owned
            parts["requests"].append(owned)
    for op in cache.controller.operations.values():
        if op.target is tier:
            parts["transfers"] += [c.dst for c in op.claims if c.component == component]
    empty = np.empty(0, np.int32)
    return {who: np.concatenate([empty, *lists]) for who, lists in parts.items()}


def _conservation(cache: PrefixCache, tier: Tier, component: int) -> Iterator[str]:
    """INV-01, INV-02: every slot is in exactly one place."""
    pool = cache.controller.allocators[tier][component]
    name = f"{tier.name.lower()}/{cache.spec.components[component].name}"
    seen = pool.is_free().astype(np.int32)
    if int(seen.sum()) != pool.free_count:
        yield f"INV-01 {name}: the free count is {pool.free_count}, the bitmap has {seen.sum()}"
    held = owners(cache, tier, component)
    for slots in held.values():
        np.add.at(seen, slots, 1)
    for slot in np.flatnonzero(seen != 1)[:8]:
        who = [w for w, slots in held.items() if slot in slots]
        if pool.is_free()[slot]:
            who.append("free list")
        yield f"INV-02 {name}: slot {slot} has {seen[slot]} owners ({', '.join(who) or 'leaked'})"


def stats(cache: PrefixCache) -> dict[str, Any]:
    """Gauges by tier and component, counters by kind and reason (INV-21)."""
    controller = cache.controller
    tiers: dict[str, Any] = {}
    for tier in Tier:
        index = cache.tree.index[tier]
        tiers[tier.name.lower()] = {
            component.name: {
                "capacity": pool.capacity,
                "free": pool.free_count,
                "evictable": index.evictable[c],
                "protected": index.protected[c],
                "other": pool.capacity - pool.free_count - index.evictable[c] - index.protected[c],
                "record_bytes": controller.record_bytes[c],
            }
            for c, (component, pool) in enumerate(
                zip(cache.spec.components, controller.allocators[tier], strict=True)
            )
        }
    copies = {
        kind.value: {
            "jobs": t.jobs,
            "failed": t.failed,
            "bytes": t.moved_bytes,
            "seconds": t.seconds,
            "verified": t.verified,
            "mismatched": t.mismatched,
            "reasons": dict(t.reasons),
        }
        for kind, t in controller.totals.items()
    }
    counts = {**controller.counts, **cache.counts}
    return {
        "page_size": cache.page_size,
        "leases": len(cache.leases),
        "operations": len(controller.operations),
        "tiers": tiers,
        "copies": copies,
        "misses": {
            name.removeprefix("miss_"): n for name, n in counts.items() if name.startswith("miss_")
        },
        "counts": {name: n for name, n in counts.items() if not name.startswith("miss_")},
    }
