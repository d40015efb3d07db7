"""The oracle: a model that computes nothing and proves every byte it reads.

Each entry of a page and each state is a function of the tokens before it, of the layer, the buffer
and the rank. A forward pass compares everything its components' reaches say it reads with that
function of the request's own tokens, writes what it adds, and answers with the hash of the prefix:
a wrong slot, a stale byte, a state one page off is a `WrongBytes` at the step that reads it.

Owns no slot and no request. Called from the thread that runs the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from banyan.engine.messages import Sampling, TokenLogprob
from banyan.engine.oracle_buffers import PageBuffer, StateBuffer, Work, WrongBytes
from banyan.engine.oracle_hash import next_tokens
from banyan.engine.oracle_ledger import Code, Ledger
from banyan.engine.plans import SeqInput
from banyan.errors import RankError
from banyan.pools.assembler import PoolStack


@dataclass(frozen=True, slots=True)
class Emulation:
    """Times of an accelerator that is not there: slept, on top of what the oracle itself takes.

    Args:
        prefill_s_per_token: of a forward over a prompt's tokens.
        decode_s: of a forward over one token of each sequence.
    """

    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0


class OracleChoice(NamedTuple):
    """The token that follows a prefix."""

    token: int
    logprob: TokenLogprob | None = None


class OracleText:
    """No text: answers are compared as tokens."""

    stopped = False

    def push(self, token: int) -> str:
        """Nothing."""
        return ""

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


class OracleModel:
    """Implements `banyan.engine.ports.Model` on the pools of a stack.

    Args:
        stack: CPU pools.
        rank: of this process; what is not replicated has bytes of its own on each rank.
        ranks: how many there are: with several, wrong bytes end the engine and not one request.
        rows: sequences that run at a time, about; more cost a recomputation of what they must be.
        tokens: length of the longest sequence, about.
        sleep: waits so many seconds.

    Attributes:
        checked_bytes: compared so far.
        wrong: comparisons that failed; `first_wrong` says what the first one found.
    """

    def __init__(
        self,
        stack: PoolStack,
        *,
        rank: int = 0,
        ranks: int = 1,
        rows: int = 32,
        tokens: int = 1024,
        emulation: Emulation | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._emulation, self._sleep = emulation or Emulation(), sleep
        self._ranks = ranks
        self._layers = range(stack.spec.num_layers)
        self._parts: list[list[PageBuffer | StateBuffer]] = [[] for _ in self._layers]
        codes: list[Code] = []
        for c, component in enumerate(stack.spec.components):
            for buffer in component.buffers:
                data = stack.device[c].buffers[buffer.layer, buffer.name].numpy()
                code = Code.of(buffer, rank)
                part: PageBuffer | StateBuffer
                if component.reach.page_shaped:
                    index = len(codes)
                    codes.append(code)
                    part = PageBuffer(c, component.reach, buffer, code, data, rank, index)
                else:
                    part = StateBuffer(c, buffer, code, data, rank)
                self._parts[buffer.layer].append(part)
        self._ledger = Ledger(codes, rows, tokens)
        self.checked_bytes = 0
        self.wrong = 0
        self.first_wrong = ""

    def forward(self, seqs: Sequence[SeqInput]) -> npt.NDArray[np.uint64]:
        """Check what the new tokens read, layer by layer, and write what they add.

        Args:
            seqs: one sequence with any number of new tokens, or several with one each; each with
                its history.

        Returns:
            uint64[len(seqs)]: the hash of each sequence's whole prefix, in the place of logits.

        Raises:
            ValueError: several sequences, and one does not have exactly one new token; or a history
                that does not hold the new tokens.
            LeaseError: a table does not cover what is read or written.
            CopyError: a load-back has failed.
            WrongBytes: what was read is not what this prefix has left there.
            RankError: the same, on one of several ranks.

        Cost: what is compared, about 5 us per sequence and buffer of 37 KB.
        """
        if not seqs or (len(seqs) > 1 and any(len(seq.tokens) != 1 for seq in seqs)):
            raise ValueError("a forward takes one sequence, or several with one new token each")
        for seq in seqs:
            if list(seq.history[seq.start : seq.stop]) != list(seq.tokens):
                raise ValueError(f"the history at {seq.start} does not go on with the new tokens")
        rows = self._ledger.rows_of([(seq.history, seq.stop) for seq in seqs])
        work = Work(seqs, rows, self._ledger)
        for layer in self._layers:
            arrived = all(_wait(seq, layer) for seq in seqs)
            self._run_layer(layer, work, arrived)
        self._rest(seqs)
        return work.hashes_at_stop

    def _run_layer(self, layer: int, work: Work, arrived: bool) -> None:
        for part in self._parts[layer]:
            if arrived:
                self._check(part, work)
            part.write(work)

    def _check(self, part: PageBuffer | StateBuffer, work: Work) -> None:
        try:
            self.checked_bytes += part.check(work)
        except WrongBytes as error:
            self.wrong += 1
            self.first_wrong = self.first_wrong or str(error)
            if self._ranks > 1:  # the others have found nothing: there is no going on together
                raise RankError(str(error)) from error
            raise

    def _rest(self, seqs: Sequence[SeqInput]) -> None:
        new = len(seqs[0].tokens)
        times = self._emulation
        seconds = times.decode_s if new == 1 else new * times.prefill_s_per_token
        if seconds and self._sleep is not None:
            self._sleep(seconds)

    def sample(
        self, logits: npt.NDArray[np.uint64], samplers: Sequence[None]
    ) -> list[OracleChoice]:
        """The only token that can follow each prefix, whatever the sampling says."""
        return [OracleChoice(token) for token in next_tokens(logits)]

    def new_sampler(self, sampling: Sampling) -> None:
        """Nothing is drawn."""
        return None

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> OracleText:
        """See `OracleText`."""
        return OracleText()


def _wait(seq: SeqInput, layer: int) -> bool:
    """Wait for a layer's bytes. False: they will not come, and the ranks are still to agree on
    that; what is there is not this prefix's and nobody will use what follows from it."""
    if seq.ticket is None:
        return True
    seq.ticket.wait_layer(layer)
    return not getattr(seq.ticket, "failed", False)
