"""Ranks of a soak with something wrong on one of them; built in the ranks' own processes."""

from __future__ import annotations

from typing import Any

from banyan.engine.oracle_build import OracleCore, build_oracle_rank
from banyan.engine.rank_context import RankContext
from banyan.tiers.ops import CopyDone, CopyKind
from banyan.tree import Tier

BAD = 1
"""The rank that is not as the others."""


def one_host_byte(options: bytes, context: RankContext) -> OracleCore:
    """On one rank the first record of many a backup gets another byte after it was copied."""
    core = build_oracle_rank(options, context)
    copies = context.agreement.copies
    assert copies is not None
    engine, pool = copies.inner, core.cache.stack.host[0]
    plain, submit = engine.poll, engine.submit
    jobs: dict[int, Any] = {}

    def remember(job: Any) -> Any:
        jobs[job.op_id] = job
        return submit(job)

    def poll() -> list[CopyDone]:
        done = plain()
        for one in done:
            job = jobs.pop(one.op_id)
            if context.rank == BAD and one.op_id % 3 == 0 and job.kind is CopyKind.BACKUP:
                pool.data.numpy()[int(job.blocks[0].dst[0]), 3] ^= 0x10
        return done

    engine.submit, engine.poll = remember, poll  # type: ignore[method-assign]
    return core


def one_eviction(options: bytes, context: RankContext) -> OracleCore:
    """One rank evicts a page that the others keep."""
    core = build_oracle_rank(options, context)
    plain = core.step
    steps = 0

    def step() -> Any:
        nonlocal steps
        steps += 1
        if context.rank == BAD and steps == 30:
            pool = core.cache.stack.device_slots[0]
            got = core.cache.controller.reserve(Tier.DEVICE, [pool.free_count + 1, 0])
            assert isinstance(got, list)
            core.cache.controller.free(Tier.DEVICE, got)
        return plain()

    core.step = step  # type: ignore[method-assign]
    return core
