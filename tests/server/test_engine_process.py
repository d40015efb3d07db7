"""The engine process: how it starts, answers, fails and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_core import FakeCore
from server_rig import is_alive, wait_for

from banyan.engine.messages import AbortRequest, Command, GenerateRequest, Output, Reply, Sampling
from banyan.engine.process import EXIT_BAD_OPTION, EXIT_FAILED, EXIT_OK, EXIT_ORPHAN, EngineLoop
from banyan.engine.wire import Boot, Channel, decode_from_process, encode
from banyan.errors import ConfigError
from banyan.options import ServeOptions
from banyan.server.engine_client import EngineClient
from banyan.server.errors import EngineGone

BUILD = "fake_core:build"


def request(prompt: str, request_id: str = "r", max_tokens: int = 50) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt=list(prompt.encode()),
        sampling=Sampling(max_tokens=max_tokens),
    )


def with_client(
    work: Callable[[EngineClient], Awaitable[Any]], model: str = "fake", build: str = BUILD
) -> Any:
    """Run `work` with a started engine; the engine is ended and gone afterwards."""

    async def main() -> Any:
        client = EngineClient(ServeOptions(model=model), build)
        try:
            await client.start(lambda text: None)
            return await work(client)
        finally:
            await client.stop()
            assert client.pid is None or not is_alive(client.pid)

    return asyncio.run(main())


async def collect(client: EngineClient, *requests: GenerateRequest) -> list[Output]:
    stream = client.stream(requests)
    try:
        return [output async for output in stream]
    finally:
        stream.close()


# ---- through the client --------------------------------------------------------------------------


def test_requests_are_answered_side_by_side() -> None:
    async def work(client: EngineClient) -> None:
        first, second = await asyncio.gather(
            collect(client, request("one", "a")), collect(client, request("other", "b"))
        )
        assert "".join(o.text for o in first) == "ONE"
        assert "".join(o.text for o in second) == "OTHER"
        assert first[-1].usage is not None and first[-1].usage.prompt_tokens == 3
        assert client.in_flight == 0

    with_client(work)


def test_progress_and_info_come_with_the_start() -> None:
    async def main() -> tuple[list[str], dict[str, Any]]:
        said: list[str] = []
        client = EngineClient(ServeOptions(model="fake"), BUILD)
        try:
            await client.start(said.append)
            return said, client.info
        finally:
            await client.stop()

    said, info = asyncio.run(main())
    assert said == ["loading fake"]
    assert info["model"] == "fake" and info["size_rows"][0]["tier"] == "device"


def test_refused_request_is_an_output_with_the_reason() -> None:
    async def work(client: EngineClient) -> None:
        (refusal,) = await collect(client, request("x" * 500))
        assert refusal.finish_reason == "error"
        assert refusal.error_code == "context_length_exceeded"

    with_client(work)


def test_closing_a_stream_aborts_what_is_open() -> None:
    async def work(client: EngineClient) -> None:
        stream = client.stream([request("hang", "h"), request("x", "x")])
        assert (await anext(stream)).request_id == "x"
        stream.close()
        stream.close()
        engine = (await client.command("stats")).body["engine"]
        assert (engine["running"], engine["finished"], client.in_flight) == (0, {"abort": 1}, 0)

    with_client(work)


def test_commands() -> None:
    async def work(client: EngineClient) -> None:
        assert (await client.command("flush")).body == {"flushes": 1}
        assert (await client.command("check")).ok
        unknown = await client.command("dance")
        assert not unknown.ok and "dance" in unknown.body["error"]

    with_client(work)


@pytest.mark.parametrize(
    ("prompt", "says"), [("crash", "RuntimeError: the fake core was told"), ("invariant", "INV-02")]
)
def test_failing_step_ends_the_engine_and_tells_everyone(prompt: str, says: str) -> None:
    async def work(client: EngineClient) -> None:
        waiting = asyncio.create_task(collect(client, request("hang", "h")))
        (last,) = await collect(client, request(prompt, "c"))
        assert last.error_code == "engine_gone" and says in (last.error or "")
        assert (await waiting)[-1].error_code == "engine_gone"
        assert client.failure is not None and says in client.failure
        with pytest.raises(EngineGone, match="the engine stopped"):
            client.stream([request("x")])
        with pytest.raises(EngineGone):
            await client.command("stats")

    with_client(work)


def test_killed_engine_is_noticed() -> None:
    async def work(client: EngineClient) -> None:
        waiting = asyncio.create_task(collect(client, request("hang", "h")))
        await client.command("stats")
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        (last,) = await asyncio.wait_for(waiting, 5)
        assert "signal 9" in (last.error or "")

    with_client(work)


def test_terminated_engine_is_noticed() -> None:
    async def work(client: EngineClient) -> None:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        while client.failure is None:
            await asyncio.sleep(0.02)
        assert "ended with status 0" in client.failure

    with_client(work)


def test_engine_of_another_build_that_dies_at_start() -> None:
    with pytest.raises(EngineGone, match="told not to start"):
        with_client(lambda client: asyncio.sleep(0), model="bad-start")
    with pytest.raises(EngineGone, match="ModuleNotFoundError"):
        with_client(lambda client: asyncio.sleep(0), build="no_such_module:build")


def test_refused_option_arrives_as_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        with_client(lambda client: asyncio.sleep(0), model="bad-option")
    assert caught.value.option == "--device-bytes"
    assert caught.value.fix == "Write at least 1MiB"


def test_stop_while_it_loads() -> None:
    async def main() -> int:
        client = EngineClient(ServeOptions(model="slow-start"), BUILD)
        start = asyncio.create_task(client.start(lambda text: None))
        await asyncio.sleep(0.5)
        start.cancel()
        await client.stop()
        assert client.pid is not None
        return client.pid

    assert not is_alive(asyncio.run(main()))


# ---- the process itself --------------------------------------------------------------------------


class Engine:
    """An engine process with a plain socket instead of the client."""

    def __init__(self, folder: Path, model: str = "fake") -> None:
        self.endpoint = f"ipc://{folder}/engine"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "banyan.engine.process"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        boot = Boot(options=ServeOptions(model=model), endpoint=self.endpoint, build=BUILD)
        self.process.stdin.write(msgspec.json.encode(boot) + b"\n")
        self.process.stdin.flush()

    def receive(self) -> list[Any]:
        assert self.socket.poll(10_000), "the engine is silent"
        return list(decode_from_process(self.socket.recv()))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.socket.close()
        self.context.term()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e")


def test_engine_ends_with_its_parent(folder: Path) -> None:
    engine = Engine(folder)
    try:
        while not any(type(m).__name__ == "Ready" for m in engine.receive()):
            pass
        engine.socket.send(encode([request("hang")]))
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert engine.process.wait(5) == EXIT_ORPHAN
        assert wait_for(lambda: not folder.exists()), "it removes the socket's folder"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model", "status", "stderr"),
    [("bad-option", EXIT_BAD_OPTION, b""), ("bad-start", EXIT_FAILED, b"Traceback")],
)
def test_exit_status(folder: Path, model: str, status: int, stderr: bytes) -> None:
    engine = Engine(folder, model)
    try:
        assert engine.process.wait(10) == status
        assert engine.process.stderr is not None
        said = engine.process.stderr.read()
        assert stderr in said and bool(stderr) == bool(said)
    finally:
        engine.close()


def test_frame_that_cannot_be_read_is_dropped_and_counted(folder: Path) -> None:
    engine = Engine(folder)
    try:
        engine.socket.send(b"\xc1 no message")
        engine.socket.send(encode([Command(command_id="1", name="stats")]))
        replies: list[Reply] = []
        while not replies:
            replies = [m for m in engine.receive() if isinstance(m, Reply)]
        assert replies[0].body["bad_frames"] == 1
        engine.socket.send(encode([Command(command_id="2", name="shutdown")]))
        assert engine.process.wait(5) == EXIT_OK
    finally:
        engine.close()


# ---- the loop ------------------------------------------------------------------------------------


class ScriptedChannel(Channel):
    """Gives prepared messages, one list per call, and keeps what is sent."""

    def __init__(self, script: list[list[Any]]) -> None:
        self.script, self.sent, self.bad_frames = script, [], 0  # type: ignore[var-annotated]
        self.waits: list[int] = []

    def receive(self, timeout_ms: int) -> list[Any]:
        self.waits.append(timeout_ms)
        return self.script.pop(0) if self.script else [Command(command_id="end", name="shutdown")]

    def send(self, messages: Any) -> None:
        if messages:
            self.sent.append(list(messages))


def test_outputs_of_a_step_leave_in_one_frame() -> None:
    channel = ScriptedChannel([[request("ab", "x"), request("cd", "y")], []])
    EngineLoop(FakeCore(ServeOptions(model="fake")), channel).run()
    assert [[(o.request_id, o.text) for o in frame] for frame in channel.sent[:2]] == [
        [("x", "A"), ("y", "C")],
        [("x", "B"), ("y", "D")],
    ]


def test_loop_waits_only_when_there_is_nothing_to_do() -> None:
    channel = ScriptedChannel([[request("hang", "h")], [], [AbortRequest(request_id="h")], []])
    EngineLoop(FakeCore(ServeOptions(model="fake")), channel).run()
    idle, after_submit, _, after_abort = channel.waits[0], *channel.waits[1:4]
    assert idle >= 100 and after_abort == idle
    assert after_submit == 1, "a step that found nothing to do is followed by a short wait"


def test_failed_check_is_an_answer() -> None:
    core = FakeCore(ServeOptions(model="fake"))
    core.broken = True
    channel = ScriptedChannel([[Command(command_id="c", name="check")]])
    EngineLoop(core, channel).run()
    reply = channel.sent[0][0]
    assert not reply.ok and reply.body["findings"] == ["INV-01: a slot is lost"]
