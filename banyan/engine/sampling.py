"""Chooses next tokens from logits: greedy, temperature, top-k, top-p, seeds, log-probabilities.

Knows no request. Every random choice takes one number from the generator its state carries, so a
request draws the same whatever else is in the batch. Called from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.engine.messages import Sampling, TokenLogprob

_MAX_SEED = 2**62
_NUCLEUS_GUESS = 256
"""Candidates tried before a whole vocabulary is sorted for top-p."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How one sequence's tokens are chosen; the generator advances by one draw per token.

    Args:
        temperature: 0 is greedy. top_k: 0 is off. top_p: 1.0 is off.
        logprobs: None, or how many alternatives to report.
        generator: on CPU; unused when greedy.
    """

    temperature: float
    top_k: int
    top_p: float
    logprobs: int | None
    generator: torch.Generator

    @classmethod
    def of(cls, sampling: Sampling, source: torch.Generator) -> SamplingState:
        """The state for a request.

        Args:
            source: the engine's own generator; a request without a seed is given one from it.

        Mutates: `source`, by one draw, if there is no seed.
        """
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(_MAX_SEED, (), generator=source))
        generator = torch.Generator().manual_seed(seed)
        return cls(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs, generator
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token.

    Args:
        logprob: of the unmodified distribution, with as many alternatives as were asked for, best
            first; None when not asked for.
    """

    token: int
    logprob: TokenLogprob | None = None


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    """Choose one token per row.

    Args:
        logits: float32[batch, vocabulary].
        states: one per row.

    Mutates: the generators of rows that are not greedy, by one draw each.

    Cost: one argmax over the batch; for each random row a softmax, with top-k or top-p a partial
    sort; for each row with log-probabilities a log-softmax.
    """
    with torch.inference_mode():
        best: list[int] = logits.argmax(-1).tolist()
        return [
            _with_logprobs(row, greedy if state.temperature == 0 else _draw(row, state), state)
            for row, greedy, state in zip(logits, best, states, strict=True)
        ]


def _draw(row: Tensor, state: SamplingState) -> int:
    """Invert the cumulative distribution of the allowed tokens at one uniform number."""
    scaled = (row - row.max()) / state.temperature
    tokens: Tensor | None = None
    if 0 < state.top_k < len(row):
        scaled, tokens = scaled.topk(state.top_k)
    if state.top_p < 1.0:
        scaled, tokens = _nucleus(scaled, tokens, state.top_p)
    cumulative = scaled.double().softmax(-1).cumsum(-1)
    point = torch.rand((), generator=state.generator, dtype=torch.float64).item()
    target = torch.full((1,), point, dtype=torch.float64, device=row.device) * cumulative[-1]
    at = min(int(torch.searchsorted(cumulative, target, right=True)), len(cumulative) - 1)
    return at if tokens is None else int(tokens[at])


def _nucleus(scaled: Tensor, tokens: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest entries whose probabilities first reach `top_p`: the entries and their tokens.

    Args:
        scaled: float32[n], in descending order if `tokens` is given.
        tokens: int64[n], the token of each entry; None: entry i is token i.
    """
    total = scaled.logsumexp(-1)
    count = len(scaled) if tokens is not None else min(_NUCLEUS_GUESS, len(scaled))
    while True:
        kept, order = (scaled, tokens) if tokens is not None else scaled.topk(count)
        reached = (kept - total).exp().cumsum(-1)
        if count == len(scaled) or float(reached[-1]) >= top_p:
            break
        count = len(scaled)
    size = min(int((reached < top_p).sum()) + 1, count)
    return kept[:size], order[:size]


def _with_logprobs(row: Tensor, token: int, state: SamplingState) -> Sampled:
    if state.logprobs is None:
        return Sampled(token)
    logprobs = row.log_softmax(-1)
    values, tokens = logprobs.topk(min(state.logprobs, len(row)))
    top = list(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sampled(token, TokenLogprob(token, float(logprobs[token]), top))
