"""Processes that act as ranks, for tests: N of them, joined by gloo, that run a function each.

Owns the processes and ends them, by their own handles, whatever happens. A call that takes longer
than its limit, or a rank that dies, fails the test.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_PRELOAD = ["banyan.engine.parallel", "banyan.engine.models"]
"""What every rank imports, done once: on two cores four ranks would take four times as long."""


class RanksError(AssertionError):
    """A rank failed, died or did not answer in time."""


class RankPool:
    """Processes kept for several calls, since starting one costs seconds.

    Args:
        most: how many ranks a call can have.
    """

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._pipes: list[Connection] = []
        self.processes = []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the processes start
        try:
            for _ in range(most):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self.processes.append(process)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    def run(
        self, ranks: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0
    ) -> list[Any]:
        """Call `function(rank, ranks, *arguments)` on every rank, within a process group of them.

        Args:
            function: of a module that a new process can import.
            limit_s: for all of them together.

        Returns:
            what each returned, by rank.

        Raises:
            RanksError: with the trace of the first rank that failed; the pool is closed then.
        """
        self._calls += 1
        store = str(Path(self._folder.name, str(self._calls)))
        for rank, pipe in enumerate(self._pipes[:ranks]):
            pipe.send((store, rank, ranks, function, arguments, limit_s))
        try:
            return self._answers(ranks, limit_s)
        except RanksError:
            self.close()
            raise

    def _answers(self, ranks: int, limit_s: float) -> list[Any]:
        """Whichever rank answers first is heard first, so that a dead one is found at once."""
        deadline = time.monotonic() + limit_s
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise RanksError(f"ranks {late} of {ranks} did not answer in {limit_s} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    fine, answers[rank] = pipe.recv()
                except (EOFError, OSError) as error:
                    raise RanksError(f"rank {rank} of {ranks} died: {error!r}") from error
                if not fine:
                    raise RanksError(f"rank {rank} of {ranks}:\n{answers[rank]}")
        return [answers[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes; may be called again."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 2.0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5.0)
        self._pipes, self.processes = [], []
        self._folder.cleanup()


def gather(data: bytes) -> list[bytes]:
    """What every rank gave, in rank order; collective."""
    import torch.distributed as group

    answers: list[Any] = [None] * group.get_world_size()
    group.all_gather_object(answers, data)
    return answers


def _serve(pipe: Connection) -> None:
    """Run what comes through the pipe, until it closes."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, _call(*call)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return


def _call(
    store: str,
    rank: int,
    ranks: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    limit_s: float,
) -> Any:
    import torch.distributed as group

    group.init_process_group(
        "gloo",
        store=group.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=limit_s),
    )
    try:
        answer = function(rank, ranks, *arguments)
        group.barrier()  # none leaves while another still speaks to it
        return answer
    finally:
        group.destroy_process_group()
