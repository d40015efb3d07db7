"""The real engine behind the real server: a preset answers over HTTP, from every source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_rig import is_alive, wait_for

from banyan.server.launch import ServerProcess
from banyan.server.metrics import ENGINE_METRICS, samples

PROMPTS = [f"Document {n}. " + f"Sentence {n} of it. " * 30 for n in range(12)]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = ["--device-bytes", "9MiB", "--host-ratio", "8", "--max-running", "4"]
    arguments += ["--verify", "all", "--state-interval", "256"]
    with ServerProcess("tiny-linear", arguments) as running:
        yield running
        assert running.stop() == 0
        assert not is_alive(running.engine_pid)
        assert "Traceback" not in running.output


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def everything(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/v1/cache/stats").json())


def stats(server: ServerProcess) -> dict[str, Any]:
    return dict(everything(server)["cache"])


def ask(client: openai.OpenAI, prompt: str) -> tuple[str, dict[str, int]]:
    answer = client.completions.create(
        model="tiny-linear", prompt=prompt, max_tokens=8, temperature=0
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.model_dump()


def test_answers_are_equal_from_device_and_host(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    cold, computed = ask(client, PROMPTS[0])
    assert computed["cached_tokens"] == 0
    warm, device = ask(client, PROMPTS[0])
    assert device["device_tokens"] > 256 and device["host_tokens"] == 0
    for prompt in PROMPTS[1:]:
        ask(client, prompt)
    back, host = ask(client, PROMPTS[0])
    assert host["host_tokens"] > 256, "eleven other prompts have pushed it off the device"
    assert cold == warm == back
    copies = stats(server)["copies"]
    assert copies["backup"]["verified"] > 0 and copies["load_back"]["verified"] > 0
    assert copies["backup"]["mismatched"] == copies["load_back"]["mismatched"] == 0


def test_chat_and_streaming(client: openai.OpenAI) -> None:
    ask_with: dict[str, Any] = {
        "model": "tiny-linear",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask_with)
    chunks = client.chat.completions.create(stream=True, **ask_with)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_every_metric_has_its_number(server: ServerProcess) -> None:
    """A renamed counter of the engine is noticed here."""
    figures = everything(server)
    silent = {"banyan_requests_refused", "banyan_copy_failures", "banyan_cache_misses"}
    for metric in ENGINE_METRICS:
        found = list(samples(figures, metric.path))
        assert found or metric.name in silent, metric
        assert all(len(labels) == len(metric.labels) for labels, _ in found)
    said = httpx.get(f"{server.url}/metrics").text
    assert 'banyan_prompt_tokens_total{source="host"}' in said
    assert 'banyan_pool_slots_free{component="state",tier="device"}' in said
    assert "banyan_time_to_first_token_seconds_bucket" in said
    assert "_created" not in said


def test_idle_server_holds_nothing_and_is_sound(server: ServerProcess) -> None:
    assert wait_for(lambda: stats(server)["operations"] == 0)
    idle = stats(server)
    assert idle["leases"] == 0
    for pools in idle["tiers"].values():
        for pool in pools.values():
            assert pool["free"] + pool["evictable"] == pool["capacity"]
    assert httpx.post(f"{server.url}/v1/cache/check").json()["ok"] is True
    httpx.post(f"{server.url}/v1/cache/flush")
    for pools in stats(server)["tiers"].values():
        assert all(pool["free"] == pool["capacity"] for pool in pools.values())


def test_refusals(server: ServerProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny-linear", prompt="x" * 40_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        client.completions.create(model="tiny-linear", prompt=[5, 100_000])
    assert stats(server)["leases"] == 0


def test_budget_too_small_is_one_line() -> None:
    server = ServerProcess("tiny-linear", ["--device-bytes", "64KiB"])
    with pytest.raises(Exception, match=r"status 2.*\n.*--device-bytes") as caught:
        server.start()
    assert "Traceback" not in str(caught.value)


def test_unknown_model_is_one_line() -> None:
    with pytest.raises(Exception, match=r"status 2.*\n.*cannot find 'tiny-linea'") as caught:
        ServerProcess("tiny-linea").start()
    assert "Traceback" not in str(caught.value)


def test_a_second_conversation_resumes_at_the_system_prompt_s_end(
    client: openai.OpenAI,
) -> None:
    """Nobody has parted there before: the end of the message was a hint of the chat template's."""
    system = {
        "role": "system",
        "content": "You answer in one word, and never with a question. " * 4,
    }

    def chat(question: str, **extra: Any) -> dict[str, int]:
        answer = client.chat.completions.create(
            model="tiny-linear",
            messages=[system, {"role": "user", "content": question}],  # type: ignore[list-item]
            max_tokens=4,
            temperature=0,
            extra_body=extra,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.model_dump()

    assert chat("What is the capital of France?")["cached_tokens"] == 0
    end = len(system["content"]) + 2
    assert chat("Which river is the longest?")["device_tokens"] == end // 16 * 16 > 0
    salt = {"cache_salt": "without", "cache_hints": False}
    assert chat("What is the capital of France?", **salt)["cached_tokens"] == 0
    assert chat("Which river is the longest?", **salt)["cached_tokens"] == 0
