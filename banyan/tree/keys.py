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

BLOCK_BYTES = 1 << 17
"""The most that is compared again to find where two texts part."""


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


def common_bytes(edge: Text, key: bytes, offset: int, limit: int, step: int = _FIRST_PROBE) -> int:
    """Length in bytes of the common prefix of `edge` and `key[offset:limit]`.

    Args:
        step: what is compared first.

    Cost: O(result): compares blocks that double, up to `BLOCK_BYTES`, until one differs, halves
        inside that one, and takes the last few bytes as numbers, whose lowest bits that differ say
        where. Copies no more than these.
    """
    view, same = memoryview(edge), key.startswith
    longest = min(len(view), limit - offset)
    low = 0
    while low < longest:
        step = min(step, longest - low)
        if not same(view[low : low + step], offset + low):
            break
        low += step
        step = min(2 * step, BLOCK_BYTES)
    high = min(low + step, longest)
    while high - low > _FIRST_PROBE:
        mid = (low + high) // 2
        if same(view[low:mid], offset + low):
            low = mid
        else:
            high = mid
    if low < high:
        mine, other = view[low:high], key[offset + low : offset + high]
        apart = int.from_bytes(mine, "little") ^ int.from_bytes(other, "little")
        low = low + ((apart & -apart).bit_length() - 1) // 8 if apart else high
    return low
