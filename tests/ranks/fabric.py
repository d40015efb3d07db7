"""A fabric for ranks of one process: each rank is a coroutine, a seed says which one runs next.

Owns the coroutines, the calls that ranks make to each other, and the verdict on them: all must make
the same call at the same place, and when none can go on, that is a deadlock. Knows no engine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from banyan.ranks import Words

_DRIFTS = 0.3
"""How often a rank whose call need not wait is made to stand back for others all the same."""

_SHOWN = 4


class Divergence(AssertionError):
    """The ranks did not do the same: they called differently, hung, or have different histories."""


class _Call:
    """One conversation: what the first rank to come has called, and what was said.

    Args:
        length: words of a `collect`; 0 for the others, whose lengths may differ.
        by: the rank that came first.
    """

    __slots__ = ("by", "done", "kind", "length", "parts", "waiting")

    def __init__(self, kind: str, length: int, by: int) -> None:
        self.kind, self.length, self.by = kind, length, by
        self.parts: dict[int, object] = {}
        self.waiting: list[int] = []
        self.done = False


class SimulatedFabric:
    """The ranks of one node and all that they say.

    Args:
        size: how many ranks.
        rng: says who runs next, whenever several can.

    Attributes:
        places: calls made so far, by rank.
        errors: what a rank has ended with, by rank.
    """

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size, self._rng = size, rng
        self.places = [0] * size
        self.errors: dict[int, BaseException] = {}
        self._calls: list[_Call] = []
        self._ranks: list[greenlet] = []
        self._ready: list[int] = []
        self._waits: list[_Call | None] = [None] * size
        self._failure: str | None = None
        self._closed = False
        self._hub = getcurrent()

    def end(self, rank: int) -> FabricEnd:
        """The `Fabric` of one rank."""
        return FabricEnd(self, rank)

    def fail(self, message: str) -> NoReturn:
        """End the simulation; does not return to the rank that calls it."""
        self._failure = self._failure or message
        self._hub.switch()
        raise GreenletExit

    # ---- running ---------------------------------------------------------------------------------

    def run(self, mains: list[Callable[[], None]]) -> None:
        """Run one function per rank, until all have returned.

        Raises:
            Divergence: with what differs, or with who waits where when nobody can go on.
        """
        self._hub = getcurrent()
        self._ranks = [greenlet(self._guarded(r, main)) for r, main in enumerate(mains)]
        self._ready = list(range(self.size))
        try:
            while self._ready and self._failure is None:
                at = int(self._rng.random() * len(self._ready))
                rank, self._ready[at] = self._ready[at], self._ready[-1]
                self._ready.pop()
                self._ranks[rank].switch()
            self._judge()
        finally:
            self._end_all()

    def _guarded(self, rank: int, main: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                main()
            except Exception as error:
                self.errors[rank] = error

        return run

    def _judge(self) -> None:
        if self._failure is not None:
            raise Divergence(self._failure)
        for rank, error in self.errors.items():
            alike = sorted(r for r, e in self.errors.items() if str(e) == str(error))
            raise Divergence(
                f"rank {rank} has ended with {type(error).__name__}: {error} (so did ranks {alike})"
            ) from error
        stuck = [rank for rank in range(self.size) if self._waits[rank] is not None]
        if stuck:
            told = "\n  ".join(self._where(rank) for rank in range(self.size))
            raise Divergence(f"deadlock: {len(stuck)} of {self.size} ranks wait\n  {told}")
        if len(set(self.places)) > 1:
            raise Divergence(f"different numbers of calls, by rank: {self.places}")

    def _where(self, rank: int) -> str:
        call = self._waits[rank]
        if call is None:
            return f"rank {rank} has ended after {self.places[rank]} calls"
        frames = _frames(self._ranks[rank].gr_frame)
        came = sorted(call.parts)
        return (
            f"rank {rank} waits in call {self.places[rank] - 1}, {call.kind}, at {frames}; "
            f"ranks {came} have come"
        )

    def _end_all(self) -> None:
        """Unwind the coroutines that have not ended."""
        self._closed = True
        for rank in self._ranks:
            while not rank.dead:
                rank.throw(GreenletExit)
        self._ranks.clear()

    # ---- calls -----------------------------------------------------------------------------------

    def enter(
        self, rank: int, kind: str, length: int, part: object, waits_for: int | None
    ) -> _Call:
        """Make a call and return when it is complete as far as `rank` is concerned.

        Args:
            part: what this rank says.
            waits_for: None for nobody, a rank whose part is needed, or `size` for all parts.
        """
        if self._closed:
            raise GreenletExit
        place = self.places[rank]
        self.places[rank] += 1
        if place == len(self._calls):
            self._calls.append(_Call(kind, length, rank))
        call = self._calls[place]
        if (kind, length) != (call.kind, call.length):
            self.fail(
                f"call {place}: rank {rank} calls {kind}({length or ''}) at "
                f"{_frames(sys._getframe())}, where rank {call.by} has called "
                f"{call.kind}({call.length or ''})"
            )
        call.parts[rank] = part
        self._wake(call)
        if waits_for is None or self._is_there(call, waits_for):
            if self._rng.random() < _DRIFTS:
                self._ready.append(rank)
                self._hub.switch()
            return call
        call.waiting.append(rank)
        self._waits[rank] = call
        self._hub.switch()
        self._waits[rank] = None
        return call

    def _is_there(self, call: _Call, waits_for: int) -> bool:
        return len(call.parts) == self.size if waits_for == self.size else waits_for in call.parts

    def _wake(self, call: _Call) -> None:
        """Let those go on whom the latest part has made free."""
        if call.waiting and self._is_there(call, 0 if call.kind == "broadcast" else self.size):
            for rank in call.waiting:
                self._ready.append(rank)
            call.waiting = []


class FabricEnd:
    """Implements `banyan.ranks.Fabric` for one rank of a `SimulatedFabric`.

    As over a network, a rank that only sends need not wait until others have come.
    """

    def __init__(self, node: SimulatedFabric, rank: int) -> None:
        self._node, self.rank, self.size = node, rank, node.size

    def collect(self, words: Words) -> list[Words] | None:
        """See `Fabric.collect`."""
        node, part = self._node, words.copy()
        if self.rank:
            node.enter(self.rank, "collect", len(words), part, None)
            return None
        parts = node.enter(0, "collect", len(words), part, self.size).parts
        found = [parts[rank] for rank in range(self.size)]
        return [part for part in found if isinstance(part, np.ndarray)]

    def broadcast(self, message: bytes | None) -> bytes:
        """See `Fabric.broadcast`."""
        if (message is None) != bool(self.rank):
            self._node.fail(f"rank {self.rank} broadcasts {message!r}; rank 0 speaks, and only it")
        call = self._node.enter(self.rank, "broadcast", 0, message, 0 if self.rank else None)
        told = call.parts[0]
        assert isinstance(told, bytes)
        return told

    def gather(self, part: bytes) -> list[bytes]:
        """See `Fabric.gather`."""
        parts = self._node.enter(self.rank, "gather", 0, part, self.size).parts
        return [bytes(parts[rank]) for rank in range(self.size)]  # type: ignore[call-overload]

    def wait_for_all(self, what: str) -> None:
        """See `Fabric.wait_for_all`."""
        self._node.enter(self.rank, f"wait for {what}", 0, b"", self.size)


def _frames(frame: FrameType | None) -> str:
    """The product's functions on a stack, innermost first."""
    names: list[str] = []
    while frame is not None and len(names) < _SHOWN:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("banyan."):
            names.append(f"{module.removeprefix('banyan.')}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return " < ".join(names) or "its start"
