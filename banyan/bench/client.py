"""Sends one streaming completion and measures it as a user feels it.

Owns the HTTP request and its clock readings. Knows no workload and no table. Runs on one asyncio
loop; times come from the clock it is given.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from banyan.bench.work import Prompt


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as measured; times in seconds.

    Args:
        sent_s: when it was sent, from the start of its round.
        ttft_s: from sending to the first token. None when none came.
        itl_s: the gaps between tokens; tokens that arrive together share their gap evenly.
        duration_s: from sending to the end of the stream.
        computed, device, host: prompt tokens by source, as the server's receipt says.
        error: None, or why the request failed; the counts are then 0.
    """

    index: int
    group: int
    sent_s: float
    ttft_s: float | None
    itl_s: list[float]
    duration_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed: int = 0
    device: int = 0
    host: int = 0
    error: str | None = None


@dataclass(slots=True)
class _Stream:
    """What has arrived of one answer: its tokens, when they came, and the receipt."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        """Account for one event of the stream."""
        if "error" in event:
            self.error = _error_text(event)
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event.get("choices") or ():
            tokens = choice.get("token_ids") or []
            self.tokens.extend(tokens)
            if tokens or choice.get("text"):
                self.arrivals.append((now, max(1, len(tokens))))

    def gaps(self) -> list[float]:
        """Seconds between tokens, one entry per token that came after the first arrival."""
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps.extend([(now - before) / count] * count)
        return gaps


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server's `/v1/completions`.

    Args:
        http: its base URL is the server's; its limits bound the connections.
        clock: seconds, monotone.
    """

    http: httpx.AsyncClient
    model: str
    clock: Callable[[], float]

    async def complete(
        self, prompt: Prompt, output: int, round_start: float
    ) -> tuple[Sample, list[int]]:
        """Stream one greedy completion of exactly `output` tokens.

        Returns:
            the sample, and the answered token ids (empty when the server does not report them).
            A failed request is a sample with `error`, never an exception.
        """
        stream = _Stream()
        sent = self.clock()
        try:
            async for event in self._events(prompt.tokens, output):
                stream.take(event, self.clock())
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            stream.error = f"{type(error).__name__}: {error}"
        return self._sample(prompt, stream, sent, round_start), stream.tokens

    async def _events(self, tokens: list[int], output: int) -> AsyncIterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                yield {"error": {"message": f"HTTP {response.status_code}: {response.text[:300]}"}}
                return
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield json.loads(data)

    def _sample(self, prompt: Prompt, stream: _Stream, sent: float, round_start: float) -> Sample:
        error = stream.error
        if error is None and stream.usage is None:
            error = "the stream ended without usage"
        usage = stream.usage if error is None and stream.usage else {}
        details = usage.get("prompt_tokens_details") or {}
        return Sample(
            index=prompt.index,
            group=prompt.group,
            sent_s=sent - round_start,
            ttft_s=stream.arrivals[0][0] - sent if stream.arrivals else None,
            itl_s=stream.gaps(),
            duration_s=self.clock() - sent,
            prompt_tokens=usage.get("prompt_tokens", 0),
            output_tokens=usage.get("completion_tokens", 0),
            computed=details.get("computed_tokens", 0),
            device=details.get("device_tokens", 0),
            host=details.get("host_tokens", 0),
            error=error,
        )


def _error_text(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
