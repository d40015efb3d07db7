"""A small OpenAI-style server with a dictionary for a cache, for tests of the client.

It answers each prompt with the last prompt token + 1, + 2, ... and counts a prompt token as
cached when an earlier prompt began alike. Half of the cached tokens are reported as host tokens, so
that both sources appear.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


class FakeServer:
    """Behaviour of the fake, and what it has seen.

    Args:
        gap_s: seconds between answered tokens. per_chunk: tokens per stream event.
        refuse: prompts that contain this token get HTTP 400.
        cut: prompts that contain this token get a stream that breaks off without usage.
    """

    def __init__(
        self, *, gap_s: float = 0.0, per_chunk: int = 1, refuse: int = -1, cut: int = -1
    ) -> None:
        self.gap_s, self.per_chunk, self.refuse, self.cut = gap_s, per_chunk, refuse, cut
        self.seen: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.most_running = 0
        self.app = FastAPI()
        self.app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        self.app.add_api_route("/v1/cache/stats", self.stats)
        self.app.add_api_route("/v1/models", self.models)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "object": "model"}]}

    async def stats(self) -> dict[str, Any]:
        return {"requests": len(self.bodies)}

    async def completions(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        prompt: list[int] = body["prompt"]
        if self.refuse in prompt:
            error = {"message": "this token is refused", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, status_code=400)
        cached = max((_common(prompt, old) for old in self.seen), default=0)
        cached = min(cached, len(prompt) - 1)
        answer = [prompt[-1] + 1 + i for i in range(body["max_tokens"])]
        self.seen.append(prompt + answer)
        return StreamingResponse(
            self._events(prompt, answer, cached), media_type="text/event-stream"
        )

    async def _events(
        self, prompt: list[int], answer: list[int], cached: int
    ) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for at in range(0, len(answer), self.per_chunk):
                await asyncio.sleep(self.gap_s)
                tokens = answer[at : at + self.per_chunk]
                yield _event(choices=[{"index": 0, "text": "x", "token_ids": tokens}])
            if self.cut in prompt:
                return
            yield _event(choices=[], usage=_usage(len(prompt), len(answer), cached))
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    host = cached // 2
    details = {
        "cached_tokens": cached,
        "device_tokens": cached - host,
        "host_tokens": host,
        "computed_tokens": prompt - cached,
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def _event(**body: Any) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Run `fake` on a free loopback port; yields its URL."""
    config = uvicorn.Config(fake.app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        if time.monotonic() > deadline:
            raise TimeoutError("the fake server did not start")
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
