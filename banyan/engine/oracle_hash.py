"""What the oracle model's bytes and answers are: functions of the token prefix and nothing else.

Owns the prefix hash, the bytes made of it, and the next token. Pure functions on numpy arrays; no
pool, no request, no cache. Usable from any thread.

The hash of a prefix is a polynomial of its tokens modulo 2^64, h(n) = h(n-1) * M + t(n) + 1, which
numpy computes for all positions at once: M is odd, so it has an inverse, and h(n) is M^n times a
running sum of t(i) * M^-i. Two prefixes that differ in one token never have the same hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

EMPTY = 0x243F6A8885A308D3
"""The hash of no tokens."""

VOCAB_SIZE = 32_000

TOKENS = list(range(VOCAB_SIZE))
"""One object per token id: lists of these cost a pointer per token, and leave no holes in memory
when they go."""

_M = 0x5851F42D4C957F2D
_M_INVERSE = pow(_M, -1, 1 << 64)
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOKEN_SALT = 0x13198A2E03707344


class _Powers:
    """M^1 to M^n and their inverses, grown on demand."""

    def __init__(self) -> None:
        self._up: Words = np.empty(0, np.uint64)
        self._down: Words = np.empty(0, np.uint64)

    def upto(self, count: int) -> tuple[Words, Words]:
        """uint64[count] each. Cost: O(1) when so many are known."""
        if count > len(self._up):
            known = max(count, 2 * len(self._up))
            self._up = _powers(_M, known)
            self._down = _powers(_M_INVERSE, known)
        return self._up[:count], self._down[:count]


def _powers(base: int, count: int) -> Words:
    """base^1 to base^count, modulo 2^64."""
    return np.multiply.accumulate(np.full(count, base, np.uint64), dtype=np.uint64)


_POWERS = _Powers()


def as_words(tokens: Sequence[int]) -> Words:
    """Token ids as uint64[n]. Cost: about 15 ns a token for a list."""
    return np.frombuffer(array("q", tokens), np.int64).view(np.uint64)


def extended(start: int, tokens: Words) -> Words:
    """Hashes of the prefixes that go on from one with hash `start`.

    Returns:
        uint64[n]: after each of the tokens.

    Cost: O(n), all of it in numpy.
    """
    up, down = _POWERS.upto(len(tokens))
    sums = np.cumsum((tokens + np.uint64(1)) * down, dtype=np.uint64)
    return np.asarray(up * (sums + np.uint64(start)), np.uint64)


def followed(hashes: Words, tokens: Words) -> Words:
    """Hashes of the prefixes that go on with one token each: uint64[n]."""
    return hashes * np.uint64(_M) + tokens + np.uint64(1)


def mixed(hashes: Words, salts: Words) -> Words:
    """Hashes with salts, every bit of the result depending on every bit of both.

    Args:
        hashes: uint64[n]. salts: uint64[w].

    Returns:
        uint64[n, w].
    """
    words = hashes[:, None] + salts
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def salts(layer: int, buffer: str, rank: int, count: int) -> Words:
    """uint64[count], different for every layer, buffer and rank."""
    text = f"{layer}/{buffer}/{rank}".encode()
    return np.frombuffer(hashlib.shake_128(text).digest(8 * count), "<u8").astype(np.uint64)


def interned(tokens: Sequence[int]) -> list[int]:
    """Equal tokens, as the objects of `TOKENS`. Cost: about 30 ns a token."""
    return [TOKENS[token] for token in tokens]


def next_tokens(hashes: Words) -> list[int]:
    """The token that follows each prefix; the same on every rank."""
    words = mixed(hashes, np.array([_TOKEN_SALT], np.uint64))
    return interned((words[:, 0] % np.uint64(VOCAB_SIZE)).tolist())


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The only right answer to a prompt: what follows it, token by token. Knows no cache.

    Cost: O(prompt) in numpy, about a microsecond for each of the `count` tokens.
    """
    value = int(extended(EMPTY, as_words(prompt))[-1]) if prompt else EMPTY
    tokens: list[int] = []
    for _ in range(count):
        word = (value + _TOKEN_SALT) & _MASK
        word = (word ^ word >> 30) * _FIRST & _MASK
        word = (word ^ word >> 27) * _SECOND & _MASK
        tokens.append((word ^ word >> 31) % VOCAB_SIZE)
        value = (value * _M + tokens[-1] + 1) & _MASK
    return tokens
