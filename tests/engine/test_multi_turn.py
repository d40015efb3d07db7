"""A chat of twelve turns on presets with states: each computes its own message and little more.

What that little is, exactly. The template is `<|role|>content<|end|>`, with `<|assistant|>` last to
ask for an answer. Between the last generated token and a new message it puts `<|end|><|user|>`, and
after the message `<|end|><|assistant|>`: a tail of four tokens. The last generated token was never
run through the model, and of the rest up to a page less one token lies behind the last page
boundary; the two together are a page at most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from banyan.engine.messages import Usage
from banyan.engine.models import LoadedModel, load_model
from tests.parity.harness import Engine
from tests.support.workloads import Question, serve

TURNS = 12
SYSTEM = "Answer every question briefly, but do answer it, and be kind to all who ask you one."
TAIL = 4
PAGES = (1, 16, 64)
PRESETS = ("tiny-linear", "tiny-hybrid")
MOST_SLOW = [16, *(pytest.param(page, marks=pytest.mark.slow) for page in (1, 64))]
"""The page sizes where the quick tests need but one of them."""


@cache
def loaded(name: str) -> LoadedModel:
    """A preset, shared by all tests here."""
    torch.set_num_threads(1)
    return load_model(name)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, as an engine without a cache has answered it.

    Args:
        message: tokens of the new message.
        hints: where messages of the prompt end.
    """

    prompt: list[int]
    message: list[int]
    answer: list[int]
    hints: tuple[int, ...]


class Chat:
    """A conversation by a preset's chat template.

    Args:
        dropped: tokens at the end of each answer that the next prompt does not show.
    """

    def __init__(self, tokenizer: Any, dropped: int = 0) -> None:
        self._tokenizer, self._dropped = tokenizer, dropped
        self._said: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]

    def ask(self, text: str) -> tuple[list[int], tuple[int, ...]]:
        """The prompt of the next turn, and where its messages end."""
        self._said.append({"role": "user", "content": text})
        ends = (len(self._render(self._said[: i + 1], False)) for i in range(len(self._said)))
        return self._render(self._said, True), tuple(ends)

    @property
    def length_before(self) -> int:
        """Tokens of the next prompt without its message."""
        return len(self._render([*self._said, {"role": "user", "content": ""}], True))

    def hear(self, answer: Sequence[int]) -> None:
        """Take an answer into the conversation, as text."""
        shown = answer[: len(answer) - self._dropped]
        self._said.append({"role": "assistant", "content": self._tokenizer.decode(shown)})

    def _render(self, messages: list[dict[str, str]], asks: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def said_in(turn: int, before: int, answer: int) -> str:
    """A message of varied length; in every third turn such that the last token computed of the
    answer ends a page of any size.

    Args:
        before: tokens of the prompt without it.
    """
    count = (3, 41, 20, 30)[turn % 4]
    if turn % 3 == 2:
        count = (1 - before - answer) % max(PAGES) or max(PAGES)
    return "".join(random.Random(turn).choices("what is it, then? ", k=count))


@cache
def conversation(name: str, dropped: int = 0) -> list[Turn]:
    """Twelve turns, answered by an engine that caches nothing."""
    model = loaded(name)
    chat, turns = Chat(model.tokenizer, dropped), []
    with Engine(model, cache=False) as engine:
        for number in range(TURNS):
            count = (4, 17, 9, 12)[number % 4]
            text = said_in(number, chat.length_before, count)
            prompt, hints = chat.ask(text)
            [(answer, usage)] = engine.answer([prompt], count)
            assert usage.computed == len(prompt)
            message = model.tokenizer(text, add_special_tokens=False)["input_ids"]
            turns.append(Turn(prompt, message, answer, hints))
            chat.hear(answer)
    return turns


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def played(engine: Engine, turns: list[Turn], hinted: bool) -> Iterator[tuple[int, Turn, Usage]]:
    """Every turn on `engine`, which must give the same answers; one that was run is yielded."""
    for number, turn in enumerate(turns):
        heard: list[int] = []
        [usage] = serve(
            engine.core,
            [0],
            lambda _, turn=turn: Question(  # type: ignore[misc]
                turn.prompt, len(turn.answer), turn.hints if hinted else ()
            ),
            lambda _, tokens, heard=heard: heard.extend(tokens),  # type: ignore[misc]
        )
        assert heard == turn.answer, f"turn {number}: {usage}"
        yield number, turn, usage


def test_the_template_s_tail_is_four_tokens() -> None:
    """What the module says of it, for what follows an answer that is shown as it was generated."""
    tokenizer = loaded("tiny-linear").tokenizer
    turns = conversation("tiny-linear")
    between, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("<|end|><|user|>", "<|end|><|assistant|>")
    )
    assert len(between) + len(after) == TAIL
    for last, turn in pairwise(turns):
        assert turn.prompt == [*last.prompt, *last.answer, *between, *turn.message, *after]


def run_chat(name: str, page: int, *, hinted: bool = False, leaves: Sequence[int] = ()) -> None:
    """A chat in which no turn computes more than it should.

    Args:
        leaves: turns after which everything leaves the device, so that the next is served from
            host.
    """
    with Engine(loaded(name), page_size=page) as engine:
        for number, turn, usage in played(engine, conversation(name), hinted):
            most = len(turn.message) + page + TAIL
            if number:
                assert usage.computed <= most, f"turn {number}: {usage}, at most {most}"
            assert (usage.host > 0) == (number - 1 in leaves), f"turn {number}: {usage}"
            if number in leaves:
                engine.evict_device()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("page", PAGES)
def test_a_turn_computes_its_message_a_page_and_the_template_s_tail(name: str, page: int) -> None:
    run_chat(name, page)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("page", MOST_SLOW)
def test_so_it_does_with_the_ends_of_messages_as_hints(name: str, page: int) -> None:
    run_chat(name, page, hinted=True)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("page", MOST_SLOW)
def test_so_it_does_when_its_conversation_has_left_the_device(name: str, page: int) -> None:
    run_chat(name, page, leaves=(4, 8))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("page", PAGES)
def test_c100_an_answer_that_comes_back_shorter_is_resumed_at_its_prompt_s_end(
    name: str, page: int
) -> None:
    """C100: the template shows each answer without its last two tokens. Where the answer's own
    snapshot lies beyond what is shown, the one at the end of the prompt is used."""
    run_shortened_chat(name, page)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("page", MOST_SLOW)
def test_c100_so_it_is_when_its_conversation_has_left_the_device(name: str, page: int) -> None:
    run_shortened_chat(name, page, leaves=(2, 5, 8))


def run_shortened_chat(name: str, page: int, leaves: Sequence[int] = ()) -> None:
    """A chat whose answers come back without their last two tokens."""
    from_prompt = 0
    with Engine(loaded(name), page_size=page) as engine:
        turns = conversation(name, dropped=2)
        for number, turn, usage in played(engine, turns, hinted=False):
            found = usage.device + usage.host
            if number:
                last = turns[number - 1]
                shown = common_len([*last.prompt, *last.answer], turn.prompt)
                at_answer = (len(last.prompt) + len(last.answer) - 1) // page * page
                at_prompt = (len(last.prompt) - 1) // page * page
                if at_answer <= shown:
                    assert found == at_answer, f"turn {number}: {usage}, {at_answer} match"
                else:
                    from_prompt += 1
                    in_range = 0 < at_prompt <= found <= len(last.prompt)
                    assert in_range, f"turn {number}: {usage}, the prompt's end is at {at_prompt}"
            if number in leaves:
                engine.evict_device()
    assert from_prompt >= 3, "the case that this is about"
