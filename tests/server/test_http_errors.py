"""Bad requests get a status, a message that names the field, and OpenAI's error shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

COMPLETION = {"model": "fake", "prompt": "x", "max_tokens": 4}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "mixes"),
        ({"prompt": [1, 256]}, "prompt", "token id 256 is not in the vocabulary of 256"),
        ({"prompt": 5}, "prompt", "Expected"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": "many"}, "max_tokens", "Expected `int"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -5}, "top_k", "0 for off"),
        ({"seed": 1 << 63}, "seed", "64-bit"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"echo": True}, "echo", "not supported"),
        ({"best_of": 4}, "best_of", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"cache_salt": ""}, "cache_salt", "empty"),
        ({"timeout_s": -1}, "timeout_s", "positive"),
        ({"max_token": 5}, "max_token", "Did you mean 'max_tokens'?"),
    ],
)
def test_bad_completion(http: httpx.Client, changes: dict[str, Any], param: str, says: str) -> None:
    error = error_of(http.post("/v1/completions", json={**COMPLETION, **changes}), 400)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages", "Did you mean 'user'?"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "'tool' is not supported"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "speaks first"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "only text",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "prompt", "empty"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"n": 2}, "n", "not supported"),
    ],
)
def test_bad_chat(http: httpx.Client, changes: dict[str, Any], param: str, says: str) -> None:
    error = error_of(http.post("/v1/chat/completions", json={**CHAT, **changes}), 400)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("changes", [{"n": 1}, {"echo": False}, {"user": "u"}, {"stop": None}])
def test_harmless_fields_are_accepted(http: httpx.Client, changes: dict[str, Any]) -> None:
    response = http.post("/v1/completions", json={**COMPLETION, **changes})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("data", [b"{", b"", b"\xff\xfe", b"not json"])
def test_malformed_json(http: httpx.Client, data: bytes) -> None:
    error = error_of(http.post("/v1/completions", content=data), 400)
    assert error["code"] == "invalid_json"


def test_json_of_the_wrong_kind(http: httpx.Client) -> None:
    assert "Expected `object`" in error_of(http.post("/v1/completions", json=[1]), 400)["message"]


def test_missing_prompt(http: httpx.Client) -> None:
    assert error_of(http.post("/v1/completions", json={"model": "fake"}), 400)["param"] == "prompt"


def test_body_too_large(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * (65 << 20) + b'"}'
    assert error_of(http.post("/v1/completions", content=body), 413)["code"] == "body_too_large"


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert "GET /v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    error_of(http.get("/v1/completions"), 405)
    error_of(http.get("/v1/models/other"), 404)


def test_nothing_is_lost_after_all_that(http: httpx.Client) -> None:
    assert http.get("/health").json()["in_flight"] == 0
    assert http.get("/v1/cache/stats").json()["engine"]["running"] == 0


def test_cache_endpoints(http: httpx.Client) -> None:
    assert http.post("/v1/cache/flush").json() == {"flushes": 1}
    assert http.post("/v1/cache/check").json() == {"ok": True}
    error_of(http.get("/v1/cache/flush"), 405)
