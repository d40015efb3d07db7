"""Keys of the tree: tokens as bytes, and namespaces as bytes.

A key is the little-endian int32 encoding of a token sequence, so that comparing edges is a memcmp
and finding a child is one dict look-up. Knows nothing of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import error, pack
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
ROOT_NAMESPACE = b""

Text: TypeAlias = bytes | bytearray | memoryview
"""A stretch of a key, as the tree keeps it."""

_FIRST_PROBE = 256

LONG_BYTES = 1 << 17
"""From here on `common_bytes_of_long` is worth its calls."""


def encode_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Tokens as little-endian int32 bytes. Cost: O(n), about 6 ns a token for a list.

    Raises:
        OverflowError: a token is not an int32.
    """
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<i4", copy=False).tobytes()
    try:
        return pack(f"<{len(tokens)}i", *tokens)  # half the time of `array("i", tokens)`
    except error as why:
        raise OverflowError(f"a token is not an int32: {why}") from why


def decode_tokens(key: bytes) -> list[int]:
    """The tokens of a key: the inverse of `encode_tokens`."""
    return [int(token) for token in np.frombuffer(key, "<i4")]


def encode_namespace(pairs: Iterable[tuple[str, str]]) -> bytes:
    """What makes equal tokens unequal (tenant salt, adapter), as unambiguous bytes.

    Every part is tagged by its name and length-prefixed, and the pairs are sorted, so that no two
    different sets of pairs share an encoding. No pairs give `ROOT_NAMESPACE`. Upholds INV-13.
    """
    parts: list[bytes] = []
    for name, value in sorted(pairs):
        for text in (name, value):
            raw = text.encode()
            parts.append(len(raw).to_bytes(4, "little") + raw)
    return b"".join(parts)


def common_bytes(edge: Text, key: bytes, offset: int, limit: int) -> int:
    """Length in bytes of the common prefix of `edge` and `key[offset:limit]`.

    Cost: O(result): compares blocks that double until one differs, then halves inside that one.
    """
    view, same = memoryview(edge), key.startswith
    longest = min(len(view), limit - offset)
    low, step = 0, _FIRST_PROBE
    while low < longest:
        step = min(step, longest - low)
        if not same(view[low : low + step], offset + low):
            break
        low += step
        step *= 2
    return _parting(view, key, offset, low, min(low + step, longest))


def common_bytes_of_long(text: Text, key: bytes, offset: int) -> int:
    """The same of all the rest of `key`, for a long text that it has perhaps as a whole.

    Cost: O(result) + three calls. Where the two part, no more than half of what is before is
    compared twice, and near the end a quarter.
    """
    view, same = memoryview(text), key.startswith
    longest = min(len(view), len(key) - offset)
    low = 0
    for high in (longest // 2, longest // 4 * 3, longest):
        if not same(view[low:high], offset + low):
            return _parting(view, key, offset, low, high)
        low = high
    return longest


def _parting(view: memoryview, key: bytes, offset: int, low: int, high: int) -> int:
    """Where `view` and `key[offset:]` part, at `low` at least and `high` at most.

    Halves, and takes the last few bytes as numbers, whose lowest bit that differs says where.
    """
    while high - low > _FIRST_PROBE:
        mid = (low + high) // 2
        if key.startswith(view[low:mid], offset + low):
            low = mid
        else:
            high = mid
    mine, other = view[low:high], key[offset + low : offset + high]
    apart = int.from_bytes(mine, "little") ^ int.from_bytes(other, "little")
    return low + ((apart & -apart).bit_length() - 1) // 8 if apart else high
