"""Where a conversation's messages end, in tokens of its prompt: what later prompts may part at.

Owns the rendering of shorter conversations and the way from characters to tokens. Knows no request
and no engine. Called on the tokenizer's thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

LATEST = 8
"""Ends of messages looked for, beside that of the first: each costs a rendering of the template."""

_OTHER = "\x00"
"""Content of a message that no conversation has."""

Conversation = Sequence[dict[str, str]]


def message_ends(
    tokenizer: Any, conversation: Conversation, text: str, token_ends: Sequence[int]
) -> tuple[int, ...]:
    """Positions (tokens) at which messages of a rendered conversation end, ascending.

    Args:
        tokenizer: has `apply_chat_template`.
        conversation: the messages that `text` was rendered from.
        text: the prompt.
        token_ends: by token of the prompt, the character at which it ends; ascending.

    Returns:
        The ends of the first and of the latest messages, as far as the template renders shorter
        conversations alike; a token that an end cuts in two belongs to what follows.

    Cost: a rendering for each message looked at.
    """
    count = len(conversation)
    looked_at = sorted({1, *range(max(1, count - LATEST + 1), count + 1)})
    ends = set()
    for upto in looked_at:
        shared = _shared_characters(tokenizer, conversation, upto, text)
        position = bisect_right(token_ends, shared)
        if position:
            ends.add(position)
    return tuple(sorted(ends))


def _shared_characters(tokenizer: Any, conversation: Conversation, upto: int, text: str) -> int:
    """How far the rendering of the first `upto` messages is that of the whole; 0: not at all.

    Some templates write the first message into the second: then what the conversation shares with
    another one that goes on otherwise.
    """
    from jinja2 import TemplateError

    tries = [list(conversation[:upto])]
    if upto == 1 < len(conversation):
        tries.append([conversation[0], {**conversation[1], "content": _OTHER}])
    for messages in tries:
        try:
            part = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
            )
        except TemplateError:
            continue
        if text.startswith(part):
            return len(part)
        if _OTHER in part:
            return _common_characters(part[: part.index(_OTHER)], text)
    return 0


def _common_characters(one: str, other: str) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
