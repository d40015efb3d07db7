"""Before anything is served: does the model go on from its cache as if it had none?

Owns two questions, put to the model through the real pools. Are the logits after a few tokens those
of the same tokens computed in pieces? A model that keeps data outside its cache, or starts anew
with every piece, differs, and must not be served from a prefix cache. And are they the same beside
another sequence? A model that ignores the positions it is given differs, and is then given one
sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banyan.cache import AllocateOutcome, PrefixCache
from banyan.engine.plans import SeqInput
from banyan.errors import SpecError
from banyan.tree.keys import encode_tokens

_LENGTH = 24
_PIECES = (9, 14, 1)
_UNEQUAL = (9, 21)
_LIMITS = {"float32": 0.05, "float64": 0.05}
_HALF_LIMIT = 0.75
"""Largest difference of a logit, in standard deviations of the logits. Rounding makes some 1e-5 in
float32 and some 1e-1 in half precision; a state that is dropped makes 1 and more."""


def check_continuation(cache: PrefixCache, runner: Any, vocab_size: int, dtype: str) -> None:
    """Refuse a model whose answer depends on how its prompt was cut.

    Args:
        cache: unused so far; it is left as it was.
        runner: has `forward`, as `Runner`.
        dtype: of the activations; half precisions are given more room.

    Raises:
        SpecError: with the difference that was found.

    Cost: four forwards, of 47 tokens in total. Pools with no room for them are not tested: they
    serve nothing longer either.
    """
    source = np.random.default_rng(0)
    tokens = [int(t) for t in source.integers(0, vocab_size, _LENGTH)]
    whole = _logits(cache, runner, tokens, [_LENGTH])
    pieces = _logits(cache, runner, tokens, _PIECES)
    if whole is None or pieces is None:
        return
    difference = distance(whole, pieces)
    limit = rounding_limit(dtype)
    if not difference <= limit:  # also when it is not a number
        raise SpecError(
            f"this model's answer changes by {difference:.2g} standard deviations of its logits "
            f"(at most {limit} is rounding) when the same {_LENGTH} tokens are computed in pieces: "
            "transformers does not carry all of its state in the cache, so no prefix of it can be "
            "reused"
        )


def batches_alike(cache: PrefixCache, runner: Any, vocab_size: int, dtype: str) -> bool:
    """Whether sequences of unequal length may be decoded together; see `check_continuation`.

    Cost: seven forwards. True where the pools have no room for two sequences.
    """
    source = np.random.default_rng(1)
    prompts = [[int(t) for t in source.integers(0, vocab_size, n)] for n in _UNEQUAL]
    alone = [_logits(cache, runner, tokens, (len(tokens) - 1, 1)) for tokens in prompts]
    leases, seqs = [], []
    try:
        for tokens in prompts:
            lease = cache.acquire(cache.match(encode_tokens(tokens[:1])), publish=False)
            leases.append(lease)
            stop = len(tokens) - 1
            if cache.allocate(lease, stop) is not AllocateOutcome.OK:
                return True
            runner.forward([SeqInput(tokens[:stop], 0, lease.tables)])
            cache.advance(lease, stop)
            if cache.allocate(lease, len(tokens)) is not AllocateOutcome.OK:
                return True
            seqs.append(SeqInput(tokens[stop:], stop, lease.tables))
        beside = torch.as_tensor(runner.forward(seqs))
    finally:
        for lease in leases:
            cache.release(lease)
    limit = rounding_limit(dtype)
    return all(
        one is not None and distance(one, other) <= limit
        for one, other in zip(alone, beside, strict=True)
    )


def rounding_limit(dtype: str) -> float:
    """The largest `distance` that rounding alone makes, with activations of this dtype."""
    return _LIMITS.get(dtype, _HALF_LIMIT)


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference of a logit, in standard deviations of the logits.

    Args:
        one, other: float[vocabulary] on the same device.
    """
    return float((one - other).abs().max()) / (float(one.std()) or 1.0)


def fixed_tokens(vocab_size: int, count: int) -> list[int]:
    """The same tokens every time and on every rank, for a trial run."""
    return [int(t) for t in np.random.default_rng(2).integers(0, vocab_size, count)]


def _logits(
    cache: PrefixCache, runner: Any, tokens: list[int], pieces: Sequence[int]
) -> Tensor | None:
    """Next-token logits after `tokens`, computed in pieces; None when there are no slots."""
    lease = cache.acquire(cache.match(encode_tokens(tokens[:1])), publish=False)
    try:
        logits: Tensor | None = None
        for count in pieces:
            start, stop = lease.length, lease.length + count
            if cache.allocate(lease, stop) is not AllocateOutcome.OK:
                return None
            seq = SeqInput(tokens[start:stop], start, lease.tables)
            try:
                logits = torch.as_tensor(runner.forward([seq]))[0]
            except Exception as error:  # whatever a model's code may raise; told with its cause
                raise SpecError(
                    f"this model failed on a trial prompt of {stop} tokens, computed in pieces: "
                    f"{type(error).__name__}: {error}"
                ) from error
            cache.advance(lease, stop)
        return logits
    finally:
        cache.release(lease)
