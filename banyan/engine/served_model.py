"""The scheduler's `Model`, made of a loaded model and its runner: forward, sample, new text.

Owns the engine's random source, from which requests without a seed get theirs. Knows no request
and no cache. Used from the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from banyan.engine.detokenize import Decoder, Detokenizer
from banyan.engine.messages import Sampling
from banyan.engine.plans import SeqInput
from banyan.engine.runner import Runner
from banyan.engine.sampling import Sampled, SamplingState, sample


class ServedModel:
    """Implements `banyan.engine.ports.Model`.

    Args:
        runner: the model on its pools.
        tokenizer: the model's.
        seed: of the random source for requests that bring no seed.
    """

    def __init__(self, runner: Runner, tokenizer: Decoder, seed: int = 0) -> None:
        self._runner, self._tokenizer = runner, tokenizer
        self._source = torch.Generator().manual_seed(seed)

    def forward(self, seqs: Sequence[SeqInput]) -> Tensor:
        """Next-token logits, float32[len(seqs), vocabulary]; see `Runner.forward`."""
        return self._runner.forward(seqs)

    def sample(self, logits: Tensor, samplers: Sequence[SamplingState]) -> list[Sampled]:
        """A token per row; see `banyan.engine.sampling.sample`."""
        return sample(logits, samplers)

    def new_sampler(self, sampling: Sampling) -> SamplingState:
        """The sampling state of one request."""
        return SamplingState.of(sampling, self._source)

    def new_text(self, sampling: Sampling, prompt: Sequence[int] = ()) -> Detokenizer:
        """The text side of one request; `prompt` is the context its answer is decoded in."""
        return Detokenizer(self._tokenizer, sampling.stop, prompt)
