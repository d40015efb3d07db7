"""The two endpoints that generate: from a body to engine requests to an answer.

Owns what `/v1/completions` and `/v1/chat/completions` mean. Knows the engine by its client only.
On the event loop; tokenisation runs on the encoder's thread.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from banyan.engine.messages import GenerateRequest, Sampling
from banyan.server.answers import ChatFormat, Format, Frame, TextFormat
from banyan.server.engine_client import EngineClient
from banyan.server.errors import ApiError, bad_request
from banyan.server.metrics import RequestTimer, ServerMetrics
from banyan.server.prompts import PromptEncoder
from banyan.server.protocol import (
    ChatBody,
    CompletionBody,
    conversation_of,
    hints_of,
    namespace_of,
    prompts_of,
    read_body,
    sampling_of,
)
from banyan.server.respond import Job, answer_stream, answer_whole, read_limited

MAX_BODY_BYTES = 64 << 20
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Generator:
    """Serves generation over one engine and one tokenizer."""

    client: EngineClient
    encoder: PromptEncoder
    metrics: ServerMetrics

    @property
    def model(self) -> str:
        """The name of the model served."""
        return str(self.client.info["model"])

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        timer = self.metrics.timer()
        body = read_body(await _read(request), CompletionBody)
        self._check_model(body.model)
        sampling = sampling_of(body, DEFAULT_COMPLETION_TOKENS)
        given = prompts_of(body)
        if len(given) > self.client.capacity:
            most = self.client.capacity
            raise bad_request(f"{len(given)} prompts in one request; at most {most}", "prompt")
        tokens = [await self.encoder.encode(prompt) for prompt in given]
        prompts = [(prompt, hints_of(body, len(prompt))) for prompt in tokens]
        frame = self._frame("cmpl", body, sampling)
        return await self._answer(request, body, prompts, sampling, TextFormat(frame), frame, timer)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        timer = self.metrics.timer()
        body = read_body(await _read(request), ChatBody)
        self._check_model(body.model)
        prompt, message_ends = await self.encoder.encode_chat(conversation_of(body))
        hints = hints_of(body, len(prompt), message_ends)
        room = int(self.client.info["max_model_len"]) - len(prompt)
        sampling = sampling_of(body, max(1, room))
        frame = self._frame("chatcmpl", body, sampling)
        return await self._answer(
            request, body, [(prompt, hints)], sampling, ChatFormat(frame), frame, timer
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server serves {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def _frame(self, prefix: str, body: CompletionBody | ChatBody, sampling: Sampling) -> Frame:
        return Frame(
            answer_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model,
            encoder=self.encoder,
            wants_logprobs=sampling.logprobs is not None,
            wants_token_ids=bool(body.return_token_ids),
            usage_in_stream=body.include_usage,
        )

    async def _answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        prompts: list[tuple[list[int], tuple[int, ...]]],
        sampling: Sampling,
        answer_format: Format,
        frame: Frame,
        timer: RequestTimer,
    ) -> Response:
        requests = [
            GenerateRequest(
                request_id=f"{frame.answer_id}-{index}",
                prompt=prompt,
                sampling=sampling,
                namespace=namespace_of(body),
                priority=body.priority or 0,
                use_cache=body.use_cache is not False,
                timeout_s=body.timeout_s,
                cache_hints=hints,
            )
            for index, (prompt, hints) in enumerate(prompts)
        ]
        index = {r.request_id: i for i, r in enumerate(requests)}
        job = Job(requests, index, answer_format, body.include_usage, timer)
        answer = answer_stream if body.stream else answer_whole
        return await answer(self.client, job, request.receive)


async def _read(request: Request) -> bytes:
    data = await read_limited(request, MAX_BODY_BYTES)
    if data is None:
        raise ApiError(
            413, f"the body is longer than {MAX_BODY_BYTES >> 20} MiB", code="body_too_large"
        )
    return data
