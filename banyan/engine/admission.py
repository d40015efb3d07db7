"""Whether a waiting request may start now, whom it should wait for, and with what lease.

Owns the decision about one request at a time and keeps nothing of its own. Knows the cache, the
waiting queue and the requests in prefill; not the model. Called from the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from banyan.cache import AllocateOutcome, PrefixCache
from banyan.engine.counters import Counters
from banyan.engine.cutpoints import CheckpointPolicy, CutPolicy
from banyan.engine.request import Phase, Receipt, Request, common_tokens
from banyan.engine.waiting import WaitingQueue
from banyan.lease import Lease
from banyan.tree import Mark
from banyan.tree.keys import TOKEN_BYTES
from banyan.tree.match import Match

LOAD_PATIENCE_S = 5.0
"""How long a request waits for another one's load-back, or for the slots of its own, before it goes
on with what is on device."""


class Verdict(Enum):
    """What became of an attempt to start a request; it holds a lease when STARTED or PENDING."""

    STARTED = "started"
    """It is in prefill and has the slots of its first chunk."""
    PENDING = "pending"
    """It is in prefill; slots for its first chunk come free when a running transfer ends."""
    WAITS = "waits"
    """Its prefix is being computed or loaded for another request: others may be tried."""
    FULL = "full"
    """Running requests hold the slots."""


class Admission:
    """Starts waiting requests.

    Args:
        queue: the waiting requests.
        prefilling: the requests in prefill by arrival, a live view.
        cuts: where chunks end.
        checkpoints: where checkpoints are wanted; None where every boundary can be resumed at.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queue: WaitingQueue,
        prefilling: Mapping[int, Request],
        cuts: CutPolicy,
        checkpoints: CheckpointPolicy | None,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._queue, self._prefilling = cache, queue, prefilling
        self._cuts, self._counters, self._clock = cuts, counters, clock
        self._checkpoints = checkpoints

    def next_cut(self, request: Request, start: int) -> int:
        """End of the chunk of `request` that starts at `start`."""
        return self._cuts.next_cut(start, len(request.tokens), request.marks)

    def mark_of(self, request: Request, cut: int) -> Mark:
        """What a checkpoint at `cut`, where a chunk of `request` ended, is for."""
        if self._checkpoints is None:
            return Mark.KEEP
        return request.marks.get(cut, Mark.PASSED)

    def ranked(self) -> list[Request]:
        """Who to try this step, best first."""
        return self._queue.ranked(lambda request: _reusable(request, self._match(request)))

    def try_start(self, request: Request) -> Verdict:
        """Give `request` a lease and the slots of its first chunk, or nothing at all (INV-12).

        While transfers run it keeps the lease and waits for the slots as a running request does:
        one of the transfers may be its own load-back, which would be cancelled with the lease.

        Mutates: the request, unless it is refused (not the queue); may start a load-back and evict.
        """
        match = self._match(request)
        if self._waits_for_load(request, match) or self._waits_for_prefill(request, match):
            return Verdict.WAITS
        lease = self._lease(request, match)
        if lease is None:
            return Verdict.WAITS
        self._plan_checkpoints(request, match, lease.boundary)
        cut = self.next_cut(request, lease.boundary)
        outcome = self._cache.allocate(lease, cut)
        if outcome is AllocateOutcome.FULL:
            self._cache.release(lease)
            return Verdict.FULL
        granted = outcome is AllocateOutcome.OK
        self._begin(request, lease, cut if granted else None)
        return Verdict.STARTED if granted else Verdict.PENDING

    def _lease(self, request: Request, match: Match) -> Lease | None:
        """A lease on the match; None to wait, for a while, for the slots of its load-back."""
        priority, publish = request.source.priority, request.publish
        if not request.device_only and self._is_patient(request):
            return self._cache.acquire_if_ready(match, priority=priority, publish=publish)
        return self._cache.acquire(
            match, priority=priority, device_only=request.device_only, publish=publish
        )

    def _begin(self, request: Request, lease: Lease, planned: int | None) -> None:
        request.lease, request.planned = lease, planned
        request.goal = len(request.tokens)
        request.phase = Phase.PREFILL
        request.load_patience = None
        if request.receipt is None:
            request.receipt = Receipt(lease.device_len, lease.host_len)

    def _match(self, request: Request) -> Match:
        """What the cache has for it; nothing (one token matches nothing) if it does not publish."""
        key = request.key() if request.publish else request.key()[:TOKEN_BYTES]
        return self._cache.match(key, request.namespace)

    def _waits_for_load(self, request: Request, match: Match) -> bool:
        """Whether another request's load-back of this prefix is worth waiting for; bounded."""
        return match.loading and not request.device_only and self._is_patient(request)

    def _is_patient(self, request: Request) -> bool:
        """Whether a request may still wait for what is on host; counted from its first try."""
        now = self._clock()
        if request.load_patience is None:
            request.load_patience = now + LOAD_PATIENCE_S
        return now < request.load_patience

    def _waits_for_prefill(self, request: Request, match: Match) -> bool:
        """Whether a request in prefill will publish at least a page more of this prefix.

        Where checkpoints matter the other one is asked to take one where the two part; when its
        next chunk already runs past that point there is nothing to wait for.
        """
        if not request.publish:
            return False
        reach = _reusable(request, match)
        for leader in self._prefilling.values():
            until = self._shared_until(request, leader, reach)
            stale = leader.lease is None or leader.lease.generation != self._cache.generation
            if stale or not until or leader.length >= until:
                continue
            if self._checkpoints is not None:
                if leader.planned is not None and leader.planned > until:
                    continue
                leader.marks[until] = Mark.KEEP
            self._counters.sharing_waits += not request.shared
            request.shared = True
            return True
        return False

    def _plan_checkpoints(self, request: Request, match: Match, boundary: int) -> None:
        """Set where the prefill of `request` takes checkpoints; followers may add theirs later."""
        request.marks = {}
        if self._checkpoints is not None and request.publish:
            request.marks = self._checkpoints.plan(
                boundary,
                len(request.tokens),
                branch=match.branch,
                known=match.full_len,
                hints=request.source.cache_hints,
                followers=self._branches_of_waiting(request, boundary),
            )

    def _branches_of_waiting(self, request: Request, boundary: int) -> set[int]:
        """Where requests that wait part from this one: they will need a checkpoint there."""
        parts = (
            self._shared_until(other, request, boundary)
            for other in self._queue.nearest()
            if other is not request
        )
        return {until for until in parts if until}

    def _shared_until(self, request: Request, leader: Request, start: int) -> int:
        """Last boundary `request` can take from `leader`, at least a page past `start`; or 0."""
        if not (request.publish and leader.publish):
            return 0
        page = self._cuts.page_size
        common = min(common_tokens(request, leader, start, page), len(request.tokens) - 1)
        until = self._cuts.floor(common)
        return until if until >= start + page else 0


def _reusable(request: Request, match: Match) -> int:
    return match.device_boundary if request.device_only else match.boundary
