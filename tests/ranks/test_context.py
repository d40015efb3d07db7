"""What ranks settle between them before they start: room, and who is on which machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from banyan.engine import rank_context
from banyan.engine.rank_context import RankContext
from banyan.pools.sizing import plan_sizes
from banyan.ranks import Fabric
from tests.ranks.manual import on_ranks
from tests.support.rig import toy_spec

SIZES = {"max_running": 2, "chunk": 8, "state_interval": None}
SPEC = toy_spec("full+window+state", 4, 8)


def test_the_rank_with_the_least_room_decides_pool_by_pool() -> None:
    plan = plan_sizes(SPEC, device_bytes=1 << 16, host_bytes=1 << 17, **SIZES)  # type: ignore[arg-type]

    def settle(fabric: Fabric) -> list[list[int]]:
        device = list(plan.device)
        poorer = fabric.rank % len(device)  # every rank has less of another pool
        device[poorer] = replace(device[poorer], slots=device[poorer].slots - 1 - fabric.rank)
        own = replace(plan, device=tuple(device))
        agreed = RankContext(fabric).agree_plan(own)
        return [[size.slots for size in tier] for tier in (agreed.device, agreed.host)]

    found = on_ranks(3, settle)
    least = [size.slots - 1 - rank for rank, size in enumerate(plan.device)]
    assert found == [[least, [size.slots for size in plan.host]]] * 3


def test_ranks_share_memory_with_those_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(fabric: Fabric) -> tuple[list[int], bool]:
        monkeypatch.setattr(rank_context, "_machine", lambda: b"ab"[fabric.rank % 2 :][:1])
        context = RankContext(fabric)
        return context.find_node(), context.sharing().writes

    found = on_ranks(5, look)
    assert found == [
        ([0, 2, 4], True),
        ([1, 3], True),
        ([0, 2, 4], False),
        ([1, 3], False),
        ([0, 2, 4], False),
    ]
