"""One engine on several ranks: rank 0 leads, the others do what it does.

Owns the frames that rank 0 sends before each step (requests, time, what was agreed) and the loop of
the ranks that follow. Knows the core by its interface, and how ranks talk only as a `Fabric`. Each
rank's calls come from its one engine thread.

A step of all ranks: report, when transfers are open or a comparison is due; hear rank 0's frame;
apply what was agreed, then the messages; step.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from banyan.engine.core import EngineCore
from banyan.engine.memory import resident_bytes
from banyan.engine.messages import AbortRequest, GenerateRequest, Output, Sampling
from banyan.engine.plans import SeqInput
from banyan.engine.ports import Choice, Model, TextStream
from banyan.engine.scheduler import Pace
from banyan.errors import CopyError, InvariantError, RankError, RankLostError
from banyan.pools.plan import SizePlan
from banyan.pools.shared import SharedHost
from banyan.ranks import AgreedCopies, Agreement, Fabric, StepClock
from banyan.tiers.journal import Journal
from banyan.tiers.ops import CopyEngine

COMPARE_EVERY = 64
"""Frames after which histories are compared even when no transfer is open."""

_MODEL_FAILED, _COPY_FAILED, _FINE = 0, 1, 2

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


class RankContext:
    """What one rank needs to be built and to run: its fabric, its history, the common clock.

    Args:
        fabric: how it talks.
        watch: seconds, monotonic, of this process: times prefill, and on rank 0 all time limits.

    Attributes:
        clock: for everything whose decisions depend on time.
        speeds: prefill chunks timed since the last frame; used on rank 0 only.
        node: the ranks of this machine, ascending, once `find_node` was called.
    """

    def __init__(self, fabric: Fabric, watch: Callable[[], float] = time.monotonic) -> None:
        self.fabric, self.watch = fabric, watch
        self.journal = Journal()
        self.agreement = Agreement(fabric, self.journal)
        self.clock = StepClock()
        self.speeds: list[tuple[int, float]] = []
        self.node: list[int] = []
        self.pace = Pace(watch, lambda tokens, seconds: self.speeds.append((tokens, seconds)))

    @property
    def rank(self) -> int:
        """This one's number."""
        return self.fabric.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.fabric.size

    def find_node(self) -> list[int]:
        """The ranks that can share memory with this one, itself included. Called by all ranks."""
        if not self.node:
            parts = self.fabric.gather(_machine())
            self.node = [r for r, part in enumerate(parts) if part == parts[self.rank]]
        return self.node

    def sharing(self, pin: bool = False) -> SharedHost:
        """Host memory of what is equal on all ranks, one copy for each machine; its lowest rank
        writes. Called by all ranks."""
        writer = self.find_node()[0]

        def exchange(part: bytes | None) -> bytes:
            return self.fabric.gather(part or b"")[writer]

        return SharedHost(exchange, writes=self.rank == writer, pin=pin)

    def agree_plan(self, plan: SizePlan) -> SizePlan:
        """`plan` with the slots of the rank that has the fewest, pool by pool. Called by all."""
        sizes = [*plan.device, *plan.host]
        slots = self.agreement.least([size.slots for size in sizes])
        agreed = [replace(size, slots=n) for size, n in zip(sizes, slots, strict=True)]
        count = len(plan.device)
        return replace(plan, device=tuple(agreed[:count]), host=tuple(agreed[count:]))

    def copies(self, engine: CopyEngine, record_bytes: Sequence[int]) -> AgreedCopies:
        """This rank's copy engine, made one whose completions are those of all ranks.

        Args:
            record_bytes: as agreed.
        """
        self.agreement.copies = AgreedCopies(engine, record_bytes)
        return self.agreement.copies

    def model(self, model: Model, exact: bool = False) -> RankedModel:
        """This rank's model, made one that fails on all ranks or on none.

        Args:
            exact: see `RankedModel`.
        """
        return RankedModel(model, self.agreement, exact)


class _Told(NamedTuple):
    """A token that rank 0 has chosen."""

    token: int
    logprob: None = None


class RankedModel:
    """A model whose forward fails on all ranks or on none, and whose tokens rank 0 chooses.

    Args:
        exact: tokens follow from the prompt alone and nothing fails but a copy: ranks then talk
            only after a forward that read from a load-back. For the oracle.
    """

    def __init__(self, model: Model, agreement: Agreement, exact: bool) -> None:
        self._model, self._agreement, self._exact = model, agreement, exact

    def forward(self, seqs: Sequence[SeqInput]) -> Any:
        """See `Model.forward`.

        Raises:
            CopyError: a load-back under it failed on some rank.
            RuntimeError: it failed on another rank only.
            RankError: a rank is gone.
        """
        tickets = [seq.ticket for seq in seqs if seq.ticket is not None]
        if self._exact and not tickets:
            return self._model.forward(seqs)
        logits, error = None, None
        try:
            logits = self._model.forward(seqs)
        except RankError:
            raise
        except Exception as caught:  # the boundary to the model: all ranks must hear of it first
            error = caught
        copied = not any(getattr(ticket, "failed", False) for ticket in tickets)
        own = _FINE if error is None and copied else _COPY_FAILED
        if error is not None and copied and not isinstance(error, CopyError):
            own = _MODEL_FAILED  # over bytes that did not come, an error says nothing of the model
        fact = self._agreement.settle(own)
        if fact == _FINE:
            return logits
        if fact == _COPY_FAILED:
            raise CopyError("a load-back under this forward failed, on this rank or on another")
        raise error or RuntimeError("the model failed on another rank")

    def sample(self, logits: Any, samplers: Sequence[Any]) -> Sequence[Choice]:
        """See `Model.sample`; rank 0 draws, the others are told."""
        if self._exact:
            return self._model.sample(logits, samplers)
        self._agreement.talks += 1
        fabric = self._agreement.fabric
        if not self._agreement.is_leader:
            tokens = np.frombuffer(fabric.broadcast(None), np.int64)
            if len(tokens) != len(samplers):
                raise RuntimeError("sampling failed on rank 0")
            return [_Told(int(token)) for token in tokens]
        choices: Sequence[Choice] = ()
        try:
            choices = self._model.sample(logits, samplers)
            return choices
        finally:  # also when it raises: the others wait
            fabric.broadcast(np.array([c.token for c in choices], np.int64).tobytes())

    def new_sampler(self, sampling: Sampling) -> Any:
        """See `Model.new_sampler`."""
        return self._model.new_sampler(sampling)

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> TextStream:
        """See `Model.new_text`."""
        return self._model.new_text(sampling, prompt)


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


def _machine() -> bytes:
    """Equal for processes that see each other: the same boot of one machine, the same namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    space = Path("/proc/self/ns/pid")
    return f"{name} {space.stat().st_ino if space.exists() else 0}".encode()
