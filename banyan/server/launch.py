"""A server as a child process, for benchmarks and tests.

Owns one `banyan serve` process: starting it on a free port, waiting until it answers, ending it.
Its output goes to an unnamed temporary file and is quoted when the start fails. Blocking calls.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

from banyan.errors import BanyanError

BANYAN = (sys.executable, "-m", "banyan")

_URL = re.compile(r"answers at (http://\S+)/v1")
_POLL_S = 0.05
_LOG_TAIL_BYTES = 4000
_STOP_S = 20.0


class ServerStartError(BanyanError):
    """The server ended, or did not answer in time; carries the end of its output."""


class ServerProcess:
    """`banyan serve MODEL` on a free port; a context manager.

    Args:
        arguments: options as on the command line; `--port` is added where it is missing.
        command: what to run instead of `banyan`.
        start_timeout_s: seconds until it must answer; models are downloaded before.

    Raises:
        ServerStartError: from `start` or on entering.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        *,
        command: Sequence[str] = BANYAN,
        start_timeout_s: float = 300.0,
    ) -> None:
        port = () if "--port" in arguments else ("--port", "0")
        self._command = [*command, "serve", model, *arguments, *port]
        self._start_timeout_s = start_timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.engine_pid = 0

    @property
    def pid(self) -> int:
        """Process id of the HTTP process, which started the engine's."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        """All it has printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def start(self) -> None:
        """Start the server and return when it answers; `url` is known afterwards."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            self._wait_until_ready(time.monotonic() + self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while not (found := _URL.search(self.output)):
            status = self._process.poll()
            if status is not None:
                raise self._failed(f"ended with status {status}")
            if time.monotonic() > deadline:
                raise self._failed(f"did not answer within {self._start_timeout_s:.0f} s")
            time.sleep(_POLL_S)
        self.url = found.group(1)
        health = httpx.get(f"{self.url}/health", timeout=max(1.0, deadline - time.monotonic()))
        self.engine_pid = int(health.json()["engine_pid"])

    def _failed(self, what: str) -> ServerStartError:
        words = " ".join(self._command[self._command.index("serve") - 1 :])
        return ServerStartError(f"{words} {what}; it said:\n{self.output[-_LOG_TAIL_BYTES:]}")

    def stop(self) -> int:
        """End both processes and return the exit status; 0 when they ended by themselves."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its engine notices and ends
            status = self._process.wait()
        return status

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._log.close()
