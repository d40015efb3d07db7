"""An engine core without a model, for tests of everything around it.

It answers a prompt with the prompt's own bytes in capitals, one token per step and request. A
prompt can steer it: texts that begin with `crash`, `hang`, `slow` or `invariant` do as they say.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from banyan.engine.inspect import component_rows
from banyan.engine.messages import GenerateRequest, Output, TokenLogprob, Usage
from banyan.errors import ConfigError, InvariantError, RequestError
from banyan.options import ServeOptions
from banyan.spec import Buffer, CacheSpec, Component, Full

MAX_MODEL_LEN = 200
VOCAB_SIZE = 256
SPEC = CacheSpec((Component("full", Full(), (Buffer("k", 0, (64,)),)),))


class FakeTokenizer:
    """Bytes are tokens."""

    chat_template = "fake"

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        if messages[0]["role"] == "assistant":
            raise TemplateError("the user speaks first")
        return "".join(message["content"] for message in messages)


def tokenizer(name: str) -> FakeTokenizer:
    return FakeTokenizer()


@dataclass
class Running:
    request: GenerateRequest
    answer: list[int]
    done: int = 0
    text: str = field(default="")

    @property
    def command(self) -> str:
        return self.text.split(" ")[0]


class FakeCore:
    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.running: dict[str, Running] = {}
        self.aborted = 0
        self.seen: dict[tuple[tuple[str, str], ...], set[str]] = {}
        self.flushes = 0
        self.broken = False

    @property
    def info(self) -> dict[str, Any]:
        rows = [
            {
                "tier": "device",
                "component": "full",
                "reach": "Full",
                "slots": 64,
                "tokens": 1024,
                "windows": None,
                "states": None,
                "bytes": 1 << 20,
                "share": 1.0,
                "limiting": True,
            }
        ]
        return {
            "model": self.options.model,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": VOCAB_SIZE,
            "chunk": self.options.chunk,
            "component_rows": [asdict(row) for row in component_rows(SPEC)],
            "size_rows": rows,
        }

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, request: GenerateRequest) -> None:
        if len(request.prompt) + request.sampling.max_tokens > MAX_MODEL_LEN:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.sampling.max_tokens} more do "
                f"not fit {MAX_MODEL_LEN}",
                param="prompt",
                code="context_length_exceeded",
            )
        text = bytes(request.prompt).decode("utf-8", "replace")
        self.running[request.request_id] = Running(request, list(text.upper().encode()), text=text)

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None):
            self.aborted += 1

    def step(self) -> list[Output]:
        outputs = []
        for request_id, running in list(self.running.items()):
            if running.command == "crash":
                raise RuntimeError("the fake core was told to crash")
            if running.command == "invariant":
                raise InvariantError(["INV-02: told so"])
            if running.command == "hang":
                continue
            if running.command == "slow":
                time.sleep(0.02)
            outputs.append(self._next(request_id, running))
        return outputs

    def _next(self, request_id: str, running: Running) -> Output:
        sampling = running.request.sampling
        token = running.answer[running.done]
        running.done += 1
        reason = None
        if running.done == len(running.answer):
            reason = "stop"
        elif running.done == sampling.max_tokens:
            reason = "length"
        usage = None
        if reason:
            del self.running[request_id]
            usage = self._usage(running)
        logprobs = []
        if sampling.logprobs is not None:
            top = [(token - i, -0.5 * (i + 1)) for i in range(sampling.logprobs)]
            logprobs = [TokenLogprob(token, -0.5, top)]
        return Output(
            request_id=request_id,
            tokens=[token],
            text=bytes([token]).decode("utf-8", "replace"),
            logprobs=logprobs,
            finish_reason=reason,
            usage=usage,
        )

    def _usage(self, running: Running) -> Usage:
        """A prompt seen before in its namespace is cached but for its last token, half on host."""
        seen = self.seen.setdefault(running.request.namespace, set())
        total = len(running.request.prompt)
        cached = total - 1 if running.text in seen and running.request.use_cache else 0
        if running.request.use_cache:
            seen.add(running.text)
        return Usage(
            prompt_tokens=total,
            completion_tokens=running.done,
            computed=total - cached,
            device=cached - cached // 2,
            host=cached // 2,
        )

    def stats(self) -> dict[str, Any]:
        engine = {"running": len(self.running), "finished": {"abort": self.aborted}}
        return {"engine": engine, "cache": {"leases": len(self.running)}}

    def flush(self) -> dict[str, Any]:
        self.seen.clear()
        self.flushes += 1
        return {"flushes": self.flushes}

    def check(self) -> dict[str, Any]:
        if self.broken:
            raise InvariantError(["INV-01: a slot is lost"])
        return {"ok": True}

    def close(self) -> None:
        self.running.clear()


def build(options: ServeOptions) -> FakeCore:
    if options.model == "bad-option":
        raise ConfigError("--device-bytes", "4096 holds no request", "Write at least 1MiB")
    if options.model == "bad-start":
        raise RuntimeError("told not to start")
    if options.model == "slow-start":
        time.sleep(60)
    return FakeCore(options)
