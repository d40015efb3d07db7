"""The engine as a child process: starting it, noticing its end, ending it.

Owns the process, its endpoint's folder and its lifeline. Knows nothing of what is said over the
wire. Blocking calls; `wait` may run on a thread of its own, the others belong to one thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from banyan.engine.wire import Boot
from banyan.options import ServeOptions

_THREADS_SLEEP = {"OMP_WAIT_POLICY": "passive"}
"""The engine shares its cores with the HTTP process and the copy threads. Threads of a parallel
loop that spin while they wait for one that was not given a core stop everything: on two busy cores
`test_answers_are_equal_from_device_and_host` took 67 s with spinning, 7 s without."""

_MAX_SOCKET_PATH = 90
_KILL_AFTER_S = 2.0


class EngineProcess:
    """One engine process and the private folder (mode 0700) that holds its socket."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="banyan-"))
        if len(str(self._folder)) > _MAX_SOCKET_PATH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="banyan-", dir="/tmp"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The ZMQ address for the parent to bind."""
        return f"ipc://{self._folder}/engine"

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    def start(self, options: ServeOptions, build: str) -> None:
        """Start the process, in a process group of its own so that Ctrl-C reaches only us."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "banyan.engine.process"],
            stdin=subprocess.PIPE,
            process_group=0,
            env=_THREADS_SLEEP | os.environ,
        )
        assert self._process.stdin is not None
        boot = Boot(options=options, endpoint=self.endpoint, build=build)
        self._process.stdin.write(msgspec.json.encode(boot) + b"\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Block until the process has ended; its exit status."""
        assert self._process is not None
        return self._process.wait()

    def kill(self) -> None:
        """End the process now, politely first. Blocks at most a few seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def clean_up(self) -> None:
        """Close the lifeline and remove the folder; after the process has ended."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def exit_reason(status: int) -> str:
    """A sentence about an exit status of the engine process."""
    if status < 0:
        hint = ", which the system does when memory runs out" if status == -9 else ""
        return f"the engine process was ended by signal {-status}{hint}"
    return f"the engine process ended with status {status}"
