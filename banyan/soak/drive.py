"""Plays a workload against an engine core, disturbs it, and compares every answer.

Owns the order of things inside a round: who is submitted, who is aborted, when the cache is flushed
or checked. Knows the core by its interface and not how many ranks it has. Clock, waiting and
randomness come from outside. Called from the thread that owns the core.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from banyan.bench.report import percentile
from banyan.bench.work import Prompt
from banyan.engine.messages import GenerateRequest, Output, Sampling
from banyan.engine.oracle_hash import TOKENS, answer
from banyan.soak.options import SoakOptions
from banyan.soak.results import Differences, Round, copies_of

_QUIET_STEP_S = 0.0005
"""A step without news that was shorter than this had nothing to do but wait for copies."""

_QUIET_WAIT_S = 0.0005

_AT_ONCE = 8
"""Requests submitted between two steps: more than a step can start, and little to send to ranks."""

_SETTLE_S = 60.0
"""The longest that running copies are waited for at the end."""


class Core(Protocol):
    """What a soak needs of an engine; `EngineCore` and cores of several ranks have it."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts fixed at start."""

    @property
    def cache(self) -> Any:
        """The cache of this process."""

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do or to say."""

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def step(self) -> list[Output]:
        """One scheduler step."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""

    def flush(self) -> dict[str, Any]:
        """Drop what no request holds."""

    def order(self, name: str) -> Any:
        """Carry out what the core can do by that name, on all ranks."""

    def check(self) -> dict[str, Any]:
        """Verify every invariant; raises `InvariantError`."""

    def close(self) -> None:
        """Stop everything."""


class RandomTokens:
    """Random tokens below the oracle's vocabulary, one object per token id."""

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """See `banyan.bench.work.TokenSource`. Cost: about 0.15 us a token."""
        return rng.choices(TOKENS, k=count)


@dataclass(slots=True)
class _Open:
    """A request on its way; `abort_at` is a step, or None."""

    prompt: Prompt
    abort_at: int | None
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Tally:
    """What a round has seen so far."""

    requests: int
    began: float
    ended: int = 0
    aborted: int = 0
    ttft_s: list[float] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)


