"""Runs one request's prompts through the engine and answers, whole or as a stream of events.

Owns the way out: whatever happens (answered, failed, client gone, server stopping), the engine's
requests are closed exactly once. Knows the formats only by their interface. On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from banyan.engine.messages import GenerateRequest, Output
from banyan.server.answers import Answer, Format, Json, usage_json
from banyan.server.engine_client import EngineClient, OutputStream
from banyan.server.errors import ClientGone, from_engine
from banyan.server.metrics import RequestTimer

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON response, encoded by msgspec."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def until_client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The body must have been read."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_client_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first.

    Raises:
        ClientGone: it did.
    """
    gone = asyncio.ensure_future(until_client_gone(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's work for the engine.

    Args:
        requests: one per prompt.
        index: each request id's place among them, which is its choice's index.
        wants_usage: whether a stream ends with a usage event.
    """

    requests: Sequence[GenerateRequest]
    index: dict[str, int]
    format: Format
    wants_usage: bool
    timer: RequestTimer


async def answer_whole(client: EngineClient, job: Job, receive: Receive) -> Response:
    """Wait for the end of all prompts, then answer with one JSON object.

    Raises:
        ApiError: the engine refused or failed; `EngineGone`, `EngineBusy`, `ClientGone`.
    """
    stream = client.stream(job.requests)
    try:
        answers = await unless_client_gone(receive, _collect(stream, job))
    finally:
        stream.close()
    usage = usage_json([answer.usage for answer in answers if answer.usage])
    return json_response(job.format.whole(answers, usage))


async def _collect(stream: OutputStream, job: Job) -> list[Answer]:
    answers = [Answer() for _ in job.requests]
    async for output in stream:
        job.timer.note(output)
        if output.error is not None:
            raise from_engine(output.error, output.error_code)
        answers[job.index[output.request_id]].add(output)
    return answers


async def answer_stream(client: EngineClient, job: Job, receive: Receive) -> Response:
    """Wait for the first news, so that a refusal has its own status; then stream events.

    Raises:
        ApiError: the engine refused or failed; `EngineGone`, `EngineBusy`, `ClientGone`.
    """
    stream = client.stream(job.requests)
    try:
        first = await unless_client_gone(receive, anext(stream))
        job.timer.note(first)
        if first.error is not None:
            raise from_engine(first.error, first.error_code)
    except BaseException:
        stream.close()
        raise
    return EventStream(stream, _events(first, stream, job), job.timer)


async def _events(first: Output, stream: OutputStream, job: Job) -> AsyncIterator[bytes]:
    """The body of a stream: chunks, then usage where asked for, then the end mark."""
    answers = [Answer() for _ in job.requests]
    for chunk in job.format.opening(len(answers)):
        yield _event(chunk)
    index = job.index[first.request_id]
    answers[index].add(first)
    yield _event(job.format.chunk(index, first))
    async for output in stream:
        job.timer.note(output)
        if output.error is not None:
            yield _event(from_engine(output.error, output.error_code).body())
            break
        index = job.index[output.request_id]
        answers[index].add(output)
        yield _event(job.format.chunk(index, output))
    else:
        if job.wants_usage:
            usage = usage_json([answer.usage for answer in answers if answer.usage])
            yield _event(job.format.closing(usage))
    yield DONE


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """Server-sent events that stop, and close the engine's requests, when the client goes."""

    media_type = "text/event-stream"

    def __init__(
        self, stream: OutputStream, events: AsyncIterator[bytes], timer: RequestTimer
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._events, self._timer = stream, events, timer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client is gone."""
        try:
            await unless_client_gone(receive, self._send(send))
        except ClientGone:
            self._timer.client_gone()
        finally:
            self._stream.close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_limited(request: Request, limit: int) -> bytes | None:
    """The request's body, or None when it is longer than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)
