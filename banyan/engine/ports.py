"""What the scheduler needs of a model: forward, sample, detokenise.

Owns nothing; these are the seams between the scheduler and the model side, so that either can be
exchanged in a test. Everything behind them is called from the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from banyan.engine.messages import Sampling, TokenLogprob

if TYPE_CHECKING:
    from banyan.engine.plans import SeqInput


class Choice(Protocol):
    """One sampled token."""

    @property
    def token(self) -> int:
        """The token's id."""

    @property
    def logprob(self) -> TokenLogprob | None:
        """Its log-probability and alternatives, when the request asked for them."""


class TextStream(Protocol):
    """Turns one request's tokens into text as they come, and watches for stop strings."""

    def push(self, token: int) -> str:
        """Text that is certain after `token`; the part that may belong to a stop string is held."""

    def finish(self) -> str:
        """The text still held, when no more tokens come."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was seen; what follows it is not returned."""


class Model(Protocol):
    """A model on the pools of one cache."""

    def forward(self, seqs: Sequence[SeqInput]) -> Any:
        """Compute the new tokens, write what they cache; one row of logits per sequence.

        Args:
            seqs: one sequence with any number of new tokens, or several with one each.

        Raises:
            CopyError: a load-back that a sequence reads from has failed.
        """

    def sample(self, logits: Any, samplers: Sequence[Any]) -> Sequence[Choice]:
        """Choose a token per row; a sampler's random state advances by one draw."""

    def new_sampler(self, sampling: Sampling) -> Any:
        """The state of one request's sampling; draws a seed when it brings none."""

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> TextStream:
        """The text side of one request; `prompt` is the context its answer is decoded in."""
