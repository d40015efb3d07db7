"""Ranks as processes: starting those that follow, noticing the end of one, ending all.

Owns the child processes of rank 0 and the entry of a child. What a rank runs is built by an
importable function, for a server and for a soak alike. A child reads its first words from stdin,
and stdin stays open as its lifeline: when it ends, rank 0 is gone, and so is the child. A rank that
ends before it was told to makes rank 0 end within `LAST_MOMENTS_S`, whatever it is waiting for.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from banyan.engine.core import EngineCore
from banyan.engine.fabric import Place, TorchFabric, join, open_store, place_from_environment
from banyan.engine.rank_context import RankContext
from banyan.engine.ranked import RankedCore, follow
from banyan.errors import BanyanError, RankLostError

log = logging.getLogger("banyan.engine")

EXIT_RANK_LOST = 4
LAST_MOMENTS_S = 8.0
"""After a rank has ended, the longest that rank 0 goes on, if only to say so."""

_NOTICE_S = 1.0
_HEARING_S = 0.5
_STOP_S = 5.0
_THREADS = {"OMP_WAIT_POLICY": "passive"}

Build = Callable[[bytes, RankContext], EngineCore]


class RankBoot(msgspec.Struct, frozen=True):
    """What rank 0 tells a new rank.

    Args:
        build: `module:function`, called with `options` and the rank's context; returns its core.
        options: JSON, what `build` makes of it.
        device: `cuda` makes the model's collectives nccl's.
    """

    build: str
    options: str
    address: str
    rank: int
    ranks: int
    device: str


class Followers:
    """The processes of all ranks but 0, on this machine; none where somebody else started them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False
        self._noticed = threading.Event()
        self._lost: str | None = None

    def start(self, boots: list[RankBoot]) -> None:
        """Start a process for each, in a group of its own so that Ctrl-C reaches only rank 0."""
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        for boot in boots:
            process = subprocess.Popen(
                [sys.executable, "-m", "banyan.engine.rank_process"],
                stdin=subprocess.PIPE,
                process_group=0,
                env=_THREADS | threads | os.environ,
            )
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
            process.stdin.flush()
            name = f"rank-{boot.rank}"
            args = (process, boot.rank)
            threading.Thread(target=self._watch, args=args, name=name, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1 on."""
        return [process.pid for process in self._processes]

    def why_lost(self) -> str | None:
        """Which rank has ended and how; waits a moment for the news. None where none has."""
        self._noticed.wait(_NOTICE_S if self._processes else 0)
        return self._lost

    def stop(self) -> None:
        """Wait a moment for all to end, then end them. Again: nothing."""
        self._stopping = True
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        status = process.wait()
        if self._stopping or self._lost is not None:
            return
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        self._lost = f"rank {rank} {how}; the other ranks cannot go on without it"
        self._noticed.set()
        for other in self._processes:  # one of them may wait for the lost one, and rank 0 for it
            if other.poll() is None:
                other.kill()
        timer = threading.Timer(LAST_MOMENTS_S, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        """Rank 0 waits for something that will not come: end it here."""
        if not self._stopping:
            log.error("%s", self._lost)
            logging.shutdown()
            os._exit(EXIT_RANK_LOST)


def lead(
    build: str,
    options: bytes,
    ranks: int,
    *,
    device: str = "cpu",
    started: Callable[[list[int]], None] = lambda pids: None,
) -> RankedCore:
    """Start the other ranks, or meet those that somebody else has started, and build rank 0.

    Args:
        build: `module:function`, as in `RankBoot`.
        options: JSON for it.
        started: told the process ids of the other ranks.

    Raises:
        RankError: a rank did not come. ConfigError, SpecError: as `build` does, on any rank.
    """
    place, store, followers = place_from_environment(ranks), None, Followers()
    if place is None:
        store, address = open_store(ranks)
        place = Place(0, ranks, 0, address)
        text = options.decode()
        followers.start([RankBoot(build, text, address, r, ranks, device) for r in range(1, ranks)])
        started(followers.pids)
    try:
        fabric = join(place, store, device)
        context = RankContext(fabric)
        core = _build(build)(options, context)
        fabric.wait_for_all("built")
    except RankLostError as error:
        lost = followers.why_lost()
        followers.stop()
        raise RankLostError(lost or str(error)) from error
    except BaseException:
        followers.stop()
        raise

    def closed() -> None:
        followers.stop()
        fabric.close()

    pids = [os.getpid(), *followers.pids] if not place.alone else []
    return RankedCore(core, context, closed, followers.why_lost, pids)


def run_follower(boot: RankBoot, place: Place) -> None:
    """Be one of the ranks that follow, until rank 0 says stop.

    Raises:
        RankError: rank 0 is gone, or the ranks have drifted apart.
    """
    fabric: TorchFabric = join(place, None, boot.device)
    context = RankContext(fabric)
    core = _build(boot.build)(boot.options.encode(), context)
    fabric.wait_for_all("built")
    follow(core, context)
    fabric.close()


def follow_from_environment(build: str, options: bytes, ranks: int, device: str) -> bool:
    """Be the rank that the usual rendezvous variables say, if that is not rank 0.

    Returns:
        False at once where this process is to lead; True when it has followed to the end.

    Raises:
        ConfigError: the variables disagree with `ranks`. Else as `run_follower`.
    """
    place = place_from_environment(ranks)
    if place is None or place.rank == 0:
        return False
    boot = RankBoot(build, options.decode(), place.address, place.rank, ranks, device)
    run_follower(boot, place)
    return True


def _build(name: str) -> Build:
    module, _, function = name.partition(":")
    build: Build = getattr(importlib.import_module(module), function)
    return build


def _exit_with_rank_0(lifeline: Any) -> None:
    while os.read(lifeline, 4096):
        pass
    os._exit(EXIT_RANK_LOST)


def main() -> int:
    """Entry of `python -m banyan.engine.rank_process`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankBoot)
    text = f"%(levelname)s %(name)s, rank {boot.rank}: %(message)s"
    logging.basicConfig(format=text, level=logging.WARNING)
    lifeline = sys.stdin.fileno()
    threading.Thread(target=_exit_with_rank_0, args=(lifeline,), daemon=True).start()
    try:
        run_follower(boot, Place(boot.rank, boot.ranks, boot.rank, boot.address))
    except Exception as error:  # the process boundary: said once, then the end
        if isinstance(error, BanyanError):
            time.sleep(_HEARING_S)  # rank 0 may have met the same, and then ends this process
        log.error("%s: %s", type(error).__name__, error)
        return EXIT_RANK_LOST
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a rank that broke may never end
