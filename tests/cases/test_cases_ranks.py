"""Cases C037, C101 and C103: what ranks must not do by themselves.

Two ranks of the simulation (`tests/ranks`), whose copies take as many polls as a case says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from banyan.engine.messages import Output
from banyan.lease import PageTable
from banyan.ranks import Agreement
from banyan.tiers.journal import Entry, Journal
from banyan.tiers.operation import NO_SLOTS
from banyan.tree import Tier
from tests.cases.scene import DEVICE, HOST, A, B, C, free, insert
from tests.ranks.copies import CopyOdds
from tests.ranks.defects import collective_skipped
from tests.ranks.engine import Parts
from tests.ranks.fabric import Divergence, SimulatedFabric
from tests.ranks.scenario import Ask, Events, Scenario, spec_of
from tests.ranks.simulation import Simulation
from tests.support.rig import Rig

STEM = tuple(range(1, 33))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Recorded(Simulation):
    """Keeps, by rank and step, how many calls were made and how many copies had not ended."""

    def __init__(
        self, scenario: Scenario, polls: Sequence[int], parts: Parts | None = None
    ) -> None:
        super().__init__(scenario, parts or Parts())
        self.calls: list[list[int]] = [[] for _ in polls]
        self.unfinished: list[list[int]] = [[] for _ in polls]
        self.news: list[Output] = []
        for node, slow in zip(self.ranks, polls, strict=True):
            node.copies.odds = CopyOdds(at_once=0.0, quick=slow, slow=slow)

    def observe(self, rank: int, outputs: Sequence[Output]) -> None:
        """As the real one."""
        super().observe(rank, outputs)
        self.calls[rank].append(self.fabric.places[rank])
        self.unfinished[rank].append(self.ranks[rank].copies.unfinished)
        if rank == 0:
            self.news += outputs

    def history(self, rank: int) -> list[Entry]:
        """All operations of a rank."""
        return self.ranks[rank].context.journal.tail()


def two_ranks(asks: dict[int, Ask]) -> Scenario:
    """Two ranks with room for everything; requests by the step before which they come."""
    return Scenario(
        seed=0,
        ranks=2,
        spec=spec_of("full", 4, 8, False),
        shared=False,
        exact=False,
        device=(32,),
        host=(64,),
        write_policy="write_through",
        evict_policy="lru",
        threshold=1,
        weigh_cost=False,
        timeout_s=100.0,
        chunk=16,
        state_interval=None,
        max_running=4,
        order="fcfs",
        odds=CopyOdds(),
        picky=False,
        model_fails=0.0,
        asks={ask.name: ask for ask in asks.values()},
        events={step: Events([ask]) for step, ask in asks.items()},
    )


def ask(name: str, prompt: Sequence[int], *, evicts: bool = False) -> Ask:
    """A request for three tokens."""
    return Ask(
        name=name,
        prompt=tuple(prompt),
        max_tokens=3,
        seed=None,
        use_cache=True,
        priority=0,
        timeout_s=None,
        stored=(),
        evicts=evicts,
    )


@pytest.fixture
def journalled() -> Iterator[tuple[Rig, Rig]]:
    """Two equal caches that write down what they do."""
    rigs = Rig("full+window+state"), Rig("full+window+state")
    for rig in rigs:
        rig.cache.journal = rig.cache.controller.journal = Journal()
    yield rigs


def test_c037_giving_back_nothing_changes_nothing(journalled: tuple[Rig, Rig]) -> None:
    plain, padded = journalled
    width = len(plain.spec.components)
    assert len(PageTable(3).drop_before(9)) == 0 and len(PageTable().owned) == 0
    for prompt in (A[0:33], [*A[0:16], *B[0:17]], C[0:40], A[0:33]):
        insert(plain, prompt)
        for tier in Tier:
            padded.cache.controller.free(tier, [NO_SLOTS] * width)
            for pool in padded.cache.controller.allocators[tier]:
                pool.free(np.array([], np.int32))
        insert(padded, prompt)
        assert free(padded) == free(plain) and free(padded, HOST) == free(plain, HOST)
    plain.evict_device()
    padded.evict_device()
    assert padded.cache.journal is not None and plain.cache.journal is not None
    assert padded.cache.journal.tail() == plain.cache.journal.tail()
    counts = [2, 1, 1]
    first, second = (rig.cache.controller.reserve(DEVICE, counts) for rig in journalled)
    assert isinstance(first, list) and isinstance(second, list)
    assert [s.tolist() for s in first] == [s.tolist() for s in second]


def test_c101_ranks_report_in_the_same_steps_though_one_is_a_step_ahead() -> None:
    run = Recorded(two_ranks({0: ask("one", STEM), 9: ask("two", STEM[::-1])}), polls=(2, 3))
    run.run()
    first, second = run.unfinished
    ahead = [step for step, left in enumerate(first) if not left and second[step]]
    assert ahead, "rank 0 had none of its own in the air while rank 1 had"
    assert run.calls[0] == run.calls[1], "all report in a step, or none does"
    assert run.history(0) == run.history(1)


def test_c101_a_rank_that_skips_its_report_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = collective_skipped(monkeypatch)
    with pytest.raises(Divergence, match=r"call \d+: rank \d calls|deadlock"):
        Recorded(two_ranks({0: ask("one", STEM)}), polls=(2, 3), parts=parts).run()


@pytest.mark.parametrize(("step", "host"), [(3, 0), (5, 0), (14, 32)])
def test_c103_a_hit_is_what_all_ranks_have(step: int, host: int) -> None:
    """The second request comes when rank 0 has all of the prefix on host, rank 1 not yet or too."""
    asks = {0: ask("one", STEM), step: ask("two", [*STEM, 99, 98], evicts=True)}
    run = Recorded(two_ranks(asks), polls=(1, 8))
    run.run()
    left = [counts[step - 1] for counts in run.unfinished]
    assert left[0] == 0 and bool(left[1]) == (not host)
    [usage] = [o.usage for o in run.news if o.request_id == "two" and o.usage is not None]
    assert usage.host == host, "and the same on rank 1: the simulation compares receipts"
    assert run.history(0) == run.history(1)


def test_c103_a_hit_in_storage_is_what_all_ranks_found() -> None:
    node = SimulatedFabric(2, random.Random(0))
    journals = [Journal(), Journal()]
    used: dict[int, list[int]] = {}

    def look_up(rank: int, found: int) -> None:
        used[rank] = Agreement(node.end(rank), journals[rank]).hits([found, 48])

    node.run([lambda: look_up(0, 32), lambda: look_up(1, 16)])
    assert used == {0: [16, 48], 1: [16, 48]}
    assert journals[0].tail() == journals[1].tail() and journals[0].count == 1
