"""The server as a whole: one command starts two processes, one signal ends both cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_rig import COMMAND, fake_server, is_alive, wait_for

from banyan.server.launch import ServerProcess, ServerStartError
from banyan.server.serve import bind_listener


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "serve", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_both_processes(number: signal.Signals) -> None:
    with fake_server() as server:
        os.kill(server.pid, number)
        assert server.stop() == 0
        assert not is_alive(server.engine_pid)
        assert "Traceback" not in server.output
        assert "fake answers at" in server.output and "limits" in server.output


def test_ctrl_c_reaches_the_http_process_only() -> None:
    with fake_server() as server:
        assert os.getpgid(server.engine_pid) != os.getpgid(server.pid)
        os.killpg(os.getpgid(server.pid), signal.SIGINT)
        assert server.stop() == 0
        assert "Traceback" not in server.output


def test_signal_while_requests_run() -> None:
    """An answer that is nearly done is finished; one that would go on for ever is told."""
    with (
        fake_server() as server,
        ThreadPoolExecutor(2) as pool,
        httpx.Client(base_url=server.url, timeout=20) as http,
    ):
        short = {"prompt": "slow " + "x" * 20, "max_tokens": 25}
        quick = pool.submit(http.post, "/v1/completions", json=short)
        stuck = pool.submit(http.post, "/v1/completions", json={"prompt": "hang"})
        assert wait_for(lambda: httpx.get(f"{server.url}/health").json()["in_flight"] == 2)
        assert server.stop() == 0
        assert quick.result().status_code == 200
        assert stuck.result().status_code == 503
        assert "shutting down" in stuck.result().json()["error"]["message"]
        assert "Traceback" not in server.output
        assert not is_alive(server.engine_pid)


def test_signal_while_the_model_loads() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "slow-start", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert wait_for(lambda: bool(children.read_text()), 10)
    engine = int(children.read_text().split()[0])
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert b"Traceback" not in output
    assert not is_alive(engine)


def test_killed_server_leaves_no_engine() -> None:
    with fake_server() as server:
        os.kill(server.pid, signal.SIGKILL)
        assert wait_for(lambda: not is_alive(server.engine_pid))
        assert server.stop() == -signal.SIGKILL


def test_dead_engine_is_503_and_said_by_health() -> None:
    with fake_server() as server, httpx.Client(base_url=server.url, timeout=10) as http:
        answer = http.post("/v1/completions", json={"prompt": "crash now"})
        assert answer.status_code == 503
        assert "told to crash" in answer.json()["error"]["message"]
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "engine_gone"
        assert "told to crash" in health.json()["reason"]
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert http.get("/v1/cache/stats").status_code == 503
        assert "banyan_engine_up 0.0" in http.get("/metrics").text
        assert http.get("/v1/models").status_code == 200
        assert wait_for(lambda: not is_alive(server.engine_pid))
        assert "Traceback" in server.output, "the engine's own log says where it broke"
        assert server.stop() == 0


def test_crash_in_the_middle_of_a_stream_is_an_event() -> None:
    with fake_server() as server, httpx.Client(base_url=server.url, timeout=10) as http:
        body = {"prompt": "slow " + "x" * 100, "max_tokens": 90, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            http.post("/v1/completions", json={"prompt": "crash"})
            rest = [line for line in lines if line]
        assert '"code":"engine_gone"' in rest[-2]
        assert rest[-1] == "data: [DONE]"


def test_port_in_use_is_one_line_and_costs_no_load() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        done = run("slow-start", "--port", port)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"banyan: --port: {port} on 127.0.0.1 is in use" in done.stderr
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fake", "--host", "203.0.113.7"), "--host: cannot listen on 203.0.113.7"),
        (("bad-option", "--port", "0"), "--device-bytes: 4096 holds no request. Write at least"),
        (("fake", "--page-size", "16", "--chunk", "500"), "Write --chunk 496 or --chunk 512"),
    ],
)
def test_bad_option_is_one_line_with_the_fix(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stdout + done.stderr


def test_engine_that_cannot_start_ends_the_server() -> None:
    done = run("bad-start", "--port", "0")
    assert done.returncode == 2
    assert "told not to start" in done.stderr.splitlines()[-1]


def test_server_process_quotes_the_output_of_a_failed_start() -> None:
    with pytest.raises(ServerStartError, match=r"(?s)status 2.*4096 holds no request"):
        fake_server(model="bad-option").start()


def test_server_process_gives_up_at_its_deadline() -> None:
    server = ServerProcess("slow-start", command=COMMAND, start_timeout_s=1.0)
    with pytest.raises(ServerStartError, match="did not answer within 1 s"):
        server.start()
    assert not is_alive(server.pid)


def test_answers_are_sent_at_once() -> None:
    """Nagle's algorithm would hold a first token back for the client's delayed acknowledgement."""

    async def nagle_is_off() -> bool:
        seen: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            seen.set_result(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        server = await asyncio.start_server(connected, sock=bind_listener("127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        found = await seen
        writer.close()
        server.close()
        return found

    assert asyncio.run(nagle_is_off())
