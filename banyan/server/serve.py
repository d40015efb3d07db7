"""`banyan serve`, from options to exit status.

Owns the order of starting (check, bind, load, listen) and of stopping, and what the terminal
shows. Knows every other part of the server by its constructor. Runs on the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import signal
import socket
import threading
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from prometheus_client import disable_created_metrics
from rich.console import Console
from rich.markup import escape

from banyan.engine.wire import DEFAULT_BUILD
from banyan.errors import ConfigError
from banyan.options import ServeOptions
from banyan.server.app import create_app
from banyan.server.engine_client import EngineClient
from banyan.server.metrics import ServerMetrics
from banyan.server.prompts import PromptEncoder
from banyan.server.tables import component_table, size_table

DEFAULT_TOKENIZER = "banyan.engine.models:load_tokenizer"

_BACKLOG = 2048
_DRAIN_S = 2.0
_GIVE_UP_S = 10


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket; done before the model is loaded, so that a clash costs no time.

    Raises:
        ConfigError: the port is taken or not allowed, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off; without, a first token waits
    # some 40 ms for the client's delayed acknowledgement of the response's head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            "--port",
            f"{port} on {host} is in use",
            "Stop the other server, or give another port (0 takes a free one)",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError("--port", f"{port} is not allowed", "Give a port from 1024 on")
    return ConfigError(
        "--host", f"cannot listen on {host}: {error.strerror or error}", "Try 127.0.0.1 or 0.0.0.0"
    )


def url_of(listener: socket.socket) -> str:
    """The URL to reach a listening socket from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host and "[" not in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to us and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Nothing: `Server` below handles signals for all processes."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets=sockets)
        self._on_listening()


class Server:
    """One serving session.

    Args:
        build, tokenizer: `module:function` of the engine's core and of the tokenizer.
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        build: str = DEFAULT_BUILD,
        tokenizer: str = DEFAULT_TOKENIZER,
        console: Console | None = None,
    ) -> None:
        self._options, self._build, self._tokenizer = options, build, tokenizer
        self._console = console or Console()
        self._stop = asyncio.Event()
        self._signals = 0
        self._uvicorn: _Uvicorn | None = None

    async def run(self) -> None:
        """Serve until SIGINT or SIGTERM.

        Raises:
            ConfigError, BanyanError: the server could not start; everything is given back.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        listener = bind_listener(self._options.host, self._options.port)
        client = EngineClient(self._options, self._build)
        try:
            encoder = await self._unless_stopped(self._start(client))
            if encoder is not None:
                await self._serve(client, encoder, listener)
                encoder.close()
        finally:
            listener.close()
            client.fail_all("the server is shutting down")
            await client.stop()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._uvicorn is not None and self._signals > 1:
            self._uvicorn.force_exit = True

    async def _unless_stopped(self, work: Any) -> Any:
        """The result of `work`, or None when a signal came first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _start(self, client: EngineClient) -> PromptEncoder:
        """Load the engine and the tokenizer, both at once, showing what happens."""
        with self._console.status(f"starting {escape(self._options.model)}") as status:
            tokenizer = in_daemon_thread(self._load_tokenizer)
            await client.start(lambda text: status.update(escape(text)))
            return PromptEncoder(await tokenizer, int(client.info["vocab_size"]))

    def _load_tokenizer(self) -> Any:
        module, _, function = self._tokenizer.partition(":")
        return getattr(importlib.import_module(module), function)(self._options.model)

    async def _serve(
        self, client: EngineClient, encoder: PromptEncoder, listener: socket.socket
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        app = create_app(client, encoder, ServerMetrics())
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GIVE_UP_S,
        )
        self._uvicorn = _Uvicorn(config, lambda: self._announce(client, listener))
        closing = asyncio.create_task(self._close_on_stop(self._uvicorn, client))
        await self._uvicorn.serve(sockets=[listener])
        closing.cancel()

    def _announce(self, client: EngineClient, listener: socket.socket) -> None:
        self._console.print(component_table(client.info["component_rows"]))
        self._console.print(size_table(client.info["size_rows"]))
        model = escape(client.info["model"])
        line = f"[bold]{model}[/bold] answers at [bold]{url_of(listener)}[/bold]/v1"
        self._console.print(line, soft_wrap=True, highlight=False)

    async def _close_on_stop(self, server: _Uvicorn, client: EngineClient) -> None:
        """After a signal: no new connections; running answers get a moment, then an error."""
        await self._stop.wait()
        server.should_exit = True
        await asyncio.sleep(_DRAIN_S)
        client.fail_all("the server is shutting down")


def in_daemon_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """The result of a blocking call that need not be waited for at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, caught = None, None
        try:
            result = function()
        except Exception as error:  # the thread's boundary: handed to whoever awaits
            caught = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=run, name="load-tokenizer", daemon=True).start()
    return future


def serve(
    options: ServeOptions, *, build: str = DEFAULT_BUILD, tokenizer: str = DEFAULT_TOKENIZER
) -> None:
    """Serve `options.model` until a signal; blocks."""

    async def main() -> None:
        await Server(options, build=build, tokenizer=tokenizer).run()

    asyncio.run(main())
