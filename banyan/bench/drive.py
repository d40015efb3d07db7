"""Plays a workload against a server: arrival times, concurrency, rounds.

Owns the asyncio loop of a run. Knows the client and the workload; knows nothing of how the server
was started or how results are shown. A round ends when its last answer has; only then does the
next one start.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import httpx
import msgspec

from banyan.bench.client import Client, Sample
from banyan.bench.work import Answers, Prompt, TokenSource, Workload
from banyan.errors import ConfigError


class RoundResult(msgspec.Struct, frozen=True):
    """All samples of one round, in sending order, and its length in seconds."""

    duration_s: float
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests are let go.

    Args:
        request_rate: mean arrivals per second, exponentially spaced; 0 or infinity: all at once.
        concurrency: requests on their way at the same time; 0: no bound.
        seed: draws the gaps between arrivals.
    """

    request_rate: float = 0.0
    concurrency: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.request_rate) or self.request_rate < 0:
            raise ConfigError(
                "--request-rate", f"{self.request_rate} is no rate", "Use 0 (all at once) or more"
            )
        if self.concurrency < 0:
            raise ConfigError(
                "--concurrency", f"{self.concurrency} is negative", "Use 0 (no bound) or more"
            )

    def arrivals(self, count: int, turn: int) -> list[float]:
        """Seconds from the start of round `turn` at which each request is due, ascending."""
        if self.request_rate == 0 or math.isinf(self.request_rate):
            return [0.0] * count
        rng = random.Random(f"{self.seed}/arrivals/{turn}")
        due, times = 0.0, []
        for _ in range(count):
            times.append(due)
            due += rng.expovariate(self.request_rate)
        return times


OnSample = Callable[[int, Sample], None]
"""Called with the round and each sample as it comes in."""


def play(
    workload: Workload, source: TokenSource, url: str, model: str, pace: Pace, on_sample: OnSample
) -> list[RoundResult]:
    """Play all rounds of `workload` against the server at `url`; blocks until the last answer."""
    return asyncio.run(_play(workload, source, url, model, pace, on_sample))


async def _play(
    workload: Workload, source: TokenSource, url: str, model: str, pace: Pace, on_sample: OnSample
) -> list[RoundResult]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    results: list[RoundResult] = []
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        runner = _Round(Client(http, model, time.perf_counter), workload.output, pace, on_sample)
        rounds = workload.play(source)
        prompts: list[Prompt] | None = next(rounds, None)
        while prompts is not None:
            result, answers = await runner.run(prompts, len(results))
            results.append(result)
            try:
                prompts = rounds.send(answers)
            except StopIteration:
                prompts = None
    return results


@dataclass(frozen=True, slots=True)
class _Round:
    client: Client
    output: int
    pace: Pace
    on_sample: OnSample

    async def run(self, prompts: list[Prompt], turn: int) -> tuple[RoundResult, Answers]:
        """Send one round's prompts as the pace says; return when all are answered."""
        gate = asyncio.Semaphore(self.pace.concurrency) if self.pace.concurrency else nullcontext()
        start = self.client.clock()
        answers: dict[int, list[int]] = {}

        async def one(prompt: Prompt, due: float) -> Sample:
            await asyncio.sleep(max(0.0, start + due - self.client.clock()))
            async with gate:
                sample, tokens = await self.client.complete(prompt, self.output, start)
            if sample.error is None:
                answers[prompt.index] = tokens
            self.on_sample(turn, sample)
            return sample

        due = self.pace.arrivals(len(prompts), turn)
        samples = await asyncio.gather(*map(one, prompts, due))
        return RoundResult(self.client.clock() - start, list(samples)), answers
