"""Where messages end, found from the chat template; and what requests may say about it."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any

import pytest

from banyan.engine.presets import build_tokenizer
from banyan.server.errors import ApiError
from banyan.server.hints import LATEST, message_ends
from banyan.server.prompts import PromptEncoder
from banyan.server.protocol import ChatBody, CompletionBody, hints_of, read_body

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Rayleigh scattering."},
    {"role": "user", "content": "And at dusk?"},
]
MERGING = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- if messages|length == 1 -%}{{ raise_exception('a user message is missing') }}{%- endif -%}"
    "{%- set lead = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set lead = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in turns -%}"
    "{{ '<' + message['role'] + '>' + (lead if loop.first else '') + message['content'] + '</>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant><think>' }}{%- endif -%}"
)
"""Writes the system prompt into the first user's message, refuses one without the other, and calls
for an answer in words that do not stand before an answer of the conversation."""


def ends_by_text(tokenizer: Any, conversation: list[dict[str, str]]) -> tuple[str, list[str]]:
    """The prompt, and what of it lies before each position that `message_ends` gives."""
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    positions = message_ends(tokenizer, conversation, text, ends)
    return text, [text[: ends[at - 1]] for at in positions]


def test_each_message_s_end_is_found() -> None:
    text, parts = ends_by_text(build_tokenizer(), CHAT)
    messages = [f"<|{m['role']}|>{m['content']}<|end|>" for m in CHAT]
    assert parts == list(accumulate(messages))
    assert text == parts[-1] + "<|assistant|>"


def test_a_system_prompt_inside_the_first_message_ends_where_that_begins() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = MERGING
    text, parts = ends_by_text(tokenizer, CHAT)
    assert parts == [
        "<user>Be brief.\n\n",
        "<user>Be brief.\n\nWhy is the sky blue?</>",
        "<user>Be brief.\n\nWhy is the sky blue?</><assistant>Rayleigh scattering.</>",
        "<user>Be brief.\n\nWhy is the sky blue?</><assistant>Rayleigh scattering.</>"
        "<user>And at dusk?</>",
    ]
    assert text == parts[-1] + "<assistant><think>"


def test_a_template_that_shows_earlier_turns_otherwise_gives_only_what_holds() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{{ messages|length }}{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}"
    )
    assert ends_by_text(tokenizer, CHAT)[1] == ["4" + "".join(m["content"] for m in CHAT)]


def test_a_long_conversation_is_looked_at_in_part() -> None:
    chat = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(41)]
    _, parts = ends_by_text(build_tokenizer(), chat)
    assert len(parts) == 1 + LATEST
    assert parts[0] == "<|user|>turn 0<|end|>"
    assert parts[-1].endswith("turn 40<|end|>")


def test_a_token_across_an_end_belongs_to_what_follows() -> None:
    tokenizer = build_tokenizer()
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    first = len("<|system|>Be brief.<|end|>")
    ends = [first - 3, first + 2, len(text)]
    assert message_ends(tokenizer, CHAT[:2], text, ends) == (1, 2)


def test_the_encoder_gives_tokens_and_ends() -> None:
    encoder = PromptEncoder(build_tokenizer(), 288)
    prompt = asyncio.run(encoder.encode_chat(CHAT))
    assert prompt.message_ends[-1] == len(prompt.tokens) - 1
    assert list(prompt.message_ends) == sorted(set(prompt.message_ends))
    encoder.close()


def body(kind: Any, **fields: Any) -> Any:
    import msgspec

    given = {"prompt": [1, 2, 3]} if kind is CompletionBody else {"messages": CHAT}
    return read_body(msgspec.json.encode({**given, **fields}), kind)


@pytest.mark.parametrize(
    ("kind", "given", "wanted"),
    [
        (ChatBody, {}, (4, 9)),
        (ChatBody, {"cache_hints": None}, (4, 9)),
        (ChatBody, {"cache_hints": True}, (4, 9)),
        (ChatBody, {"cache_hints": False}, ()),
        (ChatBody, {"cache_hints": [7, 3, 7]}, (3, 7)),
        (ChatBody, {"cache_hints": []}, ()),
        (CompletionBody, {}, ()),
        (CompletionBody, {"cache_hints": False}, ()),
        (CompletionBody, {"cache_hints": [0, 12]}, (0, 12)),
    ],
)
def test_what_a_request_may_ask_for(kind: Any, given: Any, wanted: tuple[int, ...]) -> None:
    ends = (4, 9) if kind is ChatBody else ()
    assert hints_of(body(kind, **given), 12, ends) == wanted


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (CompletionBody, True, "give a list of positions in tokens"),
        (CompletionBody, [13], "position 13; the prompt has 12 tokens"),
        (ChatBody, [-1], "position -1; the prompt has 12 tokens"),
        (ChatBody, "end", "cache_hints"),
        (ChatBody, ["4"], "cache_hints"),
    ],
)
def test_what_it_may_not(kind: Any, given: Any, says: str) -> None:
    with pytest.raises(ApiError, match=says) as error:
        hints_of(body(kind, cache_hints=given), 12)
    assert error.value.status == 400
