"""Turns tokens into text as they come: whole characters only, and up to a stop string.

Knows a tokenizer's `decode` and nothing else. One object per request, used from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
"""What decoders put for bytes that are no whole character, finished later or never."""

_CONTEXT_TOKENS = 6
_MAX_PENDING_TOKENS = 16


class Decoder(Protocol):
    """The part of a tokenizer that this module uses."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Text of the tokens."""


class Detokenizer:
    """Text of a growing answer.

    Args:
        tokenizer: the model's.
        stop: texts that end the answer; neither they nor what follows is returned.
        prompt: the tokens before the answer; the last few are context, since some tokenizers
            decode a text's first token without its leading space.
    """

    def __init__(
        self, tokenizer: Decoder, stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._context = len(self._window)
        self._sent = len(self._decode().rstrip(UNFINISHED))
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that the token completes, possibly empty; sets `stopped` at a stop string.

        Cost: decodes a window of a few tokens, whatever the length of the answer.
        """
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._decode()
        pending = len(self._window) - self._context
        stable = text if pending > _MAX_PENDING_TOKENS else text.rstrip(UNFINISHED)
        new, self._sent = stable[self._sent :], max(self._sent, len(stable))
        if len(stable) == len(text):
            self._slide()
        return self._release(new, final=False)

    def finish(self) -> str:
        """What was held back: an unfinished character, the start of a stop string that never came.

        Returns an empty string after a stop.
        """
        if self.stopped:
            return ""
        text = self._decode()
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return self._release(new, final=True)

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _slide(self) -> None:
        """All of the window is out: keep its newest tokens as context for the next."""
        del self._window[:-_CONTEXT_TOKENS]
        self._context = len(self._window)
        self._sent = len(self._decode())

    def _release(self, new: str, *, final: bool) -> str:
        """Add `new` to the held text and take out what no stop string can claim any more."""
        text = self._held + new
        cut = self._first_stop(text)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = 0 if final else self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string that is complete first begins; the longest, of several."""
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(ends)[1] if ends else None

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
