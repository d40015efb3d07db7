"""A model on several ranks: its forward fails on all of them or on none, and rank 0 draws.

Owns what ranks tell each other of a forward pass. Knows the model by its port. Called from each
rank's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from banyan.engine.messages import Sampling
from banyan.engine.plans import SeqInput
from banyan.engine.ports import Choice, Model, TextStream
from banyan.errors import CopyError, RankError
from banyan.ranks import Agreement

_MODEL_FAILED, _COPY_FAILED, _FINE = 0, 1, 2


class _Told(NamedTuple):
    """A token that rank 0 has chosen."""

    token: int
    logprob: None = None


class RankedModel:
    """A model whose forward fails on all ranks or on none, and whose tokens rank 0 chooses.

    Args:
        exact: tokens follow from the prompt alone and nothing fails but a copy: ranks then talk
            only after a forward that read from a load-back. For the oracle.
    """

    def __init__(self, model: Model, agreement: Agreement, exact: bool) -> None:
        self._model, self._agreement, self._exact = model, agreement, exact

    def forward(self, seqs: Sequence[SeqInput]) -> Any:
        """See `Model.forward`.

        Raises:
            CopyError: a load-back under it failed on some rank.
            RuntimeError: it failed on another rank only.
            RankError: a rank is gone.
        """
        tickets = [seq.ticket for seq in seqs if seq.ticket is not None]
        if self._exact and not tickets:
            return self._model.forward(seqs)
        logits, error = None, None
        try:
            logits = self._model.forward(seqs)
        except RankError:
            raise
        except Exception as caught:  # the boundary to the model: all ranks must hear of it first
            error = caught
        copied = not any(getattr(ticket, "failed", False) for ticket in tickets)
        own = _FINE if error is None and copied else _COPY_FAILED
        if error is not None and copied and not isinstance(error, CopyError):
            own = _MODEL_FAILED  # over bytes that did not come, an error says nothing of the model
        fact = self._agreement.settle(own)
        if fact == _FINE:
            return logits
        if fact == _COPY_FAILED:
            raise CopyError("a load-back under this forward failed, on this rank or on another")
        raise error or RuntimeError("the model failed on another rank")

    def sample(self, logits: Any, samplers: Sequence[Any]) -> Sequence[Choice]:
        """See `Model.sample`; rank 0 draws, the others are told."""
        if self._exact:
            return self._model.sample(logits, samplers)
        self._agreement.talks += 1
        fabric = self._agreement.fabric
        if not self._agreement.is_leader:
            tokens = np.frombuffer(fabric.broadcast(None), np.int64)
            if len(tokens) != len(samplers):
                raise RuntimeError("sampling failed on rank 0")
            return [_Told(int(token)) for token in tokens]
        choices: Sequence[Choice] = ()
        try:
            choices = self._model.sample(logits, samplers)
            return choices
        finally:  # also when it raises: the others wait
            fabric.broadcast(np.array([c.token for c in choices], np.int64).tobytes())

    def new_sampler(self, sampling: Sampling) -> Any:
        """See `Model.new_sampler`."""
        return self._model.new_sampler(sampling)

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> TextStream:
        """See `Model.new_text`."""
        return self._model.new_text(sampling, prompt)
