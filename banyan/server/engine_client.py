"""The HTTP process's view of the engine: many requests over one wire.

Owns the parent's end of the socket and which request's news goes to which reader. Knows no HTTP
and no tokenizer. Everything runs on one asyncio loop; a thread waits for the process's end.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from banyan.engine.messages import (
    AbortRequest,
    Command,
    GenerateRequest,
    Output,
    Reply,
    ToEngine,
)
from banyan.engine.wire import (
    DEFAULT_BUILD,
    Fatal,
    FromProcess,
    Progress,
    Ready,
    StartFailed,
    decode_from_process,
    encode,
)
from banyan.errors import BanyanError, ConfigError
from banyan.options import ServeOptions
from banyan.server.engine_process import EngineProcess, exit_reason
from banyan.server.errors import EngineBusy, EngineGone

_LAST_WORDS_S = 0.3
_STOP_GRACE_S = 5.0
_COMMAND_TIMEOUT_S = 60.0


class OutputStream:
    """The news of some requests, in arrival order; ends when all of them have ended.

    `close` aborts those that have not; it must be called exactly when the reader is done.
    """

    def __init__(self, client: EngineClient, requests: Sequence[GenerateRequest]) -> None:
        self._client = client
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self.open = {request.request_id for request in requests}

    def put(self, output: Output) -> None:
        """Called by the client for every output of a request of this stream."""
        self._queue.put_nowait(output)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        if not self.open:
            raise StopAsyncIteration
        output = await self._queue.get()
        if output.finish_reason is not None:
            self.open.discard(output.request_id)
        return output

    def close(self) -> None:
        """Abort what has not ended. Does not block; safe while being cancelled."""
        self._client.forget(self.open)
        self.open = set()


class EngineClient:
    """Starts an engine process, talks to it and ends it.

    Args:
        build: `module:function` that the engine process calls for its core.
    """

    def __init__(self, options: ServeOptions, build: str = DEFAULT_BUILD) -> None:
        self._options, self._build = options, build
        self._process = EngineProcess()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._exited = asyncio.Event()
        self._streams: dict[str, OutputStream] = {}
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._command_ids = itertools.count()
        self._on_progress: Callable[[str], None] = lambda text: None
        self.info: dict[str, Any] = {}
        self.failure: str | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id, once started."""
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet ended."""
        return len(self._streams)

    @property
    def capacity(self) -> int:
        """Most requests that may be in flight."""
        return self._options.max_running + self._options.max_waiting

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Start the engine and wait until it takes requests; `info` is set afterwards.

        Raises:
            ConfigError, BanyanError: the engine refused its options.
            EngineGone: it ended before it was ready.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._on_progress = on_progress
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._process.endpoint)
        self._process.start(self._options, self._build)
        self._reader = asyncio.create_task(self._read(self._socket))
        self._reader.add_done_callback(self._note_reader_end)
        threading.Thread(target=self._watch, args=(loop,), name="engine-exit", daemon=True).start()
        self.info = await self._ready

    def stream(self, requests: Sequence[GenerateRequest]) -> OutputStream:
        """Send requests; the caller reads the stream and closes it.

        Raises:
            EngineGone: the engine has ended.
            EngineBusy: the server already holds as many requests as it may.
        """
        if self.failure is not None:
            raise EngineGone(self.failure)
        if self.in_flight + len(requests) > self.capacity:
            raise EngineBusy(
                f"{self.in_flight} requests are running or waiting and {len(requests)} more were "
                f"asked for; --max-running plus --max-waiting allow {self.capacity}. "
                "Try again later"
            )
        stream = OutputStream(self, requests)
        for request in requests:
            self._streams[request.request_id] = stream
        self._post(requests)
        return stream

    def forget(self, request_ids: set[str]) -> None:
        """Stop listening to requests and tell the engine to drop them."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if request_ids and self.failure is None:
            self._post([AbortRequest(request_id=request_id) for request_id in sorted(request_ids)])

    async def command(self, name: str) -> Reply:
        """Ask the engine `stats`, `flush` or `check`; it answers between two steps.

        Raises:
            EngineGone: the engine has ended, or has not answered for a minute.
        """
        if self.failure is not None:
            raise EngineGone(self.failure)
        command_id = str(next(self._command_ids))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[command_id] = future
        try:
            self._post([Command(command_id=command_id, name=name)])
            return await asyncio.wait_for(future, _COMMAND_TIMEOUT_S)
        except TimeoutError:
            raise EngineGone(f"the engine has not answered {name!r} for a minute") from None
        finally:
            del self._replies[command_id]

    def fail_all(self, reason: str) -> None:
        """Note why the engine cannot be used any more, and tell everyone who waits for it.

        Only the first reason counts; later calls change nothing.
        """
        if self.failure is not None:
            return
        self.failure = reason
        for request_id, stream in list(self._streams.items()):
            stream.put(
                Output(
                    request_id=request_id,
                    finish_reason="error",
                    error=reason,
                    error_code=EngineGone.code,
                )
            )
        self._streams.clear()
        waiting: list[asyncio.Future[Any]] = list(self._replies.values())
        if self._ready is not None:
            waiting.append(self._ready)
        for future in waiting:
            if not future.done():
                future.set_exception(EngineGone(reason))

    async def stop(self) -> None:
        """End the engine process, politely at first, and give everything back."""
        if self._process.pid is not None and not self._exited.is_set():
            self._post([Command(command_id="stop", name="shutdown")])
            grace_s = _STOP_GRACE_S if self.info else 0  # while it loads it does not listen
            try:
                await asyncio.wait_for(self._exited.wait(), grace_s)
            except TimeoutError:
                await asyncio.to_thread(self._process.kill)
                await self._exited.wait()
        if self._reader is not None:
            self._reader.cancel()
        if self._socket is not None:
            self._socket.close()
        self._context.term()
        self._process.clean_up()

    # ---- the wire --------------------------------------------------------------------------------

    def _post(self, messages: Sequence[ToEngine]) -> None:
        """Queue a frame; with no high-water mark it never waits."""
        assert self._socket is not None
        self._socket.send(encode(messages))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            for message in decode_from_process(await socket.recv()):
                self._take(message)

    def _note_reader_end(self, task: asyncio.Task[None]) -> None:
        """Reading ends only by `stop`; anything else would leave every request waiting."""
        if not task.cancelled():
            self.fail_all(f"the engine's messages cannot be read: {task.exception()!r}")

    def _take(self, message: FromProcess) -> None:
        if isinstance(message, Output):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                if message.finish_reason is not None:
                    del self._streams[message.request_id]
                stream.put(message)
        elif isinstance(message, Reply):
            reply = self._replies.get(message.command_id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif isinstance(message, Fatal):
            self.fail_all(f"the engine stopped: {message.message}")
        else:
            self._take_at_start(message)

    def _take_at_start(self, message: Progress | Ready | StartFailed) -> None:
        assert self._ready is not None
        if isinstance(message, Progress):
            self._on_progress(message.text)
        elif self._ready.done():
            return
        elif isinstance(message, Ready):
            self._ready.set_result(message.info)
        elif message.option is not None:
            self._ready.set_exception(
                ConfigError(message.option, message.problem or "", message.fix or "")
            )
        else:
            self._ready.set_exception(BanyanError(message.message))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        loop.call_soon_threadsafe(self._note_exit, loop, status)

    def _note_exit(self, loop: asyncio.AbstractEventLoop, status: int) -> None:
        """The process has ended; what it said last may still be on its way."""
        self._exited.set()
        loop.call_later(_LAST_WORDS_S, self.fail_all, exit_reason(status))
