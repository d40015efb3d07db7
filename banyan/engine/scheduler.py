"""Continuous batching: one step polls, finds slots, admits, prefills a chunk's worth, decodes once.

Owns the order of work in a step and what gives way when slots run out. Knows the cache and the
model by their interfaces; clock and randomness come from outside, so the same submissions give the
same steps. Called from one thread.

  S1  whatever ends a request goes through `Roster.retire`, whatever interrupts it through
      `Roster.put_back`;
  S2  a token is chosen, and so sent, only after the forward that gave it was accounted for;
  S3  what runs finds its slots before anything is admitted, so a step that changes nothing else
      brings the oldest running request forward (INV-20);
  S4  a step's own cost depends on what runs and what changed, not on the queue or on lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from banyan.cache import AllocateOutcome, PrefixCache
from banyan.engine.admission import Admission, Verdict
from banyan.engine.counters import Counters
from banyan.engine.cutpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy, CutPolicy
from banyan.engine.messages import Output
from banyan.engine.plans import SeqInput
from banyan.engine.ports import Choice, Model
from banyan.engine.request import Phase, Request
from banyan.engine.roster import Roster
from banyan.engine.waiting import Order, WaitingQueue
from banyan.errors import CopyError, RankError

T = TypeVar("T")

log = logging.getLogger("banyan.engine")

_SPEED_SAMPLE = 64
"""Smallest chunk (tokens) that says something about the speed of prefill: overhead hides below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How requests are scheduled.

    Args:
        chunk: most prompt tokens computed in one step, in whole pages.
        state_interval: None, or tokens between checkpoints of a long prompt.
        checkpoints: most checkpoints that one prompt's prefill takes.
        max_running: most requests that hold a lease.
        order: who starts first among the waiting.
        lookahead: waiting requests considered in one step.
        patience: how often others may be preferred to one of them.
        cache: False computes everything and publishes nothing.
        eos_ids: tokens that end an answer.
    """

    chunk: int
    state_interval: int | None = None
    checkpoints: int = DEFAULT_CHECKPOINTS
    max_running: int = 16
    order: Order = "fcfs"
    lookahead: int = 16
    patience: int = 8
    cache: bool = True
    eos_ids: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast prefill is, as it is measured.

    Args:
        watch: seconds, monotonic.
        note: told the tokens and seconds of each chunk measured.
    """

    watch: Callable[[], float]
    note: Callable[[int, float], None]


