"""The driver's operations as Hypothesis state machines: what they find comes shrunk."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from banyan.tree import Mark
from tests.property.driver import Driver
from tests.support.rig import KINDS, Rig, toy_spec

SMALL = st.integers(0, 15)
POLICIES = st.sampled_from(("write_through", "write_back", "write_through_selective"))
SIZES = {"full": 20, "window": 12, "state": 4}


def machine(kind: str) -> type[RuleBasedStateMachine]:
    """The state machine for one mix of reaches."""

    class Requests(RuleBasedStateMachine):
        driver: Driver

        @initialize(page=st.sampled_from((1, 2)), policy=POLICIES, seed=st.integers(0, 9))
        def build(self, page: int, policy: str, seed: int) -> None:
            slots = [SIZES[c.name] for c in toy_spec(kind).components]
            rig = Rig(kind, page, 4, device=slots, host=slots, write_policy=policy)
            self.driver = Driver(rig, random.Random(seed))

        @rule(stream=st.integers(0, 1), shared=SMALL, extra=SMALL, flags=st.integers(0, 1023))
        def begin(self, stream: int, shared: int, extra: int, flags: int) -> None:
            self.driver.begin(stream, shared, extra, flags)

        @rule(which=SMALL, count=SMALL, commit=st.none() | st.sampled_from(list(Mark)))
        def compute(self, which: int, count: int, commit: Mark | None) -> None:
            self.driver.compute(which, count)
            if commit is not None:
                self.driver.commit(which, commit)

        @rule(which=SMALL)
        def release(self, which: int) -> None:
            self.driver.release(which)

        @rule(which=SMALL, ok=st.sampled_from((True, True, True, False)), poll=st.booleans())
        def finish(self, which: int, ok: bool, poll: bool) -> None:
            self.driver.finish(which, ok)
            if poll:
                self.driver.poll()

        @rule(which=SMALL)
        def start(self, which: int) -> None:
            self.driver.start(which)

        @rule(
            tier=st.sampled_from((0, 0, 1)),
            percents=st.lists(st.sampled_from((0, 50, 100, 101)), min_size=3, max_size=3),
        )
        def evict(self, tier: int, percents: list[int]) -> None:
            self.driver.evict(tier, percents)

        @rule(seconds=st.sampled_from((1, 40)), flush=st.sampled_from((False, False, True)))
        def step(self, seconds: int, flush: bool) -> None:
            self.driver.wait(seconds)
            if flush:
                self.driver.flush()

        def teardown(self) -> None:
            if hasattr(self, "driver"):
                self.driver.drain()

    Requests.__name__ = Requests.__qualname__ = f"Requests[{kind}]"
    return Requests


def check(kind: str, examples: int, steps: int) -> None:
    """Run the machine; the same examples every time."""
    torch.set_num_threads(1)
    run_state_machine_as_test(
        machine(kind),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_operations(kind: str) -> None:
    check(kind, examples=12, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_operations_at_length(kind: str) -> None:
    check(kind, examples=150, steps=80)
