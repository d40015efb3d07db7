"""One engine on several ranks: rank 0 leads, the others do what it does.

Owns the frames that rank 0 sends before each step (requests, time, what was agreed) and the loop of
the ranks that follow. Knows the core by its interface, and how ranks talk only as a `Fabric`. Each
rank's calls come from its one engine thread.

A step of all ranks: report, when transfers are open or a comparison is due; hear rank 0's frame;
apply what was agreed, then the messages; step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from banyan.engine.core import EngineCore
from banyan.engine.memory import resident_bytes
from banyan.engine.messages import AbortRequest, GenerateRequest, Output
from banyan.engine.rank_context import RankContext
from banyan.errors import InvariantError, RankError, RankLostError

COMPARE_EVERY = 64
"""Frames after which histories are compared even when no transfer is open."""

T = TypeVar("T")
Then = Literal["step", "order", "check", "stats", "stop"]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells all ranks, itself included, before each step.

    Args:
        now: the time that all go by, seconds.
        messages: requests and aborts, in order of arrival.
        speeds: tokens and seconds of the prefill chunks that rank 0 has timed.
        agreed: the outcome of the report before this frame, or empty when there was none.
        then: what to do when all that is taken in.
        order: which of the core's `orders`, with `then` `order`.
    """

    now: float
    messages: list[GenerateRequest | AbortRequest]
    speeds: list[tuple[int, float]]
    agreed: bytes
    then: Then
    order: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_findings = msgspec.msgpack.Decoder(list[str]).decode


@dataclass(slots=True)
class _Rank:
    """What leading and following have in common.

    Args:
        frames: heard so far; equal on all ranks.
    """

    core: EngineCore
    context: RankContext
    frames: int = 0

    def report(self) -> bytes:
        """Report if that is due (R1). The outcome on rank 0, if there is one; else empty."""
        agreement = self.context.agreement
        self.frames += 1
        if not agreement.outstanding and self.frames % COMPARE_EVERY:
            return b""
        least = agreement.collect()
        return b"" if least is None else least.tobytes()

    def take_in(self, frame: Frame) -> None:
        """Go by what rank 0 said: the time, what was agreed, how fast prefill is, the messages."""
        self.context.agreement.talks += 1
        self.context.clock.now = frame.now
        if frame.agreed:
            self.context.agreement.take_in(np.frombuffer(frame.agreed, np.int64))
        for tokens, seconds in frame.speeds:
            self.core.cache.note_prefill(tokens, seconds)
        for message in frame.messages:
            if isinstance(message, AbortRequest):
                self.core.abort(message.request_id)
            else:
                self.core.enqueue(message)

    def check(self) -> list[str]:
        """Findings of all ranks, each with its rank."""
        try:
            self.core.check()
            own: list[str] = []
        except InvariantError as error:
            own = error.findings
        parts = self.context.fabric.gather(_encode(own))
        self.context.agreement.settle()
        found = enumerate(map(_decode_findings, parts))
        return [f"rank {rank}: {finding}" for rank, findings in found for finding in findings]

    def stats(self) -> list[dict[str, Any]]:
        """What differs between ranks, by rank."""
        own = {
            **self.core.own_stats(),
            "operations": self.context.journal.count,
            "digest": f"{self.context.journal.digest & (2**64 - 1):016x}",
            "rss_bytes": resident_bytes(),
        }
        parts = self.context.fabric.gather(_encode(own))
        return [msgspec.msgpack.decode(part) for part in parts]


class RankedCore:
    """The engine as a front end sees it, on rank 0: has the interface of `EngineCore`.

    Args:
        core: rank 0's own.
        context: it was built with.
        on_close: called at the end, after the other ranks were told to stop.
        why_lost: says who is gone, once that is known; asked when talking has failed.
        pids: process ids by rank, where they are known.
    """

    def __init__(
        self,
        core: EngineCore,
        context: RankContext,
        on_close: Callable[[], None] = lambda: None,
        why_lost: Callable[[], str | None] = lambda: None,
        pids: Sequence[int] = (),
    ) -> None:
        self._core, self._context = core, context
        self._rank = _Rank(core, context)
        self._arriving: list[GenerateRequest | AbortRequest] = []
        self._names: set[str] = set()
        self._on_close, self._why_lost = on_close, why_lost
        self.info = {**core.info, "tp": context.ranks, "rank_pids": list(pids)}

    @property
    def cache(self) -> Any:
        """Rank 0's cache; the others' are equal."""
        return self._core.cache

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do or to say."""
        return self._core.has_work or bool(self._arriving)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request on all ranks, with the next step. Raises as `EngineCore.submit`."""
        self._core.vet(request, self._names)
        self._arriving.append(request)
        self._names.add(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request on all ranks, with the next step."""
        self._arriving.append(AbortRequest(request_id=request_id))

    def step(self) -> list[Output]:
        """One step of all ranks.

        Raises:
            RankError: they have drifted apart, or one is gone; none can go on.
        """
        self._send("step")
        return self._guarded(self._core.step)

    def flush(self) -> dict[str, Any]:
        """As `EngineCore.flush`, on all ranks; rank 0's slots are told."""
        freed: dict[str, Any] = self.order("flush")
        return freed

    def order(self, name: str) -> Any:
        """Carry out one of the core's `orders` on all ranks; what rank 0's gave."""
        self._send("order", name)
        return self._core.orders[name]()

    def check(self) -> dict[str, Any]:
        """Verify every rank, and that their histories are equal. Raises as `EngineCore.check`."""
        self._send("check")
        findings = self._guarded(self._rank.check)
        if findings:
            raise InvariantError(findings)
        return {"ok": True, "ranks": self._context.ranks, "leases": len(self.cache.leases)}

    def stats(self) -> dict[str, Any]:
        """Rank 0's figures, and as `ranks` what each has of its own."""
        self._send("stats")
        return {**self._core.stats(), "ranks": self._guarded(self._rank.stats)}

    def close(self) -> None:
        """Stop all ranks; those that are gone already are not waited for."""
        with contextlib.suppress(RankError):  # there may be nobody left to tell
            self._send("stop")
        self._core.close()
        self._on_close()

    def _send(self, then: Then, order: str = "") -> None:
        """Have all ranks take in a frame, this one included."""

        def talk() -> None:
            agreed = self._rank.report()
            now = self._context.watch()
            speeds, arriving = list(self._context.speeds), self._arriving
            frame = Frame(now, arriving, speeds, agreed, then, order)
            self._context.fabric.broadcast(_encode(frame))
            self._context.speeds.clear()
            self._arriving, self._names = [], set()
            self._rank.take_in(frame)

        self._guarded(talk)

    def _guarded(self, call: Callable[[], T]) -> T:
        """The result of a call that talks to other ranks; if one is gone, the error says which."""
        try:
            return call()
        except RankLostError as error:
            lost = self._why_lost()
            if lost is None:
                raise
            raise RankLostError(lost) from error


def follow(core: EngineCore, context: RankContext) -> None:
    """Do what rank 0 does until it says stop; the loop of every other rank.

    Raises:
        RankError: the ranks have drifted apart, or rank 0 is gone.
    """
    rank = _Rank(core, context)
    while True:
        rank.report()
        frame = _decode_frame(context.fabric.broadcast(None))
        rank.take_in(frame)
        context.speeds.clear()
        if frame.then == "step":
            core.step()
        elif frame.then == "order":
            core.orders[frame.order]()
        elif frame.then == "check":
            rank.check()
        elif frame.then == "stats":
            rank.stats()
        else:
            core.close()
            return
