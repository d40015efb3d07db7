"""From texts and conversations to token ids, off the event loop.

Owns the tokenizer and the one thread that uses it (the library's tokenizers refuse concurrent
calls). Knows no request and no engine. Its coroutines belong to the event loop; `piece` is cheap
enough to be called there.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from banyan.server.errors import bad_request
from banyan.server.hints import message_ends

_REPLACEMENT = "\ufffd"


class Piece(NamedTuple):
    """One token as text; `data` is its UTF-8 bytes, or None where it is part of a character."""

    text: str
    data: list[int] | None


class ChatPrompt(NamedTuple):
    """A conversation as token ids, and the positions at which its messages end (none where the
    tokenizer does not tell which characters a token stands for)."""

    tokens: list[int]
    message_ends: tuple[int, ...]


class PromptEncoder:
    """A model's tokenizer for the server's needs.

    Args:
        tokenizer: a `transformers` tokenizer.
        vocab_size: token ids below this exist in the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._pieces: dict[int, Piece] = {}

    async def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt: of a text with the model's special tokens; ids are checked.

        Raises:
            ApiError: 400 for ids out of range, or a text without any token.
        """
        if isinstance(prompt, list):
            wrong = [token for token in prompt if not 0 <= token < self._vocab_size]
            if wrong:
                raise bad_request(
                    f"token id {wrong[0]} is not in the vocabulary of {self._vocab_size}", "prompt"
                )
            return prompt
        return await self._run(self._encode, prompt, True)

    async def encode_chat(self, conversation: list[dict[str, str]]) -> ChatPrompt:
        """Token ids of a conversation by the model's chat template, ready for the answer, and where
        its messages end.

        Raises:
            ApiError: 400 where the model has no template, or it refuses the conversation.
        """
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._thread, self._encode_chat, conversation)
        _refuse_empty(prompt.tokens)
        return prompt

    def piece(self, token: int) -> Piece:
        """The text of one token."""
        piece = self._pieces.get(token)
        if piece is None:
            text = str(self._tokenizer.decode([token]))
            data = None if _REPLACEMENT in text else list(text.encode("utf-8"))
            piece = self._pieces[token] = Piece(text, data)
        return piece

    def close(self) -> None:
        """Let the thread end; encodings in progress are not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Any, *args: Any) -> list[int]:
        loop = asyncio.get_running_loop()
        tokens: list[int] = await loop.run_in_executor(self._thread, function, *args)
        _refuse_empty(tokens)
        return tokens

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(token) for token in encoded["input_ids"]]

    def _encode_chat(self, conversation: list[dict[str, str]]) -> ChatPrompt:
        from jinja2 import TemplateError

        if not getattr(self._tokenizer, "chat_template", None):
            raise bad_request(
                "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise bad_request(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        text = str(text)
        if not getattr(self._tokenizer, "is_fast", False):
            return ChatPrompt(self._encode(text, False), ())
        encoded = self._tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        tokens = [int(token) for token in encoded["input_ids"]]
        token_ends = [int(end) for _, end in encoded["offset_mapping"]]
        return ChatPrompt(tokens, message_ends(self._tokenizer, conversation, text, token_ends))


def _refuse_empty(tokens: list[int]) -> None:
    if not tokens:
        raise bad_request("the prompt is empty; it must have at least one token", "prompt")
