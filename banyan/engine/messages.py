"""The messages between a front end and the engine, as msgspec structs (msgpack on the wire).

Plain data only: no torch, no model. `EngineClient` implementations (in process, or over ZMQ) and
the engine itself share these and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen.

    Args:
        temperature: 0 is greedy.
        top_k: 0 is off. top_p: 1.0 is off.
        seed: None draws from the engine's own random source.
        stop: texts that end the answer; the matched text is not returned.
        logprobs: None, or how many alternatives to report beside the chosen token (0 to 20).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One prompt to answer.

    Args:
        prompt: token ids, at least one.
        namespace: what makes equal tokens unequal (tenant salt, adapter); see `banyan.tree.keys`.
        priority: larger is kept longer by the `priority` policy.
        use_cache: False computes the whole prompt and publishes nothing.
        timeout_s: None, or seconds after which the request ends with `timeout`.
        cache_hints: positions in the prompt (tokens) at which later prompts are likely to part from
            it, such as the ends of a conversation's messages, ascending.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    namespace: tuple[tuple[str, str], ...] = ()
    priority: int = 0
    use_cache: bool = True
    timeout_s: float | None = None
    cache_hints: tuple[int, ...] = ()


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The client is gone or gave up: free everything the request holds."""

    request_id: str


class Command(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """A question or order to the engine: `stats`, `flush`, `check`, `shutdown`."""

    command_id: str
    name: str


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token's log-probability and the best alternatives, as (token id, logprob)."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt: where each prompt token came from. The three sum to `prompt_tokens`.

    Args:
        computed: prompt tokens run through the model.
        device, host: prompt tokens whose cached data was found on that tier.
        rebuilt: of the computed ones, those whose full-attention data was found, so that they ran
            for windows and states alone.
    """

    prompt_tokens: int
    completion_tokens: int
    computed: int
    device: int
    host: int
    rebuilt: int = 0


class Output(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """News of one request: new tokens and text since the last one, and how it ended.

    Args:
        finish_reason: None while running; else `stop`, `length`, `abort`, `timeout` or `error`.
        usage: with the last output only.
        error, error_code: why a request was refused or failed, for the client to read.
    """

    request_id: str
    tokens: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    error_code: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a `Command`."""

    command_id: str
    ok: bool
    body: dict[str, Any] = {}


ToEngine = GenerateRequest | AbortRequest | Command
FromEngine = Output | Reply