class Driver:
    """One soak on one core.

    Args:
        clock: seconds, monotonic.
        sleep: waits so many seconds, when a step found nothing to do.
        on_end: told the round (from 0) whenever a request has ended.

    Attributes:
        differences: what was not as it should be.
        rounds: those played.
        steps: taken so far.
    """

    def __init__(
        self,
        core: Core,
        options: SoakOptions,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        on_end: Callable[[int], None] = lambda turn: None,
    ) -> None:
        self._core, self._options = core, options
        self._clock, self._sleep, self._on_end = clock, sleep, on_end
        self._rng = random.Random(f"{options.seed}/disturbances")
        self._open: dict[str, _Open] = {}
        self._aborts: list[tuple[int, str]] = []
        self._attached = True
        self._goes_on = options.workload == "multi-turn"
        self.differences = Differences()
        self.rounds: list[Round] = []
        self.steps = 0

    def play(self) -> None:
        """All rounds; then wait for the copies that are still running.

        Raises:
            InvariantError: a check found something; the core cannot be trusted any further.
            RankError: the ranks have drifted apart, or one is gone.
        """
        rounds = self._options.make_workload().play(RandomTokens())
        prompts = next(rounds, None)
        while prompts is not None:
            answers = self._round(prompts)
            try:
                prompts = rounds.send(answers)
            except StopIteration:
                prompts = None
        self.settle()

    def settle(self) -> None:
        """Step until no copy is running; a difference when that takes too long."""
        until = self._clock() + _SETTLE_S
        while self._core.cache.controller.operations:
            if self._clock() > until:
                self.differences.add(f"copies are still running {_SETTLE_S:g} s after the end")
                return
            self._step()

    # ---- a round ---------------------------------------------------------------------------------

    def _round(self, prompts: list[Prompt]) -> dict[int, list[int]]:
        turn = len(self.rounds)
        before = self._figures()
        tally = _Tally(len(prompts), self._clock())
        pending = deque(prompts)
        prompts.clear()  # each is let go of when it has ended: a round's prompts are large
        most = self._options.max_running + self._options.ahead
        while pending or self._open:
            for _ in range(min(_AT_ONCE, len(pending), most - len(self._open))):
                self._submit(turn, pending.popleft())
            for output in self._step():
                self._take(turn, tally, output)
            self._disturb(tally)
        if not self._attached:
            self._attach()
        self.rounds.append(self._summary(tally, before))
        return tally.answers

    def _submit(self, turn: int, prompt: Prompt) -> None:
        name = f"{turn}/{prompt.index}"
        options = self._options
        self._open[name] = _Open(prompt, None)
        if options.aborts and self._rng.random() < options.aborts:
            after = self._rng.randrange(2 * options.output + 2)
            self._open[name].abort_at = self.steps + after
            self._aborts.append((self.steps + after, name))
        sampling = Sampling(max_tokens=options.output, ignore_eos=True)
        self._core.submit(GenerateRequest(request_id=name, prompt=prompt.tokens, sampling=sampling))

    def _step(self) -> list[Output]:
        """One step; after one that found nothing to do, copies get the processor for a moment."""
        began = self._clock()
        outputs = self._core.step()
        self.steps += 1
        if not outputs and self._clock() - began < _QUIET_STEP_S:
            self._sleep(_QUIET_WAIT_S)
        return outputs

    def _take(self, turn: int, tally: _Tally, output: Output) -> None:
        """The news of one request."""
        here = self._open.get(output.request_id)
        if here is None:
            self.differences.add(f"news of {output.request_id}, which is not on its way")
            return
        if output.tokens and not here.tokens:
            tally.ttft_s.append(self._clock() - tally.began)
        here.tokens.extend(output.tokens)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._judge(here, output)
            tally.ended += 1
            tally.aborted += output.finish_reason == "abort"
            if self._goes_on and output.finish_reason == "length":
                tally.answers[here.prompt.index] = here.tokens
            self._on_end(turn)

    def _judge(self, here: _Open, output: Output) -> None:
        """Compare an answer with what the prompt alone says it must be."""
        reason, name = output.finish_reason, output.request_id
        if reason not in ("length", "abort"):
            self.differences.add(f"request {name} ended with {reason}: {output.error}")
        elif reason == "abort" and here.abort_at is None:
            self.differences.add(f"request {name} was aborted by nobody")
        elif reason == "length" and len(here.tokens) != self._options.output:
            self.differences.add(f"request {name} has {len(here.tokens)} tokens")
        right = answer(here.prompt.tokens, len(here.tokens))
        if here.tokens != right:
            at = next(i for i, (a, b) in enumerate(zip(here.tokens, right, strict=True)) if a != b)
            self.differences.add(
                f"request {name}: token {at} of the answer is {here.tokens[at]}, not {right[at]}"
            )

    # ---- disturbances ----------------------------------------------------------------------------

    def _disturb(self, tally: _Tally) -> None:
        options = self._options
        if self._aborts:
            due = [name for at, name in self._aborts if at <= self.steps]
            self._aborts = [part for part in self._aborts if part[0] > self.steps]
            for name in due:
                if name in self._open:
                    self._core.abort(name)
        if options.flush_every and self.steps % options.flush_every == 0:
            self._core.flush()
        if options.detach:
            self._switch_host(tally)
        if options.check_every and self.steps % options.check_every == 0:
            self._core.check()

    def _switch_host(self, tally: _Tally) -> None:
        """Off for the middle third of a round."""
        wanted = not tally.requests <= 3 * tally.ended < 2 * tally.requests
        if wanted != self._attached:
            if wanted:
                self._attach()
            else:
                self._core.order("detach_host")
                self._attached = False

    def _attach(self) -> None:
        self._core.order("attach_host")
        self._attached = True

    # ---- figures ---------------------------------------------------------------------------------

    def _figures(self) -> dict[str, int]:
        """Monotone totals, and the memory in use."""
        stats = self._core.stats()
        engine = stats["engine"]
        return {
            **copies_of(stats),
            **engine["prompt_tokens"],
            "steps": self.steps,
            "retractions": engine["retractions"],
            "checked_bytes": sum(facts["checked_bytes"] for facts in stats["ranks"]),
            "memory_bytes": sum(facts["rss_bytes"] for facts in stats["ranks"]),
        }

    def _summary(self, tally: _Tally, before: dict[str, int]) -> Round:
        duration_s = self._clock() - tally.began
        after = self._figures()
        memory = after.pop("memory_bytes")
        return Round(
            requests=tally.requests,
            aborted=tally.aborted,
            duration_s=duration_s,
            ttft_p50_s=percentile(tally.ttft_s, 50),
            ttft_p99_s=percentile(tally.ttft_s, 99),
            memory_bytes=memory,
            **{name: value - before[name] for name, value in after.items()},
        )
