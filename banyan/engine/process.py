"""The engine's own process: its main loop and how it ends.

Owns the order "receive, step, send". Knows the core only by its interface (it is built by an
importable function, so that torch is loaded here and nowhere else) and knows no HTTP. Everything
runs on the main thread; one more thread only ends the process when the parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from banyan.engine.messages import (
    AbortRequest,
    Command,
    FromEngine,
    GenerateRequest,
    Output,
    Reply,
    ToEngine,
)
from banyan.engine.wire import (
    DEFAULT_BUILD,
    Boot,
    Channel,
    Fatal,
    Progress,
    Ready,
    StartFailed,
)
from banyan.errors import BanyanError, ConfigError, InvariantError, RankError, RequestError
from banyan.options import ServeOptions

log = logging.getLogger("banyan.engine")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_OPTION = 2
EXIT_ORPHAN = 3

_IDLE_POLL_MS = 500
_QUIET_STEP_S = 0.0005
_QUIET_POLL_MS = 1


class Core(Protocol):
    """What the loop needs of an engine core; called from the main thread only."""

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts fixed at start: model name, lengths, the size table."""

    def submit(self, request: GenerateRequest) -> None:
        """Take a request; raises `RequestError` for one that can never be served."""

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown ids are ignored."""

    def step(self) -> list[Output]:
        """One scheduler step."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, nested by name."""

    def flush(self) -> dict[str, Any]:
        """Drop all cached content that no request holds."""

    def check(self) -> dict[str, Any]:
        """Verify every invariant; raises `InvariantError`."""

    def close(self) -> None:
        """Stop threads and give memory back."""


class EngineLoop:
    """Receives, steps and sends until told to stop."""

    def __init__(self, core: Core, channel: Channel) -> None:
        self._core, self._channel = core, channel
        self._stopping = False
        self._wait_ms = 0

    def stop(self) -> None:
        """End `run` after the current step; callable from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop` or a `shutdown` command.

        Raises:
            Exception: whatever a step raised; the core is not usable afterwards.
        """
        while not self._stopping:
            wait_ms = self._wait_ms if self._core.has_work else _IDLE_POLL_MS
            messages = self._channel.receive(wait_ms)
            if not self._core.has_work:
                self._channel.send(self._core.step())  # transfers may have ended meanwhile
            answers: list[FromEngine] = []
            for message in messages:
                answers.extend(self._handle(message))
            self._channel.send(answers)
            if self._core.has_work and not self._stopping:
                self._channel.send(self._step())

    def _step(self) -> list[Output]:
        """One step. After one that found nothing to do, the next `receive` waits a little."""
        start = time.perf_counter()
        outputs = self._core.step()
        quiet = not outputs and time.perf_counter() - start < _QUIET_STEP_S
        self._wait_ms = _QUIET_POLL_MS if quiet else 0
        return outputs

    def _handle(self, message: ToEngine) -> list[FromEngine]:
        if isinstance(message, Command):
            return [self._answer(message)]
        if isinstance(message, AbortRequest):
            self._core.abort(message.request_id)
            return []
        try:
            self._core.submit(message)
        except RequestError as error:
            return [_refusal(message.request_id, error)]
        return []

    def _answer(self, command: Command) -> Reply:
        """The reply to a command; findings of a check are an answer, not a failure."""
        name = command.name
        body: dict[str, Any] = {}
        if name == "stats":
            body = {**self._core.stats(), "bad_frames": self._channel.bad_frames}
        elif name == "flush":
            body = self._core.flush()
        elif name == "check":
            try:
                body = self._core.check()
            except InvariantError as error:
                body = {"error": str(error), "findings": error.findings}
                return Reply(command_id=command.command_id, ok=False, body=body)
        elif name == "shutdown":
            self.stop()
        else:
            body = {"error": f"unknown command {name!r}"}
            return Reply(command_id=command.command_id, ok=False, body=body)
        return Reply(command_id=command.command_id, ok=True, body=body)


def _refusal(request_id: str, error: RequestError) -> Output:
    return Output(
        request_id=request_id, finish_reason="error", error=str(error), error_code=error.code
    )


def run_engine(options: ServeOptions, endpoint: str, build: str = DEFAULT_BUILD) -> int:
    """Build the core, serve until told to stop, and return the process's exit status."""
    channel = Channel(endpoint)
    try:
        core = _start(options, channel, build)
        if core is None:
            return EXIT_BAD_OPTION
        loop = EngineLoop(core, channel)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        channel.send([Ready(core.info)])
        loop.run()
        core.close()
        return EXIT_OK
    except RankError as error:  # says all there is to say
        log.error("the engine stops: %s", error)
        channel.send([Fatal(str(error))])
        return EXIT_FAILED
    except Exception as error:  # the process boundary: report, then end with a status
        log.exception("the engine stops")
        channel.send([Fatal(f"{type(error).__name__}: {error}")])
        return EXIT_FAILED
    finally:
        channel.close()


def _start(options: ServeOptions, channel: Channel, build: str) -> Core | None:
    """The core, or None when it was refused; then the reason has been sent."""
    channel.send([Progress(f"loading {options.model}")])
    module, _, function = build.partition(":")
    try:
        core: Core = getattr(importlib.import_module(module), function)(options)
    except ConfigError as error:
        channel.send([StartFailed(str(error), error.option, error.problem, error.fix)])
        return None
    except BanyanError as error:
        channel.send([StartFailed(str(error))])
        return None
    return core


def _exit_with_parent(lifeline: int, endpoint: str) -> None:
    """Wait for the end of `lifeline`, tidy up what the parent cannot, and end the process."""
    while os.read(lifeline, 4096):
        pass
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
    os._exit(EXIT_ORPHAN)


def main() -> int:
    """Entry of `python -m banyan.engine.process`; what stdin carries is said in `wire`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("banyan").setLevel(logging.INFO)
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=Boot)
    threading.Thread(
        target=_exit_with_parent,
        args=(sys.stdin.fileno(), boot.endpoint),
        name="lifeline",
        daemon=True,
    ).start()
    return run_engine(boot.options, boot.endpoint, boot.build)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a core that broke may never end
