"""What the benchmarks ask: prompts as token ids, drawn from a seed.

Owns the workloads (`SharedPrefix`, `MultiTurn`) and where their tokens come from (`Vocabulary`,
`TextTokens`). Knows no server and no clock: the same seed gives the same prompts in the same
order. A workload plays as a generator, because the next turn of a conversation needs the answers
to the last one.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from banyan.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send.

    Args:
        index: names the prompt (or the client) across rounds.
        group: prompts of one group begin alike.
        tokens: the token ids, at least one.
    """

    index: int
    group: int
    tokens: list[int]


Answers: TypeAlias = Mapping[int, list[int]]
"""By prompt index, the token ids that were answered in the round before."""

Play: TypeAlias = Generator[list[Prompt], Answers, None]
"""Yields a round's prompts in sending order, and is sent that round's answers."""


class TokenSource(Protocol):
    """Where prompt tokens come from."""

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` token ids, decided by `rng` alone."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens drawn evenly and independently from `[0, size)`, without the `special` ones."""

    size: int
    special: frozenset[int] = frozenset()

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` ordinary token ids. Cost: O(count)."""
        tokens: list[int] = []
        while len(tokens) < count:
            token = rng.randrange(self.size)
            if token not in self.special:
                tokens.append(token)
        return tokens


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Runs of a real text's tokens, each from a place that `rng` chooses; the text wraps around."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise ConfigError("--text", "the file has fewer than 2 tokens", "Give a longer text")

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` consecutive token ids of the text. Cost: O(count)."""
        start = rng.randrange(len(self.tokens))
        return [self.tokens[(start + i) % len(self.tokens)] for i in range(count)]


class Workload(Protocol):
    """A benchmark's requests, round by round."""

    @property
    def rounds(self) -> int:
        """How many rounds are played."""

    @property
    def output(self) -> int:
        """Tokens to answer, exactly, per request."""

    @property
    def requests(self) -> int:
        """Requests per round."""

    def play(self, source: TokenSource) -> Play:
        """Start over and yield the first round."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of prompts that begin alike, the same prompts again in every round.

    Args:
        shared: tokens that a group's prompts share. question: tokens of each prompt's own.
        fresh_questions: every round asks new questions behind the same shared tokens.
        shuffle: each round has an order of its own, drawn from the seed; else group by group.
    """

    groups: int = 8
    prompts_per_group: int = 8
    shared: int = 1024
    question: int = 128
    output: int = 16
    rounds: int = 3
    shuffle: bool = True
    fresh_questions: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one(self, "groups", "prompts_per_group", "question", "output", "rounds")
        if self.shared < 0:
            raise ConfigError("--shared", f"{self.shared} is negative", "Use 0 or more tokens")

    @property
    def requests(self) -> int:
        """Requests per round."""
        return self.groups * self.prompts_per_group

    @property
    def group_tokens(self) -> int:
        """Tokens that one group leaves in the cache after a round, each kept once."""
        return self.shared + self.prompts_per_group * (self.question + self.output)

    def play(self, source: TokenSource) -> Play:
        """Yield each round's prompts; answers are not used."""
        prefixes = [
            source.draw(self._rng("shared", group), self.shared) for group in range(self.groups)
        ]
        for turn in range(self.rounds):
            yield self._round(source, prefixes, turn)

    def _round(self, source: TokenSource, prefixes: list[list[int]], turn: int) -> list[Prompt]:
        asked = turn if self.fresh_questions else 0
        prompts = []
        for index in range(self.requests):
            group = index // self.prompts_per_group
            question = source.draw(self._rng("question", index, asked), self.question)
            prompts.append(Prompt(index, group, prefixes[group] + question))
        if self.shuffle:
            self._rng("order", turn).shuffle(prompts)
        return prompts

    def _rng(self, *what: str | int) -> random.Random:
        return _rng(self.seed, *what)


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Clients that talk in turns; each turn's prompt is the whole conversation so far.

    Args:
        first: tokens of each client's first message. message: tokens of every later one.
        output: tokens of each answer, which the next prompt repeats.
    """

    clients: int = 8
    rounds: int = 4
    first: int = 512
    message: int = 128
    output: int = 64
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one(self, "clients", "rounds", "first", "message", "output")

    @property
    def requests(self) -> int:
        """Requests per round."""
        return self.clients

    def play(self, source: TokenSource) -> Play:
        """Yield each round's prompts; a client whose request failed is not asked again."""
        told = {
            client: source.draw(_rng(self.seed, "turn", client, 0), self.first)
            for client in range(self.clients)
        }
        for turn in range(self.rounds):
            prompts = [Prompt(client, client, list(tokens)) for client, tokens in told.items()]
            if self.shuffle:
                _rng(self.seed, "order", turn).shuffle(prompts)
            answers = yield prompts
            told = {
                client: tokens + answers[client] + self._message(source, client, turn + 1)
                for client, tokens in told.items()
                if client in answers
            }

    def _message(self, source: TokenSource, client: int, turn: int) -> list[int]:
        return source.draw(_rng(self.seed, "turn", client, turn), self.message)


def _rng(seed: int, *what: str | int) -> random.Random:
    """A random source of its own for each thing drawn, so that no draw moves another."""
    return random.Random("/".join(map(str, (seed, *what))))


def _at_least_one(workload: object, *fields: str) -> None:
    for field in fields:
        value = getattr(workload, field)
        if value < 1:
            option = "--" + field.replace("_", "-")
            raise ConfigError(option, f"{value} is below 1", "Use 1 or more")
