"""The engine's outputs in the JSON shapes of the OpenAI API.

Owns the two formats, text completion and chat, whole and in stream chunks, and `usage`. Knows no
socket and no engine. One format object serves one HTTP request, on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from banyan.engine.messages import Output, TokenLogprob, Usage
from banyan.server.prompts import PromptEncoder

Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """All that came for one prompt of a request."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    def add(self, output: Output) -> None:
        """Take one output in."""
        self.text.append(output.text)
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        self.finish_reason = output.finish_reason or self.finish_reason
        self.usage = output.usage or self.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What every JSON object of one answer repeats.

    Args:
        wants_logprobs, wants_token_ids: whether choices carry them.
        usage_in_stream: whether stream chunks have a `usage` field.
    """

    answer_id: str
    created: int
    model: str
    encoder: PromptEncoder
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    usage_in_stream: bool = False

    def wrap(self, kind: str, choices: list[Json], usage: Json | None = None) -> Json:
        """A whole response object."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    def wrap_chunk(self, kind: str, choices: list[Json], usage: Json | None = None) -> Json:
        """One stream chunk; it has a `usage` field only where the client asked for it."""
        chunk = self.wrap(kind, choices, usage)
        if not self.usage_in_stream:
            del chunk["usage"]
        return chunk


class Format(Protocol):
    """One endpoint's JSON."""

    def opening(self, count: int) -> list[Json]:
        """Chunks that come before any token, for `count` prompts."""

    def chunk(self, index: int, output: Output) -> Json:
        """The chunk that carries `output`, of the prompt `index`."""

    def closing(self, usage: Json) -> Json:
        """The chunk with the usage, after all others."""

    def whole(self, answers: Sequence[Answer], usage: Json) -> Json:
        """The whole response, for a request without streaming."""


def usage_json(usages: Sequence[Usage]) -> Json:
    """`usage` over all prompts of a request; tokens by source add up to `prompt_tokens`."""
    prompt = sum(u.prompt_tokens for u in usages)
    completion = sum(u.completion_tokens for u in usages)
    device, host = sum(u.device for u in usages), sum(u.host for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": device + host,
            "device_tokens": device,
            "host_tokens": host,
            "computed_tokens": sum(u.computed for u in usages),
            "rebuilt_tokens": sum(u.rebuilt for u in usages),
        },
    }


class TextFormat:
    """`/v1/completions`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._offsets: dict[int, int] = {}

    def opening(self, count: int) -> list[Json]:
        """Nothing comes before the first token."""
        return []

    def chunk(self, index: int, output: Output) -> Json:
        """A chunk with the new text."""
        choice = self._choice(
            index, output.text, output.tokens, output.logprobs, output.finish_reason
        )
        return self._frame.wrap_chunk("text_completion", [choice])

    def closing(self, usage: Json) -> Json:
        """The chunk with the usage and no choice."""
        return self._frame.wrap_chunk("text_completion", [], usage)

    def whole(self, answers: Sequence[Answer], usage: Json) -> Json:
        """One choice per prompt, in the order given."""
        choices = [
            self._choice(index, "".join(a.text), a.tokens, a.logprobs, a.finish_reason)
            for index, a in enumerate(answers)
        ]
        return self._frame.wrap("text_completion", choices, usage)

    def _choice(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        finish_reason: str | None,
    ) -> Json:
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, logprobs) if self._frame.wants_logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._frame.wants_token_ids:
            choice["token_ids"] = tokens
        return choice

    def _logprobs(self, index: int, logprobs: list[TokenLogprob]) -> Json:
        """Parallel lists; offsets go on from chunk to chunk of the same prompt."""
        piece = self._frame.encoder.piece
        offset = self._offsets.get(index, 0)
        offsets: list[int] = []
        for item in logprobs:
            offsets.append(offset)
            offset += len(piece(item.token).text)
        self._offsets[index] = offset
        return {
            "tokens": [piece(item.token).text for item in logprobs],
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [
                {piece(token).text: value for token, value in item.top} for item in logprobs
            ],
            "text_offset": offsets,
        }


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def opening(self, count: int) -> list[Json]:
        """The role, before the first token."""
        return [
            self._delta(index, {"role": "assistant", "content": ""}, None) for index in range(count)
        ]

    def chunk(self, index: int, output: Output) -> Json:
        """A chunk with the new text as a delta."""
        delta = {"content": output.text} if output.text or not output.finish_reason else {}
        return self._delta(index, delta, output)

    def closing(self, usage: Json) -> Json:
        """The chunk with the usage and no choice."""
        return self._frame.wrap_chunk("chat.completion.chunk", [], usage)

    def whole(self, answers: Sequence[Answer], usage: Json) -> Json:
        """One message per prompt."""
        choices: list[Json] = []
        for index, answer in enumerate(answers):
            message = {"role": "assistant", "content": "".join(answer.text)}
            choice: Json = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
            if self._frame.wants_token_ids:
                choice["token_ids"] = answer.tokens
            choices.append(choice)
        return self._frame.wrap("chat.completion", choices, usage)

    def _delta(self, index: int, delta: Json, output: Output | None) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(output.logprobs) if output else None,
            "finish_reason": output.finish_reason if output else None,
        }
        if self._frame.wants_token_ids:
            choice["token_ids"] = output.tokens if output else []
        return self._frame.wrap_chunk("chat.completion.chunk", [choice])

    def _logprobs(self, logprobs: list[TokenLogprob]) -> Json | None:
        if not self._frame.wants_logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(item.token, item.logprob),
                    "top_logprobs": [self._token(token, value) for token, value in item.top],
                }
                for item in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        piece = self._frame.encoder.piece(token)
        return {"token": piece.text, "logprob": logprob, "bytes": piece.data}