class Scheduler:
    """Runs requests on one cache and one model.

    Args:
        clock: seconds, monotonic; for time limits and for measuring the speed of prefill.
        settle: returns when the device has computed what it was given; for that measuring.
        pace: how prefill is timed and whom that is told to; the clock and the cache without it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: Model,
        options: SchedulerOptions,
        clock: Callable[[], float],
        settle: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        self.options = options
        self.counters = Counters()
        waiting = WaitingQueue(
            options.order, lookahead=options.lookahead, patience=options.patience
        )
        self.roster = Roster(cache, model, waiting, self.counters, clock, publish=options.cache)
        self._cache, self._model, self._settle = cache, model, settle
        self._pace = pace or Pace(clock, cache.note_prefill)
        self._cuts = CutPolicy(cache.page_size, options.chunk)
        checkpoints = CheckpointPolicy.for_spec(
            cache.spec, options.state_interval, options.checkpoints
        )
        self._admission = Admission(
            cache, waiting, self.roster.prefilling, self._cuts, checkpoints, self.counters, clock
        )
        self._dry_since: int | None = None

    def step(self) -> list[Output]:
        """One step; the news of all requests since the last one.

        A failure of one request ends that request. Cost beside the model: O(running).
        """
        self.counters.steps += 1
        self._cache.poll()
        self.roster.expire()
        if self._secure_running():
            self._admit()
        self._prefill()
        self._decode()
        return self.roster.take_outputs()

    # ---- slots -----------------------------------------------------------------------------------

    def _secure_running(self) -> bool:
        """Slots for this step's decodes, then for the next chunk of each prompt.

        Returns:
            Whether all got theirs; otherwise there is nothing to admit anybody with.
        """
        enough = self._secure_decodes(list(self.roster.decoding.values()))
        for request in list(self.roster.prefilling.values()):
            if request.phase is Phase.PREFILL and request.planned is None:
                stop = self._admission.next_cut(request, request.length)
                if self._secure(request, stop):
                    request.planned = stop
                else:
                    enough = False
        return enough

    def _secure_decodes(self, requests: list[Request]) -> bool:
        """Slots for one token more of each, together where they are to be had; True: all have."""
        if self._cache.allocate_next([r.lease for r in requests if r.lease is not None]):
            for request in requests:
                request.stepping = True
            return True
        enough = True
        for request in requests:
            if request.phase is Phase.DECODE:  # else it was retracted for one before it
                request.stepping = self._secure(request, request.length + 1)
                enough = enough and request.stepping
        return enough

    def _secure(self, request: Request, stop: int) -> bool:
        """Slots for `request` up to `stop`, retracting others for them; False: not this step.

        The newest request of the lowest priority gives way, which may be this one.
        """
        assert request.lease is not None
        while True:
            try:
                outcome = self._cache.allocate(request.lease, stop)
            except CopyError:
                self._start_over(request)
                return False
            if outcome is AllocateOutcome.OK:
                return True
            if outcome is AllocateOutcome.PENDING:
                self.counters.stalled += 1
                return False
            if self.roster.running == 1:
                self._retire_out_of_slots(request)
                return False
            victim = min(self.roster.holders(), key=lambda r: (r.source.priority, -r.arrival))
            self._retract(victim)
            if victim is request:
                return False

    # ---- admission -------------------------------------------------------------------------------

    def _room(self) -> bool:
        """Whether another request may start: at most one step's chunk is admitted ahead, so that
        its load-back runs behind this step's forward while later requests can still wait."""
        if self.roster.running >= self.options.max_running:
            return False
        chunk, prefilling = self._cuts.chunk, self.roster.prefilling.values()
        return sum(min(chunk, r.goal - r.length) for r in prefilling) < 2 * chunk

    def _admit(self) -> None:
        roster = self.roster
        dry = roster.running and self._dry_since == roster.departures
        if dry or not len(roster.waiting) or not self._room():
            return
        ranked = self._admission.ranked()
        for position, request in enumerate(ranked):
            verdict = self._admission.try_start(request)
            if verdict in (Verdict.STARTED, Verdict.PENDING):
                roster.start(request, ranked[position + 1 :])
                if verdict is Verdict.PENDING or not self._room():
                    return
            elif verdict is Verdict.FULL and roster.running:
                self._dry_since = roster.departures
                return
            elif verdict is Verdict.FULL:
                self._retire_out_of_slots(request)

    # ---- prefill ---------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Run whole chunks up to the step's budget: a chunk is never cut short because others
        run beside it, so a request's cut points do not depend on them."""
        spent = 0
        for request in list(self.roster.prefilling.values()):
            stop = request.planned
            if stop is None or (spent and spent + stop - request.length > self._cuts.chunk):
                continue
            spent += stop - request.length
            try:
                self._run_chunk(request, stop)
            except CopyError:
                self._start_over(request)

    def _run_chunk(self, request: Request, stop: int) -> None:
        """One chunk of one request: forward, account, publish; the first token after the last.

        Raises:
            CopyError: the load-back it reads from failed; no token was chosen.
        """
        lease = request.lease
        assert lease is not None
        if lease.broken:  # since its slots were planned: they may be another's by now
            raise CopyError("the load-back under this chunk has failed")
        start, gated = lease.length, lease.ticket is not None
        present = lease.present
        tokens = request.tokens
        seq = SeqInput(tokens[start:stop], start, lease.tables, lease.ticket, present, tokens)
        began = self._pace.watch()
        logits = self._guarded([request], lambda: self._model.forward([seq]))
        if logits is None:
            return
        if not gated and present <= start and stop - start >= min(_SPEED_SAMPLE, self._cuts.chunk):
            self._settle()
            self._pace.note(stop - start, self._pace.watch() - began)
        self._cache.advance(lease, stop)
        request.planned = None
        self.counters.prefill_tokens += stop - start
        request.computed += stop - start
        request.rebuilt += max(0, min(stop, present) - start)
        self._cache.commit(lease, request.key(), self._admission.mark_of(request, stop))
        if stop == request.goal:
            self.roster.start_decoding(request)
            self._sample([request], logits)

    # ---- decode ----------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for all that have slots: one batched forward, and one each for those alone."""
        ready = [r for r in self.roster.decoding.values() if r.stepping]
        batch = [r for r in ready if not r.alone]
        for group in [batch, *([r] for r in ready if r.alone)]:
            if group:
                self._decode_group(group)

    def _decode_group(self, group: list[Request]) -> None:
        seqs = [
            SeqInput(r.tokens[-1:], r.lease.length, r.lease.tables, history=r.tokens)
            for r in group
            if r.lease is not None
        ]
        logits = self._guarded(group, lambda: self._model.forward(seqs))
        if logits is None:
            return
        for request in group:
            assert request.lease is not None
            self._cache.advance(request.lease, request.lease.length + 1)
        self._sample(group, logits)

    def _sample(self, group: Sequence[Request], logits: Any) -> None:
        samplers = [r.sampler for r in group]
        choices = self._guarded(group, lambda: self._model.sample(logits, samplers))
        for request, choice in zip(group, choices or (), strict=False):
            self._accept(request, choice)

    def _accept(self, request: Request, choice: Choice) -> None:
        """Take a token in: text, news, and whether it was the last."""
        token = choice.token
        request.tokens.append(token)
        self.counters.generated_tokens += 1
        ends = token in self.options.eos_ids and not request.source.sampling.ignore_eos
        text = "" if ends else request.text.push(token)
        logprobs = [] if choice.logprob is None else [choice.logprob]
        if ends or request.text.stopped:
            self.roster.retire(request, "stop", [token], text, logprobs)
        elif len(request.tokens) >= request.limit:
            self.roster.retire(request, "length", [token], text, logprobs)
        else:
            self.roster.report(request, token, text, logprobs)

    # ---- when something is short or fails --------------------------------------------------------

    def _retract(self, request: Request) -> None:
        """Give a running request's slots to others; it goes on later from what is cached."""
        self.counters.retractions += 1
        self.roster.publish_computed(request)
        self.roster.put_back(request)
        self._dry_since = self.roster.departures

    def _start_over(self, request: Request) -> None:
        """A load-back under `request` failed: compute what it would have brought."""
        self.counters.load_failures += 1
        request.device_only = True
        if not request.counted:
            request.receipt = None
        self.roster.put_back(request)

    def _guarded(self, group: Sequence[Request], call: Callable[[], T]) -> T | None:
        """Run a call into the model; None when it failed, and then `group` is dealt with.

        One request that fails ends with `error`. Of several it is not known which one is to blame,
        nor what became of their states: all start again, each by itself from now on.

        Raises:
            CopyError: of a single request.
        """
        try:
            return call()
        except RankError:
            raise  # the engine's end, not a request's
        except Exception as error:  # the boundary to the model; counted
            if isinstance(error, CopyError) and len(group) == 1:
                raise
            self.counters.forward_failures += 1
            names = ", ".join(r.request_id for r in group)
            log.exception("the model failed for %s", names)
            if len(group) == 1:
                message = f"the model failed: {type(error).__name__}: {error}"
                self.roster.retire(group[0], "error", error=message, code="model_failed")
            else:
                for request in reversed(group):
                    request.alone = True
                    self.roster.put_back(request)
            return None

    def _retire_out_of_slots(self, request: Request) -> None:
        message = (
            f"no slots for token {request.length + 1} of {request.request_id!r}, "
            "although nothing else runs; raise --device-bytes or shorten the request"
        )
        self.roster.retire(request, "error", error=message, code="out_of_slots")
