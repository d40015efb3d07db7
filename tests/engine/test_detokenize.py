"""Text as tokens come: whole characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.engine.detokenize import Detokenizer
from banyan.engine.presets import EOS_ID, build_tokenizer

BYTES = build_tokenizer()


class Spaced:
    """Like a SentencePiece tokenizer: tokens carry leading spaces, a text's first is stripped;
    tokens above 1000 are single bytes, decoded run by run, and 999 is special."""

    words = (" the", " cat", " sat", "ting", "!")

    def decode(self, token_ids: list[int], **options: Any) -> str:
        assert options == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text, run = "", b""
        for token in [*token_ids, None]:
            if token is not None and token >= 1000:
                run += bytes([token - 1000])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            if token is not None and token != 999:
                text += self.words[token]
        return text.removeprefix(" ")


def _stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    """What each token brings, and what the end brings."""
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()]


def test_a_character_appears_when_its_last_byte_does() -> None:
    pieces = _stream(Detokenizer(BYTES), list("a€🙂".encode()))
    assert pieces == ["a", "", "", "€", "", "", "", "🙂", ""]


def test_an_unfinished_character_comes_at_the_end_as_a_mark() -> None:
    assert _stream(Detokenizer(BYTES), list("€".encode()[:2])) == ["", "", "\ufffd"]


def test_bytes_that_are_no_character_are_not_held_for_ever() -> None:
    pieces = _stream(Detokenizer(BYTES), [0xFF] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert sum(map(len, pieces[:60])) > 30


@settings(max_examples=200, deadline=None)
@given(st.text(), st.text(max_size=8))
def test_nothing_is_lost_or_added(text: str, before: str) -> None:
    prompt = list(before.encode())
    pieces = _stream(Detokenizer(BYTES, prompt=prompt), list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def _stopped_at(text: str, stops: list[str]) -> str:
    """Specification: cut where the first stop string to be complete begins."""
    for end in range(len(text) + 1):
        begins = [end - len(s) for s in stops if s and text[:end].endswith(s)]
        if begins:
            return text[: min(begins)]
    return text


_FEW = st.text(alphabet="ab€", max_size=24)


@settings(max_examples=400, deadline=None)
@given(_FEW, st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, stops)
    pieces = _stream(detokenizer, list(text.encode()))
    assert "".join(pieces) == _stopped_at(text, stops)
    assert detokenizer.stopped == any(stop in text for stop in stops)


def test_what_may_begin_a_stop_string_is_held_and_released() -> None:
    detokenizer = Detokenizer(BYTES, ["<end>"])
    assert [detokenizer.push(t) for t in b"x<en?"] == ["x", "", "", "", "<en?"]
    assert [detokenizer.push(t) for t in b"<e"] == ["", ""]
    assert detokenizer.finish() == "<e"


def test_after_a_stop_nothing_more_comes() -> None:
    detokenizer = Detokenizer(BYTES, ["b"])
    assert [detokenizer.push(t) for t in b"abc"] == ["a", "", ""]
    assert detokenizer.stopped and detokenizer.finish() == ""


def test_empty_stop_strings_are_no_stop_strings() -> None:
    detokenizer = Detokenizer(BYTES, [""])
    assert "".join(_stream(detokenizer, list(b"abc"))) == "abc"


def test_special_tokens_bring_no_text() -> None:
    assert _stream(Detokenizer(BYTES), [97, EOS_ID, 98]) == ["a", "", "b", ""]


def test_the_prompt_gives_the_first_token_its_space() -> None:
    assert _stream(Detokenizer(Spaced(), prompt=[0]), [1, 2, 3]) == [" cat", " sat", "ting", ""]
    assert _stream(Detokenizer(Spaced()), [1, 2]) == ["cat", " sat", ""]


def test_a_run_of_byte_tokens_is_whole_before_it_is_shown() -> None:
    tokens = [0, *(1000 + b for b in "é🙂".encode()), 1]
    pieces = _stream(Detokenizer(Spaced()), tokens)
    assert "".join(pieces) == "theé🙂 cat"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    head, tail = "€".encode()[:2], "€".encode()[2:]
    assert _stream(Detokenizer(BYTES, prompt=list(head)), list(tail + b"x")) == ["€", "x", ""]


@pytest.mark.parametrize("length", [10, 2000])
def test_a_long_answer_costs_no_more_per_token(length: int) -> None:
    seen: list[int] = []

    class Counting(Spaced):
        def decode(self, token_ids: list[int], **options: Any) -> str:
            seen.append(len(token_ids))
            return super().decode(token_ids, **options)

    _stream(Detokenizer(Counting()), [0, 1, 2, 3] * (length // 4))
    assert max(seen) <= 8
