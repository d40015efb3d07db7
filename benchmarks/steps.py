"""Times whole scheduler steps without a model: what a step costs beside the forward pass.

    python -m benchmarks.steps [--only TEXT]... [--steps N] [--json FILE]

256 requests run, each with a prompt of 4,608 tokens, on a cache without bytes and a model whose
logits are nothing; the scheduler, the tree, the allocators and the controller are the real ones. A
figure is of `Scheduler.step` alone: requests are submitted between the timed steps, and the garbage
collector is off. Kinds of step:

  decode           all 256 decode and none waits; at page 1 each takes a slot in each step
  turnover, shared 2,000 more wait. Answers have 112 tokens, so two or three requests end and start
                   in a step; 16 of them share all but the last 512 tokens of their prompts
  turnover, new    2,000 more wait, and nothing is shared: in each step a whole prompt is matched,
                   given slots by evicting as many, and committed; answers have 288 tokens

`+ transfers` adds a host tier, written through. Copies end 8 steps after they began, so that some
always run, and what only the host still has is loaded back; those of `decode` never end.
Medians are of the time that passed; on a machine with other work, look at the processor's time too.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.table import Table

from banyan.bench.report import machine, make_console, versions
from banyan.cache import PrefixCache
from banyan.engine.messages import GenerateRequest, Sampling
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.spec import CacheSpec, Point
from banyan.tiers.controller import TierOptions, WritePolicy
from benchmarks.byteless import COMPONENTS, NullCopyEngine, NullModel, byteless_stack
from benchmarks.yardstick import yardstick_us

RUNNING, WAITING = 256, 2_000
PROMPT, SHARED = 4_608, 4_096
GROUPS, TOGETHER, TIMES, STEMS_HELD = 64, 8, 16, 32
COPY_STEPS, NEVER = 8, 1 << 60
VOCABULARY = 128_000
PAGES = (64, 1)

DECODE_MS, QUEUE_MS = 2.0, 10.0
"""The targets: with none waiting, and with 2,000 waiting."""


@dataclass(frozen=True)
class Scenario:
    """One kind of step.

    Args:
        chunk: prompt tokens computed in a step, at most.
        output: tokens that a request generates, or None: more than are measured.
        shared: tokens at the start of a prompt that it has in common with its group.
        waiting: requests that wait at every step.
        transfers: whether there is a host tier.
    """

    name: str
    chunk: int
    output: int | None
    shared: int
    waiting: int
    transfers: bool = False

    @property
    def target_ms(self) -> float:
        """What its median should not exceed."""
        return QUEUE_MS if self.waiting else DECODE_MS


SCENARIOS = tuple(
    Scenario(name + " + transfers" * transfers, chunk, output, shared, waiting, transfers)
    for name, chunk, output, shared, waiting in (
        ("decode", 2_048, None, 0, 0),
        ("turnover, shared", 2_048, 112, SHARED, WAITING),
        ("turnover, new", PROMPT, 288, 0, WAITING),
    )
    for transfers in (False, True)
)


@dataclass(frozen=True)
class Row:
    """What was measured of one scenario in one configuration; times in milliseconds.

    Args:
        spent_median_ms, spent_p99_ms: of the processor; a step never waits.
        running: requests that run; started: requests whose prompt was finished; transfers: copies
            that run; host_tokens: prompt tokens loaded back. All as means of the steps.
        yardstick_us: how fast Python was then.
    """

    scenario: str
    components: str
    page_size: int
    median_ms: float
    p99_ms: float
    spent_median_ms: float
    spent_p99_ms: float
    target_ms: float
    steps: int
    running: float
    started: float
    transfers: float
    host_tokens: float
    yardstick_us: float = 1.0

    @property
    def met(self) -> bool:
        """Whether the median is within the target."""
        return self.median_ms <= self.target_ms


class Sample(NamedTuple):
    """One step: milliseconds that passed, and of the processor; what ran when it was over."""

    passed_ms: float
    spent_ms: float
    running: int
    copies: int


class Subject:
    """A scheduler filled to a scenario's steady state, and kept in it.

    Args:
        running: requests that run.
        steps: how many will be asked for, at most.
    """

    def __init__(
        self, scenario: Scenario, components: str, page_size: int, running: int, steps: int
    ) -> None:
        self.scenario, self._running = scenario, running
        self._filling = 4 * running
        self._output = scenario.output or self._filling + steps
        spec = CacheSpec(COMPONENTS[components], page_size)
        cache = PrefixCache(
            byteless_stack(spec, *self._sizes(spec)),
            NullCopyEngine(COPY_STEPS if scenario.output else NEVER),
            TierOptions(
                write_policy=WritePolicy.WRITE_THROUGH if scenario.transfers else WritePolicy.NONE,
                weigh_cost=False,
            ),
            clock=lambda: 0.0,
        )
        options = SchedulerOptions(chunk=scenario.chunk, max_running=running)
        self.scheduler = Scheduler(cache, NullModel(), options, clock=lambda: 0.0)
        self.cache, self.roster = cache, self.scheduler.roster
        self.counters = self.scheduler.counters
        self._rng = np.random.default_rng(0)
        self._stems = [self._tokens(scenario.shared) for _ in range(GROUPS)]
        self._submitted = 0

    def _sizes(self, spec: CacheSpec) -> tuple[list[int], list[int]]:
        """Slots by component, device and host: a quarter more than what runs can hold, so that
        most of what is kept is in use, and the rest is evicted all the time."""
        own = PROMPT - self.scenario.shared + self._output + spec.page_size
        stems = STEMS_HELD * self.scenario.shared
        pages = (5 * (self._running * own + stems) // 4) // spec.page_size
        device = [
            6 * self._running if isinstance(c.reach, Point) else pages for c in spec.components
        ]
        return device, [4 * n if self.scenario.transfers else 0 for n in device]

    def _tokens(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(0, VOCABULARY, count).tolist()
        return found

    def submit(self) -> None:
        """Queue one more request: of eight groups in turn, 16 of each, then of the next eight."""
        turn, place = divmod(self._submitted, TOGETHER * TIMES)
        stem = self._stems[(turn * TOGETHER + place % TOGETHER) % GROUPS]
        self.roster.submit(
            GenerateRequest(
                request_id=str(self._submitted),
                prompt=stem + self._tokens(PROMPT - len(stem)),
                sampling=Sampling(max_tokens=self._output, ignore_eos=True),
            )
        )
        self._submitted += 1

    def top_up(self) -> None:
        """Submit what is missing of the requests that should wait."""
        for _ in range(self.scenario.waiting - len(self.roster.waiting)):
            self.submit()

    def settle(self) -> None:
        """Reach the steady state: all run and decode, and where requests turn over, all that ran
        at first have ended and the pools are full."""
        for _ in range(self._running):
            self.submit()
        turns = 4 * self._output if self.scenario.output else self._filling
        for _ in range(turns):
            self.top_up()
            self.scheduler.step()
        if not self.scenario.output:
            assert len(self.roster.decoding) == self._running

    def sample(self, steps: int) -> Iterator[Sample]:
        """Time `steps` steps."""
        for _ in range(steps):
            self.top_up()
            processor, start = time.thread_time_ns(), time.perf_counter_ns()
            self.scheduler.step()
            passed, spent = time.perf_counter_ns() - start, time.thread_time_ns() - processor
            copies = len(self.cache.controller.operations)
            yield Sample(passed / 1e6, spent / 1e6, self.roster.running, copies)


def measure(
    scenario: Scenario, components: str, page_size: int, running: int = RUNNING, steps: int = 400
) -> Row:
    """One row: the steady state, then `steps` timed steps.

    Raises:
        InvariantError: the steps have left the cache inconsistent.
    """
    subject = Subject(scenario, components, page_size, running, steps)
    subject.settle()
    before = dict(subject.counters.prompt_tokens)
    gc.collect()
    gc.disable()
    try:
        samples = list(subject.sample(steps))
    finally:
        gc.enable()
    prompts = {k: n - before[k] for k, n in subject.counters.prompt_tokens.items()}
    subject.cache.check()
    times = [s.passed_ms for s in samples]
    spent = [s.spent_ms for s in samples]
    return Row(
        scenario=scenario.name,
        components=components,
        page_size=page_size,
        median_ms=statistics.median(times),
        p99_ms=float(np.percentile(times, 99)),
        spent_median_ms=statistics.median(spent),
        spent_p99_ms=float(np.percentile(spent, 99)),
        target_ms=scenario.target_ms,
        steps=steps,
        running=statistics.mean(s.running for s in samples),
        started=sum(prompts.values()) / PROMPT / steps,
        transfers=statistics.mean(s.copies for s in samples),
        host_tokens=prompts["host"] / steps,
        yardstick_us=yardstick_us(),
    )


def _table(rows: list[Row]) -> Table:
    title = "A scheduler step without the model, ms; what misses its target is marked"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("step", "components"):
        table.add_column(name)
    for name in (
        "page",
        "median",
        "p99",
        "CPU p99",
        "target",
        "running",
        "started",
        "copies",
        "host",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.scenario,
            row.components,
            str(row.page_size),
            f"{row.median_ms:.2f}" + ("" if row.met else " >"),
            f"{row.p99_ms:.2f}",
            f"{row.spent_p99_ms:.2f}",
            f"{row.target_ms:g}",
            f"{row.running:.0f}",
            f"{row.started:.1f}",
            f"{row.transfers:.0f}",
            f"{row.host_tokens:,.0f}",
        )
    return table


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Rows whose `step, components, page N` has this text; may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each row.")] = 400,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time scheduler steps without a model."""
    console = make_console()
    rows = []
    for page in PAGES:
        for scenario in SCENARIOS:
            for components in COMPONENTS:
                name = f"{scenario.name}, {components}, page {page}"
                if only and not all(text in name for text in only):
                    continue
                with console.status(name):
                    rows.append(measure(scenario, components, page, steps=steps))
    console.print(_table(rows))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        found = [asdict(row) | {"met": row.met} for row in rows]
        result = {"versions": versions(), "machine": machine(), "rows": found}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
