"""The request bodies of the OpenAI API that Banyan accepts, and what they mean for the engine.

Owns reading and checking a body, up to the `Sampling` it asks for. Nothing is ignored silently:
a field that would change the answer and cannot be served is refused with its name. Knows no
tokenizer and no engine. Pure functions, usable from any thread.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from banyan.engine.messages import Sampling
from banyan.options import suggestion
from banyan.server.errors import ApiError, bad_request

MAX_LOGPROBS = 20
MAX_STOPS = 16
_SEED_BOUND = 1 << 63


class StreamOptions(msgspec.Struct, frozen=True):
    """What to add to a stream."""

    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request have in common; None is "not given".

    Args:
        top_k, ignore_eos: as in `Sampling`.
        cache_salt: requests share cached data only with those of the same salt.
        priority, use_cache, timeout_s: as in `GenerateRequest`.
        return_token_ids: report token ids beside the text, as `token_ids`.
        cache_hints: where later prompts are likely to part from this one, as positions in tokens.
            For a chat, true (as when not given) stands for its messages' ends, false for none.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    use_cache: bool | None = None
    timeout_s: float | None = None
    return_token_ids: bool | None = None
    cache_hints: bool | list[int] | None = None
    # accepted where they ask for nothing special; see _NEUTRAL
    n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    # they do not change the answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage event."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`: one prompt or several, as text or as token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content; only text can be served."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that Banyan does not serve, with the values at which they ask for nothing."""

BodyT = TypeVar("BodyT", CompletionBody, ChatBody)


def read_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """Decode and check a body.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from error
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            only = f"; only {neutral[0]!r} is served" if neutral else ""
            raise bad_request(f"{name}={value!r} is not supported{only}", name, "unsupported")
    return body


def _field_error(text: str, kind: type[_Body]) -> ApiError:
    """msgspec's finding, with the field as `param` and a suggestion for an unknown one."""
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if unknown:
        name = unknown.group(1)
        hint = suggestion(name, kind.__struct_fields__)
        return bad_request(f"unknown field {name!r}. {hint}", name, "unknown_field")
    missing = re.search(r"required field `([^`]*)`", text)
    where = re.search(r"at `\$\.([A-Za-z_]+)", text)
    field = missing.group(1) if missing else where.group(1) if where else None
    return bad_request(text, field)


def sampling_of(body: CompletionBody | ChatBody, default_max_tokens: int) -> Sampling:
    """What the body asks of the sampler, checked.

    Args:
        default_max_tokens: for a body that gives no bound.

    Raises:
        ApiError: 400, naming the field that is out of range.
    """
    asked = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    sampling = Sampling(
        max_tokens=default_max_tokens if asked is None else asked,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k in (None, -1) else body.top_k,
        seed=body.seed,
        stop=_stops(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs(body),
    )
    _check_sampling(sampling)
    if body.timeout_s is not None and body.timeout_s <= 0:
        raise bad_request(f"timeout_s is {body.timeout_s}; it must be positive", "timeout_s")
    return sampling


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOPS:
        raise bad_request(f"{len(texts)} stop texts; at most {MAX_STOPS} are served", "stop")
    if "" in texts:
        raise bad_request("a stop text is empty", "stop")
    return texts


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return None
    return body.top_logprobs or 0


def _check_sampling(sampling: Sampling) -> None:
    seed = 0 if sampling.seed is None else sampling.seed
    rules = (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= sampling.temperature <= 2, "between 0 and 2"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "at least 1, or 0 for off"),
        ("seed", -_SEED_BOUND <= seed < _SEED_BOUND, "a 64-bit integer"),
        ("logprobs", 0 <= (sampling.logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
    )
    for name, holds, rule in rules:
        if not holds:
            raise bad_request(f"{name} is {getattr(sampling, name)}; it must be {rule}", name)


def hints_of(
    body: CompletionBody | ChatBody, length: int, message_ends: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The positions for checkpoints that a request asks for, in a prompt of `length` tokens.

    Raises:
        ApiError: 400 for a position outside the prompt, or `true` where there are no messages.
    """
    hints = body.cache_hints
    if hints is True and isinstance(body, CompletionBody):
        raise bad_request(
            "cache_hints: true stands for the ends of messages; give a list of positions in tokens",
            "cache_hints",
        )
    if not isinstance(hints, list):
        return () if hints is False else message_ends
    for position in hints:
        if not 0 <= position <= length:
            raise bad_request(
                f"cache_hints has position {position}; the prompt has {length} tokens",
                "cache_hints",
            )
    return tuple(sorted(set(hints)))


def namespace_of(body: CompletionBody | ChatBody) -> tuple[tuple[str, str], ...]:
    """What keeps this request's cached data apart from others'."""
    if body.cache_salt == "":
        raise bad_request("cache_salt is empty; leave it out instead", "cache_salt")
    return () if body.cache_salt is None else (("salt", body.cache_salt),)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, each a non-empty text or a non-empty list of token ids."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    elif given and all(isinstance(item, int) for item in given):
        given = [[item for item in given if isinstance(item, int)]]
    prompts: list[str | list[int]] = []
    for item in given:
        if isinstance(item, int):
            raise bad_request("prompt mixes token ids with texts or lists", "prompt")
        if not item:
            raise bad_request("a prompt is empty; it must have at least one token", "prompt")
        prompts.append(item)
    if not prompts:
        raise bad_request("prompt is empty; it must have at least one token", "prompt")
    return prompts


def conversation_of(body: ChatBody) -> list[dict[str, str]]:
    """The messages as a chat template takes them: plain role and text."""
    if not body.messages:
        raise bad_request("messages is empty", "messages")
    return [
        {"role": _role(message, at), "content": _text(message, at)}
        for at, message in enumerate(body.messages)
    ]


def _role(message: Message, at: int) -> str:
    roles = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
    if message.role not in roles:
        raise bad_request(
            f"messages[{at}].role {message.role!r} is not supported. "
            + suggestion(message.role, roles),
            "messages",
        )
    return roles[message.role]


def _text(message: Message, at: int) -> str:
    if message.tool_calls or message.function_call:
        raise bad_request(f"messages[{at}] calls a tool; tools are not supported", "messages")
    content = message.content
    if content is None:
        raise bad_request(f"messages[{at}].content is missing", "messages")
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise bad_request(
                f"messages[{at}] has a part of type {part.type!r}; only text is supported",
                "messages",
            )
    return "".join(part.text for part in content)
