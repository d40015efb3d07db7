"""A model for engine tests whose next token depends on every cached byte it should read.

Each position's entry, in every buffer of every component, is the hash of the prefix that ends
there; a state is the hash of what it has consumed. A forward reads all that its reach says, raises
`WrongBytes` where they disagree, and goes on from the hash it read: wrong slots, wrong answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from banyan.engine.messages import Sampling, TokenLogprob
from banyan.engine.plans import SeqInput
from banyan.lease import PageTable, StateTable
from banyan.pools.assembler import PoolStack
from banyan.spec import Full, Point, Window

VOCAB = 251
_MASK = (1 << 31) - 1


def mix(value: int, token: int) -> int:
    """Hash of a prefix that goes on with `token`."""
    return (value * 1_000_003 + token + 1) & _MASK


def prefix_hash(tokens: Sequence[int], start: int = 7) -> int:
    """Hash of a whole prefix."""
    for token in tokens:
        start = mix(start, token)
    return start


def answer(prompt: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    """What the toy model must say, without any cache. None is greedy."""
    rng = None if seed is None else random.Random(seed)
    value, out = prefix_hash(prompt), []
    for _ in range(count):
        out.append(_token(value, rng))
        value = mix(value, out[-1])
    return out


def _token(value: int, rng: random.Random | None) -> int:
    return (value + (rng.randrange(VOCAB) if rng else 0)) % VOCAB


class WrongBytes(Exception):
    """A read found bytes that do not belong to the prefix."""


@dataclass(frozen=True)
class ToyChoice:
    """A sampled token; logprob 0.0 when asked for."""

    token: int
    logprob: TokenLogprob | None


class ToySampler:
    """Greedy, or a shift drawn from the request's own random source."""

    def __init__(self, sampling: Sampling) -> None:
        self.rng = None if sampling.seed is None else random.Random(sampling.seed)
        self.wants_logprobs = sampling.logprobs is not None


class ToyText:
    """A letter per token; one-letter stop strings."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop, self.stopped = stop, False

    def push(self, token: int) -> str:
        """The token's letter, unless it is a stop string."""
        letter = letter_of(token)
        self.stopped = letter in self._stop
        return "" if self.stopped else letter

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


def letter_of(token: int) -> str:
    """Token as text."""
    return chr(ord("a") + token % 26)


class ToyModel:
    """Implements `banyan.engine.ports.Model` on the pools of a `toy_spec` stack.

    Attributes:
        forwards: per forward, the (start, stop) of each sequence.
        fault: called before each forward; may raise.
    """

    def __init__(self, stack: PoolStack) -> None:
        self._stack = stack
        self.forwards: list[list[tuple[int, int]]] = []
        self.fault: Callable[[Sequence[SeqInput]], None] = lambda seqs: None
        self.sample_fault: Callable[[Sequence[int]], None] = lambda logits: None

    def forward(self, seqs: Sequence[SeqInput]) -> list[int]:
        """The hash of each sequence's whole prefix stands for its logits."""
        assert len(seqs) == 1 or all(len(s.tokens) == 1 for s in seqs)
        self.fault(seqs)
        self.forwards.append([(s.start, s.stop) for s in seqs])
        return [self._one(seq) for seq in seqs]

    def sample(self, logits: Sequence[int], samplers: Sequence[ToySampler]) -> list[ToyChoice]:
        """One token per row."""
        self.sample_fault(logits)
        assert len(logits) == len(samplers)
        choices = []
        for value, sampler in zip(logits, samplers, strict=True):
            token = _token(value, sampler.rng)
            logprob = TokenLogprob(token, 0.0) if sampler.wants_logprobs else None
            choices.append(ToyChoice(token, logprob))
        return choices

    def new_sampler(self, sampling: Sampling) -> ToySampler:
        """See `ToySampler`."""
        return ToySampler(sampling)

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> ToyText:
        """See `ToyText`."""
        return ToyText(sampling.stop)

    def _one(self, seq: SeqInput) -> int:
        if seq.ticket is not None:
            for layer in range(self._stack.spec.num_layers):
                seq.ticket.wait_layer(layer)
        value = self._read(seq)
        values = []
        for token in seq.tokens:
            value = mix(value, token)
            values.append(value)
        self._write(seq, values)
        return value

    def _read(self, seq: SeqInput) -> int:
        """The hash of the cached prefix, as every component tells it."""
        if seq.start == 0:
            return 7
        found = set()
        for c, component in enumerate(self._stack.spec.components):
            table, reach = seq.tables[c], component.reach
            for buffer in component.buffers:
                data = self._stack.device[c].buffers[buffer.layer, buffer.name].numpy()
                if isinstance(reach, Point):
                    assert isinstance(table, StateTable) and table.read is not None
                    found.add(int(data[table.read].flat[0]))
                    continue
                assert isinstance(reach, Full | Window) and isinstance(table, PageTable)
                first = 0 if isinstance(reach, Full) else max(0, seq.start - (reach.size - 1))
                found.add(self._last_of_chain(data, table, first, seq.start))
        if len(found) != 1:
            raise WrongBytes(f"at {seq.start}: the components read {found}")
        return found.pop()

    def _last_of_chain(self, data: np.ndarray, table: PageTable, first: int, stop: int) -> int:
        """The entry at `stop - 1`, once all from `first` on are seen to follow from each other."""
        page = self._stack.spec.page_size
        entries = []
        for at in range(first, stop):
            index = at // page - table.first_page
            if index < 0:
                raise WrongBytes(f"no page for position {at} of {stop}")
            entries.append(int(data[table.slots[index], at % page].flat[0]))
        for before, after in pairwise(entries):
            if not 0 <= (after - before * 1_000_003 - 1) & _MASK < VOCAB:
                raise WrongBytes(f"{after} does not follow {before} at {stop}")
        return entries[-1]

    def _write(self, seq: SeqInput, values: list[int]) -> None:
        page = self._stack.spec.page_size
        for c, component in enumerate(self._stack.spec.components):
            table = seq.tables[c]
            for buffer in component.buffers:
                data = self._stack.device[c].buffers[buffer.layer, buffer.name].numpy()
                if isinstance(table, StateTable):
                    assert table.write is not None
                    data[table.write] = values[-1]
                    continue
                for at, value in enumerate(values, seq.start):
                    if c == 0 and at < seq.present:
                        continue
                    data[table.slots[at // page - table.first_page], at % page] = value
