"""Every request from `submit` to its last output: where it stands, and the ways in and out.

Owns the sets of waiting, prefilling and decoding requests, their time limits and the news to send.
Decides nothing about order or slots; whatever interrupts or ends a request comes here, so that
what it holds is given back in one place. Called from the scheduler's thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from banyan.cache import PrefixCache
from banyan.engine.counters import SOURCES, Counters
from banyan.engine.messages import GenerateRequest, Output, TokenLogprob
from banyan.engine.ports import Model
from banyan.engine.request import Phase, Request
from banyan.engine.waiting import WaitingQueue
from banyan.tree import Mark
from banyan.tree.keys import encode_namespace


class Roster:
    """The requests of one engine.

    A request is in exactly one of `waiting`, `prefilling` and `decoding`, and has a lease exactly
    when it is in one of the last two.

    Args:
        publish: False keeps all requests from using and feeding the cache.
        clock: seconds, monotonic; for time limits.

    Attributes:
        departures: how often slots may have come free by a request's doing.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: Model,
        waiting: WaitingQueue,
        counters: Counters,
        clock: Callable[[], float],
        *,
        publish: bool,
    ) -> None:
        self.waiting = waiting
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.departures = 0
        self._cache, self._model, self._counters = cache, model, counters
        self._clock, self._publish = clock, publish
        self._by_id: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._arrivals = 0
        self._outputs: list[Output] = []

    # ---- questions -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request has not ended, or there is news."""
        return bool(self._by_id or self._outputs)

    @property
    def running(self) -> int:
        """Requests that hold a lease."""
        return len(self.prefilling) + len(self.decoding)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of that name has not ended."""
        return request_id in self._by_id

    def holders(self) -> Iterator[Request]:
        """The requests that hold a lease."""
        yield from self.prefilling.values()
        yield from self.decoding.values()

    # ---- in --------------------------------------------------------------------------------------

    def submit(self, source: GenerateRequest) -> None:
        """Queue a request that was found to be servable. Cost: O(prompt)."""
        deadline = None if source.timeout_s is None else self._clock() + source.timeout_s
        request = Request(
            source=source,
            arrival=self._arrivals,
            namespace=encode_namespace(source.namespace),
            tokens=list(source.prompt),
            sampler=self._model.new_sampler(source.sampling),
            text=self._model.new_text(source.sampling, source.prompt),
            limit=len(source.prompt) + source.sampling.max_tokens,
            deadline=deadline,
            publish=source.use_cache and self._publish,
        )
        self._arrivals += 1
        self._by_id[source.request_id] = request
        self.waiting.add(request)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.arrival, request))

    def start(self, request: Request, untried: Sequence[Request]) -> None:
        """Move a request that was given a lease from `waiting` to `prefilling`."""
        self.waiting.start(request, untried)
        self.prefilling[request.arrival] = request

    def start_decoding(self, request: Request) -> None:
        """Move on a request whose prompt is computed; once, count where that came from."""
        del self.prefilling[request.arrival]
        self.decoding[request.arrival] = request
        request.phase = Phase.DECODE
        self.departures += 1
        if not request.counted:
            request.counted = True
            request.settle_receipt()
            usage = request.usage()
            for source in SOURCES:
                self._counters.prompt_tokens[source] += getattr(usage, source)

    # ---- news ------------------------------------------------------------------------------------

    def report(self, request: Request, token: int, text: str, logprobs: list[TokenLogprob]) -> None:
        """Send a token of a request that goes on."""
        self._outputs.append(
            Output(request_id=request.request_id, tokens=[token], text=text, logprobs=logprobs)
        )

    def take_outputs(self) -> list[Output]:
        """The news since the last call, oldest first."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- out -------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """End a request with `abort`; an unknown id is one that has ended already."""
        request = self._by_id.get(request_id)
        if request is not None:
            self.retire(request, "abort")

    def abort_all(self) -> None:
        """End every request with `abort`."""
        for request_id in list(self._by_id):
            self.abort(request_id)

    def expire(self) -> None:
        """End requests whose time is up. Cost: O(ended log n)."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            request = heapq.heappop(self._deadlines)[2]
            if request.phase is not Phase.DONE:
                self.retire(request, "timeout")

    def put_back(self, request: Request) -> None:
        """Interrupt a running request: it keeps its tokens, text and sampling state."""
        self._let_go(request)
        request.phase = Phase.WAITING
        self.waiting.put_back(request)

    def retire(
        self,
        request: Request,
        reason: str,
        tokens: Sequence[int] = (),
        text: str = "",
        logprobs: Sequence[TokenLogprob] = (),
        *,
        error: str | None = None,
        code: str | None = None,
    ) -> None:
        """The one way out, for every reason: give everything back, send the last news (INV-12).

        Mutates: publishes what was computed first, unless the request failed.
        """
        if reason != "error":
            self.publish_computed(request)
            text += "" if request.text.stopped else request.text.finish()
        self._let_go(request)
        self.waiting.discard(request)
        request.phase = Phase.DONE
        del self._by_id[request.request_id]
        self._counters.finished[reason] += 1
        self._outputs.append(
            Output(
                request_id=request.request_id,
                tokens=list(tokens),
                text=text,
                logprobs=list(logprobs),
                finish_reason=reason,
                usage=request.usage(),
                error=error,
                error_code=code,
            )
        )

    def publish_computed(self, request: Request) -> None:
        """Publish what a request computed beyond the boundary it was granted, if anything."""
        lease = request.lease
        if lease is not None and lease.length > lease.boundary and not lease.broken:
            self._cache.commit(lease, request.key(), Mark.TURN)

    def _let_go(self, request: Request) -> None:
        """Release the lease, if there is one."""
        self.prefilling.pop(request.arrival, None)
        self.decoding.pop(request.arrival, None)
        request.stepping = False
        if request.lease is not None:
            self._cache.release(request.lease)
            request.lease = None
            self.departures += 1
