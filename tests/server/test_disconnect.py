"""A client that goes away takes its request with it, whatever the request was doing."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_rig import fake_server, wait_for

from banyan.server.launch import ServerProcess


def stats(http: httpx.Client) -> dict[str, int]:
    engine = http.get("/v1/cache/stats").json()["engine"]
    return {"running": engine["running"], "aborted": engine["finished"]["abort"]}


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_before_any_token(http: httpx.Client, stream: bool) -> None:
    before = stats(http)["aborted"]
    body = {"prompt": "hang on", "max_tokens": 5, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    assert wait_for(lambda: stats(http)["aborted"] == before + 1)
    assert stats(http)["running"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_client_that_leaves_a_running_stream(http: httpx.Client, path: str) -> None:
    before = stats(http)["aborted"]
    text = "slow " + "x" * 100
    body: dict[str, Any] = {"stream": True, "max_tokens": 90}
    chat = {"messages": [{"role": "user", "content": text}]}
    body |= chat if "chat" in path else {"prompt": text}
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: dropping it would close the response
        next(lines)
        assert stats(http)["running"] == 1
    assert wait_for(lambda: stats(http)["aborted"] == before + 1)
    assert stats(http)["running"] == 0
    assert http.get("/health").json()["in_flight"] == 0


def test_client_that_leaves_a_running_whole_answer(http: httpx.Client) -> None:
    before = stats(http)["aborted"]
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            "/v1/completions",
            json={"prompt": ["slow " + "x" * 100, "slow two" + "y" * 90], "max_tokens": 90},
            timeout=0.3,
        )
    assert wait_for(lambda: stats(http)["aborted"] == before + 2)
    assert "banyan_clients_gone_total 0.0" not in http.get("/metrics").text


def test_many_streams_of_which_a_third_leave(server: ServerProcess, http: httpx.Client) -> None:
    """The server stays responsive meanwhile, and holds nothing afterwards."""
    rng = random.Random(7)
    leavers = [rng.random() < 1 / 3 for _ in range(60)]
    slowest = [0.0]
    done = threading.Event()

    def ask(number: int) -> int:
        tokens = 0
        body = {"prompt": f"prompt {number} " + "x" * 50, "stream": True, "max_tokens": 60}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            for line in answer.iter_lines():
                tokens += line.startswith("data: {")
                if leavers[number] and tokens > number % 7:
                    return -1
        return tokens

    def watch() -> None:
        while not done.wait(0.05):
            slowest[0] = max(slowest[0], http.get("/health").elapsed.total_seconds())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(60) as pool:
        results = list(pool.map(ask, range(60)))
    done.set()
    watcher.join()
    for number, tokens in enumerate(results):
        assert tokens == (-1 if leavers[number] else 50 + len(f"prompt {number} "))
    assert wait_for(lambda: stats(http)["running"] == 0)
    assert http.get("/health").json()["in_flight"] == 0
    assert slowest[0] < 2.0


def test_more_requests_than_may_wait_get_503() -> None:
    with (
        fake_server("--max-running", "1", "--max-waiting", "1") as server,
        httpx.Client(base_url=server.url, timeout=10) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        body = {"prompt": "slow " + "x" * 40, "max_tokens": 40}
        busy = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(2)]
        assert wait_for(lambda: http.get("/health").json()["in_flight"] == 2)
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert "--max-waiting" in refused.json()["error"]["message"]
        too_many = http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert too_many.status_code == 400, "it could never be served"
        assert [b.result().status_code for b in busy] == [200, 200]
        assert http.post("/v1/completions", json=body).status_code == 200
