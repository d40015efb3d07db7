"""Streams of requests that a cache is judged by, and a server without bytes to run them on.

What matters here is which tokens are found, so `NullModel` reads and writes nothing; everything
else, the cache and the scheduler, is the product's. The figure is the token hit rate: cached prompt
tokens by all prompt tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from banyan.cache import PrefixCache
from banyan.engine.messages import GenerateRequest, Output, Sampling, Usage
from banyan.engine.plans import SeqInput
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.lease import Lease
from banyan.rolling import Rolling
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tree import Mark, Node
from tests.support.manual_engine import ManualCopyEngine
from tests.support.rig import toy_spec, toy_stack
from tests.support.toy_model import VOCAB, ToyModel, prefix_hash


class WholePath(Rolling):
    """The rule to compare with: each use refreshes the windows and states of the whole path, and
    no snapshot is refused or superseded."""

    def used(self, lease: Lease) -> None:
        """Refresh everything above the boundary that was read."""
        self._refresh(lease.node)

    def published(self, lease: Lease, node: Node, mark: Mark) -> bool:
        """Refresh everything above the new boundary; all that is one stays."""
        self._refresh(node)
        return mark is not Mark.PASSED

    def _refresh(self, node: Node) -> None:
        above = []
        while node.parent is not None:
            above.append(node)
            node = node.parent
        for node in reversed(above):
            self._tree.use(node)


class NullModel(ToyModel):
    """Says something at once: its next token depends on the last one and the position."""

    def _one(self, seq: SeqInput) -> int:
        return prefix_hash(seq.tokens[-1:], seq.stop)


class Line(Protocol):
    """Where requests are sent to and answers come from."""

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request."""

    def step(self) -> list[Output]:
        """One step, and its news."""


class Server:
    """A scheduler and a cache over `NullModel`; device only.

    Args:
        kind, page_size, window: as in `toy_spec`.
        device: slots by component.
        whole_path: judge recency by `WholePath`.
        options: of `SchedulerOptions`.
    """

    def __init__(
        self,
        kind: str,
        device: list[int],
        *,
        page_size: int,
        window: int = 8,
        whole_path: bool = False,
        **options: object,
    ) -> None:
        stack = toy_stack(toy_spec(kind, page_size, window), device, [])
        self.cache = PrefixCache(
            stack, ManualCopyEngine(stack), TierOptions(WritePolicy.NONE), clock=lambda: 0.0
        )
        if whole_path:
            self.cache.rolling = WholePath(self.cache.tree, room=1)
        self._scheduler = Scheduler(
            self.cache,
            NullModel(stack),
            SchedulerOptions(**options),  # type: ignore[arg-type]
            clock=lambda: 0.0,
        )

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request."""
        self._scheduler.roster.submit(request)

    def step(self) -> list[Output]:
        """One step, and its news."""
        return self._scheduler.step()


@dataclass(frozen=True, slots=True)
class Question:
    """One request of a workload.

    Args:
        hints: as in `GenerateRequest.cache_hints`.
    """

    prompt: list[int]
    max_tokens: int
    hints: tuple[int, ...] = ()


def serve(
    line: Line,
    order: Sequence[int],
    question: Callable[[int], Question],
    answered: Callable[[int, list[int]], None] = lambda client, tokens: None,
    in_flight: int = 1,
) -> list[Usage]:
    """Send one request after the other, the next as soon as fewer than `in_flight` are open.

    Args:
        order: who sends one, in turn; a client waits for its answer before it sends another.
        question: what the client sends now.
        answered: told of each answer before that client's next question.

    Returns:
        The receipts, in the order of `order`.
    """
    receipts: dict[int, Usage] = {}
    said: dict[str, list[int]] = {}

    def run_while(waits: Callable[[], bool]) -> None:
        while waits():
            for output in line.step():
                said[output.request_id] += output.tokens
                if output.finish_reason is not None:
                    assert output.finish_reason == "length" and output.usage is not None, output
                    serial = int(output.request_id)
                    receipts[serial] = output.usage
                    answered(order[serial], said.pop(output.request_id))

    def has_no_turn(client: int) -> bool:
        return len(said) >= in_flight or any(order[int(name)] == client for name in said)

    for serial, client in enumerate(order):
        run_while(partial(has_no_turn, client))
        asked = question(client)
        said[str(serial)] = []
        line.submit(
            GenerateRequest(
                request_id=str(serial),
                prompt=asked.prompt,
                sampling=Sampling(max_tokens=asked.max_tokens, ignore_eos=True),
                cache_hints=asked.hints,
            )
        )
    run_while(lambda: bool(said))
    return [receipts[serial] for serial in range(len(order))]


def hit_rate(receipts: Sequence[Usage]) -> float:
    """Cached prompt tokens by all prompt tokens."""
    return cached_tokens(receipts) / sum(u.prompt_tokens for u in receipts)


def cached_tokens(receipts: Sequence[Usage]) -> int:
    """Prompt tokens that were not computed."""
    return sum(u.device + u.host for u in receipts)


# ---- conversations -------------------------------------------------------------------------------


def arrivals(order: str, clients: int, rounds: int, seed: int = 1) -> list[int]:
    """Who speaks next: `random` think times (exponential), `shuffled` rounds or `cyclic` ones."""
    rng = random.Random(seed)
    if order == "random":
        times = []
        for client in range(clients):
            now = 0.0
            for _ in range(rounds):
                now += rng.expovariate(1)
                times.append((now, client))
        return [client for _, client in sorted(times)]
    everybody = list(range(clients))
    if order == "cyclic":
        return everybody * rounds
    assert order == "shuffled", order
    return [client for _ in range(rounds) for client in rng.sample(everybody, clients)]


@dataclass
class Chats:
    """Conversations that share a system prompt; each question goes on from the last answer.

    Args:
        system, message, answer: their lengths (tokens).
        hints: which ends of messages are given as hints; None for all.
    """

    clients: int
    system: int
    message: int
    answer: int
    hints: tuple[int, ...] | None = ()

    def __post_init__(self) -> None:
        self._rng = random.Random(2)
        self._history = [self._tokens(self.system)] * self.clients
        self._ends: list[list[int]] = [[self.system] for _ in range(self.clients)]

    def question(self, client: int) -> Question:
        """All that was said, and a new message."""
        self._say(client, self._tokens(self.message))
        ends = self._ends[client]
        hints = ends if self.hints is None else [ends[i] for i in self.hints]
        return Question(self._history[client], self.answer, tuple(hints))

    def answered(self, client: int, tokens: list[int]) -> None:
        """Take the answer into the conversation."""
        self._say(client, tokens)

    def _say(self, client: int, tokens: list[int]) -> None:
        self._history[client] = self._history[client] + tokens
        self._ends[client].append(len(self._history[client]))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]


# ---- shared prefixes -----------------------------------------------------------------------------


def shared_prefixes(
    groups: int, each: int, shared: int, own: int, tokens: Sequence[int], seed: int = 3
) -> list[list[int]]:
    """Prompts of `each` visitors to `groups` prefixes of exactly `shared` tokens, group by group
    within a round of visitors; `own` tokens follow, of which the first is each visitor's."""
    rng = random.Random(seed)
    prefixes = [[tokens[group], *rng.choices(tokens, k=shared - 1)] for group in range(groups)]
    return [
        [*prefix, tokens[visitor], *rng.choices(tokens, k=own - 1)]
        for visitor in range(each)
        for prefix in prefixes
    ]
