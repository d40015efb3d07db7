"""Keys and namespaces as bytes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from banyan.tree import ROOT_NAMESPACE, decode_tokens, encode_namespace, encode_tokens
from banyan.tree.keys import TOKEN_BYTES, common_bytes, common_bytes_of_long

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
PAIRS = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=3)


@given(TOKENS)
def test_tokens_survive_the_round_trip(tokens: list[int]) -> None:
    key = encode_tokens(tokens)
    assert len(key) == TOKEN_BYTES * len(tokens)
    assert decode_tokens(key) == tokens


@given(TOKENS, st.sampled_from([np.int32, np.int64, ">i4"]))
def test_arrays_and_lists_give_the_same_key(tokens: list[int], dtype: object) -> None:
    assert encode_tokens(np.array(tokens, dtype)) == encode_tokens(tokens)  # type: ignore[call-overload]


def test_a_key_is_little_endian_int32() -> None:
    assert encode_tokens([1, 258, -1]) == bytes([1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 255])


def test_a_token_beyond_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        encode_tokens([2**31])


def test_a_key_grows_by_appending() -> None:
    assert encode_tokens([1, 2]) + encode_tokens([3]) == encode_tokens([1, 2, 3])


@settings(max_examples=300)
@given(
    st.binary(max_size=600), st.binary(max_size=20), st.integers(0, 30), st.integers(0, 700),
    st.integers(0, 600),
)  # fmt: skip
def test_common_bytes_is_the_common_prefix(
    edge: bytes, tail: bytes, offset: int, limit: int, shared: int
) -> None:
    key = b"x" * offset + edge[:shared] + tail
    limit = max(offset, min(limit, len(key)))
    expected = 0
    for a, b in zip(edge, key[offset:limit], strict=False):
        if a != b:
            break
        expected += 1
    assert common_bytes(edge, key, offset, limit) == expected


LONG = bytes(range(251)) * 2_000


@pytest.mark.parametrize("bit", [1, 128])
@pytest.mark.parametrize(
    "at", [0, 1, 255, 256, 257, 4_095, 65_536, 250_999, 251_000, 376_500, 400_000, 501_999]
)
def test_common_bytes_of_a_long_edge(at: int, bit: int) -> None:
    changed = bytearray(LONG)
    changed[at] ^= bit
    key = b"abc" + bytes(changed)
    for edge in (LONG, bytearray(LONG), memoryview(b"x" + LONG)[1:]):
        assert common_bytes(edge, key, 3, len(key)) == at
        assert common_bytes(edge, LONG, 0, at) == at
        assert common_bytes_of_long(edge, key, 3) == at
        assert common_bytes_of_long(edge, LONG[:at], 0) == at
        assert common_bytes_of_long(edge, LONG + b"more", 0) == len(LONG)


def test_a_key_that_ends_before_zeros_does_not_go_on_with_them() -> None:
    assert common_bytes(bytes(20), bytes(10), 0, 10) == 10
    assert common_bytes_of_long(bytes(1_000), bytes(700), 3) == 697


def test_no_pairs_are_the_root_namespace() -> None:
    assert encode_namespace([]) == ROOT_NAMESPACE


@given(PAIRS)
def test_a_namespace_does_not_depend_on_the_order_of_its_pairs(
    pairs: list[tuple[str, str]],
) -> None:
    assert encode_namespace(pairs) == encode_namespace(pairs[::-1])


@settings(max_examples=300)
@given(PAIRS, PAIRS)
def test_different_pairs_give_different_namespaces(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    assert (encode_namespace(one) == encode_namespace(other)) == (sorted(one) == sorted(other))
