"""What the engine says, as JSON: formats, receipts, errors."""

from __future__ import annotations

import pytest
from fake_core import FakeTokenizer

from banyan.engine.messages import Output, TokenLogprob, Usage
from banyan.server.answers import Answer, ChatFormat, Frame, TextFormat, usage_json
from banyan.server.errors import ApiError, EngineBusy, EngineGone, from_engine, unavailable
from banyan.server.prompts import PromptEncoder


def frame(**changes: bool) -> Frame:
    encoder = PromptEncoder(FakeTokenizer(), 256)
    return Frame(answer_id="id", created=7, model="m", encoder=encoder, **changes)


def usage(prompt: int, device: int, host: int, completion: int = 1) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        computed=prompt - device - host,
        device=device,
        host=host,
    )


def test_usage_sums_over_prompts_and_sources_sum_to_the_prompt() -> None:
    body = usage_json([usage(100, 48, 16, 5), usage(50, 0, 32, 2)])
    details = body["prompt_tokens_details"]
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (150, 7, 157)
    assert details == {
        "cached_tokens": 96,
        "device_tokens": 48,
        "host_tokens": 48,
        "computed_tokens": 54,
        "rebuilt_tokens": 0,
    }
    assert details["cached_tokens"] + details["computed_tokens"] == body["prompt_tokens"]


def test_an_answer_is_the_sum_of_its_outputs() -> None:
    answer = Answer()
    answer.add(Output(request_id="r", tokens=[1], text="a"))
    answer.add(Output(request_id="r", text="b", finish_reason="length", usage=usage(3, 0, 0)))
    body = ChatFormat(frame(wants_token_ids=True)).whole([answer], {})
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "ab"
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", [1])


def test_chunks_carry_usage_only_where_asked_for() -> None:
    output = Output(request_id="r", tokens=[65], text="A")
    assert "usage" not in TextFormat(frame()).chunk(0, output)
    assert TextFormat(frame(usage_in_stream=True)).chunk(0, output)["usage"] is None
    assert ChatFormat(frame(usage_in_stream=True)).closing({"x": 1})["usage"] == {"x": 1}


def test_text_offsets_count_per_prompt() -> None:
    text = TextFormat(frame(wants_logprobs=True))
    said = []
    for index in (0, 1, 0, 1):
        output = Output(request_id="r", tokens=[65], logprobs=[TokenLogprob(65, -1.0)])
        said += text.chunk(index, output)["choices"][0]["logprobs"]["text_offset"]
    assert said == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("context_length_exceeded", 400, "invalid_request_error"),
        (None, 400, "invalid_request_error"),
        ("model_failed", 500, "server_error"),
        ("out_of_slots", 503, "server_error"),
        ("engine_gone", 503, "server_error"),
    ],
)
def test_the_engines_errors(code: str | None, status: int, kind: str) -> None:
    error = from_engine("why", code)
    assert error.status == status
    assert error.body()["error"]["type"] == kind
    assert error.body()["error"]["message"] == "why"


def test_unavailable() -> None:
    assert unavailable(EngineBusy("x")).code == "queue_full"
    assert unavailable(EngineGone("x")).status == 503
    assert ApiError(404, "x", code="c").body()["error"]["type"] == "not_found_error"
