"""The official `openai` client works against the server unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from banyan.server.launch import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=20)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "HELLO"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)


def test_several_prompts_become_choices_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["first", "second"], max_tokens=20)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "FIRST"), (1, "SECOND")]
    assert answer.usage is not None and answer.usage.prompt_tokens == 11


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105], [111]]])
def test_prompts_as_token_ids(client: openai.OpenAI, prompt: list[int] | list[list[int]]) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=20)
    assert [c.text for c in answer.choices] == ["HI", "O"][: len(answer.choices)]
    assert len(answer.choices) == (1 if isinstance(prompt[0], int) else 2)


def test_completion_stops_at_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a longer prompt", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("A L", "length")


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="fake",
            prompt=["one", "other"],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "ONE", 1: "OTHER"}
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_include_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="x", max_tokens=2, stream=True))
    assert [chunk.usage for chunk in chunks] == [None]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=9, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["A", "B", "C"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {"B": -0.5, "A": -1.0}
    assert logprobs.text_offset == [0, 1, 2]


def test_text_offsets_go_on_through_a_stream(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="fake", prompt="abc", max_tokens=9, logprobs=0, stream=True
    )
    offsets = [o for c in chunks for o in (c.choices[0].logprobs.text_offset or [])]  # type: ignore[union-attr]
    assert offsets == [0, 1, 2]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": "be "},
            {"role": "user", "content": [{"type": "text", "text": "kind"}]},
        ],
    )
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "BE KIND")
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_can_be_sent_back_as_a_message(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model="fake", messages=ask)  # type: ignore[arg-type]
    again = [*ask, first.choices[0].message, {"role": "user", "content": "!"}]
    second = client.chat.completions.create(model="fake", messages=again)  # type: ignore[arg-type]
    assert second.choices[0].message.content == "HIHI!"


def test_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "HELL"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "ab"}],
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(c.token, c.logprob, c.bytes) for c in content] == [
        ("A", -0.5, [65]),
        ("B", -0.5, [66]),
    ]
    assert [t.token for t in content[1].top_logprobs] == ["B", "A"]


def test_bytes_of_a_split_character_are_null(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "é"}], logprobs=True
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and [c.bytes for c in content] == [None, None]


def test_usage_says_where_prompt_tokens_came_from(client: openai.OpenAI) -> None:
    def details(salt: str | None = None) -> dict[str, int]:
        extra = {"cache_salt": salt} if salt else None
        answer = client.completions.create(
            model="fake", prompt="a returning prompt", max_tokens=1, extra_body=extra
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.model_dump(exclude_none=True)

    first, second = details(), details()
    assert (first["cached_tokens"], first["computed_tokens"]) == (0, 18)
    assert second["cached_tokens"] == second["device_tokens"] + second["host_tokens"] == 17
    assert second["computed_tokens"] == 1
    assert details("tenant-a")["cached_tokens"] == 0, "another tenant's prompt is not reused"
    assert details("tenant-a")["cached_tokens"] == 17
    assert details("tenant-b")["cached_tokens"] == 0


def test_use_cache_false_reuses_nothing(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.completions.create(
            model="fake", prompt="not cached", max_tokens=1, extra_body={"use_cache": False}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_token_ids_on_request(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="fake",
        prompt="ab",
        max_tokens=9,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    assert [c.choices[0].model_dump()["token_ids"] for c in chunks] == [[65], [66]]


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "banyan"


def test_errors_are_the_clients_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="do not fit 200") as caught:
        client.completions.create(model="fake", prompt="x" * 500)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="do not fit 200"):
        client.completions.create(model="fake", prompt="x" * 500, stream=True)
    with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
        client.completions.create(model="fake", prompt="x", n=2)
