"""`EngineCore`: the engine as a front end sees it. Submit and abort requests, step, read the news.

Owns what makes a request acceptable, and the engine's figures; the scheduler does the work. Knows
no model and no wire. One thread owns it and makes every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from banyan.cache import PrefixCache
from banyan.engine.messages import GenerateRequest, Output, Sampling
from banyan.engine.scheduler import Scheduler
from banyan.errors import InvariantError, RequestError

_MAX_LOGPROBS = 20
_SEED_LIMIT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a request.

    Args:
        vocab_size: token ids are below it.
        model_tokens: prompt and answer together that the model was made for.
        pool_tokens: prompt and answer together that the device pools can hold.
        open_requests: running and waiting requests together.
    """

    vocab_size: int
    model_tokens: int
    pool_tokens: int
    open_requests: int

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that can be served."""
        return min(self.model_tokens, self.pool_tokens)


class EngineCore:
    """One model, one cache, one scheduler.

    Args:
        info: facts fixed at start, plain data; `max_model_len` and `vocab_size` are added to them.

    Attributes:
        orders: by name, what an operator may order between two steps; all ranks do it alike.
    """

    def __init__(
        self, scheduler: Scheduler, cache: PrefixCache, limits: Limits, info: dict[str, Any]
    ) -> None:
        self.limits = limits
        self.info: dict[str, Any] = {
            **info,
            "max_model_len": limits.max_model_len,
            "vocab_size": limits.vocab_size,
        }
        self._scheduler, self._cache = scheduler, cache
        self._roster = scheduler.roster
        self.orders: dict[str, Callable[[], Any]] = {"flush": self.flush}

    @property
    def cache(self) -> PrefixCache:
        """The cache it runs on, for tools that look or force an eviction between steps."""
        return self._cache

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do or to say."""
        return self._roster.busy

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served as asked, or the queue is full (`queue_full`); the
                engine is as before, but for a counter.

        Cost: O(prompt).
        """
        self.vet(request)
        self.enqueue(request)

    def vet(self, request: GenerateRequest, arriving: Collection[str] = ()) -> None:
        """Refuse a request that cannot be taken; nothing else. Raises as `submit`.

        Args:
            arriving: names of requests that were vetted and will be queued before it.
        """
        try:
            if request.request_id in self._roster or request.request_id in arriving:
                raise RequestError(
                    f"a request named {request.request_id!r} is open",
                    param="request_id",
                    code="duplicate_id",
                )
            check_request(request, self.limits)
            taken = len(self._roster) + len(arriving)
            if taken >= self.limits.open_requests:
                raise RequestError(
                    f"{taken} requests are running or waiting, and no more are taken",
                    code="queue_full",
                )
        except RequestError as error:
            refused = self._scheduler.counters.refused
            refused[error.code] = refused.get(error.code, 0) + 1
            raise

    def enqueue(self, request: GenerateRequest) -> None:
        """Queue a request that `vet` has let pass. Cost: O(prompt)."""
        self._roster.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request; its last output comes with the next step. Unknown ids are ignored."""
        self._roster.abort(request_id)

    def step(self) -> list[Output]:
        """One scheduler step; a failure of one request ends that request, not the engine."""
        return self._scheduler.step()

    def stats(self) -> dict[str, Any]:
        """`engine`: counters and gauges of requests; `cache`: those of the cache. Plain data."""
        roster = self._roster
        gauges = {
            "running": roster.running,
            "waiting": len(roster.waiting),
            "prefilling": len(roster.prefilling),
            "decoding": len(roster.decoding),
        }
        return {
            "engine": {**self._scheduler.counters.as_dict(), **gauges},
            "cache": self._cache.stats(),
        }

    def own_stats(self) -> dict[str, Any]:
        """Figures that differ between ranks; plain data."""
        totals = self._cache.controller.totals.values()
        pools = [pool for tier in self._cache.stats()["tiers"].values() for pool in tier.values()]
        return {
            "verified": sum(t.verified for t in totals),
            "mismatched": sum(t.mismatched for t in totals),
            "moved_bytes": sum(t.moved_bytes for t in totals),
            "slots": sum(pool["capacity"] for pool in pools),
            "free_slots": sum(pool["free"] for pool in pools),
        }

    def order(self, name: str) -> Any:
        """Carry out one of `orders`."""
        return self.orders[name]()

    def flush(self) -> dict[str, Any]:
        """Drop what is cached and no request holds; slots that came free, by tier and component."""
        before = self._free_slots()
        self._cache.flush()
        after = self._free_slots()
        return {
            "freed_slots": {
                tier: {name: free - before[tier][name] for name, free in pools.items()}
                for tier, pools in after.items()
            }
        }

    def check(self) -> dict[str, Any]:
        """Verify every invariant of cache and scheduler.

        Raises:
            InvariantError: naming everything found.

        Cost: O(nodes + slots).
        """
        findings: list[str] = []
        try:
            self._cache.check()
        except InvariantError as error:
            findings += error.findings
        held = {id(request.lease) for request in self._roster.holders()}
        leased = {id(lease) for lease in self._cache.leases}
        if held != leased:
            findings.append(
                f"INV-12 {len(leased - held)} lease(s) without a request, "
                f"{len(held - leased)} running request(s) without a lease"
            )
        if findings:
            raise InvariantError(findings)
        return {"ok": True, "leases": len(leased)}

    def close(self) -> None:
        """End all requests and stop the copy engine; the core cannot be used afterwards."""
        self._roster.abort_all()
        self._cache.close()

    def _free_slots(self) -> dict[str, dict[str, int]]:
        tiers = self._cache.stats()["tiers"]
        return {
            tier: {name: pool["free"] for name, pool in pools.items()}
            for tier, pools in tiers.items()
        }


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """Refuse what can never be served.

    Raises:
        RequestError: with the field, a code, and what would do.

    Cost: O(prompt).
    """
    prompt = request.prompt
    if not prompt:
        raise RequestError("the prompt has no tokens", param="prompt", code="empty_prompt")
    worst = min(prompt) if min(prompt) < 0 else max(prompt)
    if not 0 <= worst < limits.vocab_size:
        raise RequestError(
            f"token id {worst} is not in the vocabulary of {limits.vocab_size}",
            param="prompt",
            code="invalid_token",
        )
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise RequestError(f"timeout_s is {request.timeout_s}, must be above 0", param="timeout_s")
    outside = [at for at in request.cache_hints if not 0 <= at <= len(prompt)]
    if outside:
        raise RequestError(
            f"cache_hints has position {outside[0]}, the prompt has {len(prompt)} tokens; give "
            "positions inside it",
            param="cache_hints",
        )
    _check_sampling(request.sampling)
    _check_length(len(prompt), request.sampling.max_tokens, limits)


def _check_sampling(sampling: Sampling) -> None:
    rules: list[tuple[str, float | None, bool, str]] = [
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            sampling.temperature,
            0 <= sampling.temperature < math.inf,
            "0 or a positive number",
        ),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        (
            "seed",
            sampling.seed,
            sampling.seed is None or -_SEED_LIMIT <= sampling.seed < _SEED_LIMIT,
            "a 64-bit integer",
        ),
        (
            "logprobs",
            sampling.logprobs,
            sampling.logprobs is None or 0 <= sampling.logprobs <= _MAX_LOGPROBS,
            f"0 to {_MAX_LOGPROBS}",
        ),
    ]
    for param, value, fine, wanted in rules:
        if not fine:
            raise RequestError(f"{param} is {value}, must be {wanted}", param=param)


def _check_length(prompt: int, max_tokens: int, limits: Limits) -> None:
    total = prompt + max_tokens
    for limit, what in (
        (limits.model_tokens, "the model was made for"),
        (limits.pool_tokens, "the device pools hold"),
    ):
        if total > limit:
            room = limit - prompt
            fix = (
                f"ask for at most {room} with this prompt"
                if room >= 1
                else f"shorten the prompt to at most {limit - max_tokens}"
                if limit > max_tokens
                else f"shorten both to at most {limit} together"
            )
            raise RequestError(
                f"{prompt} prompt tokens and max_tokens {max_tokens} make {total}, {what} {limit}; "
                f"{fix}",
                param="max_tokens" if room >= 1 else "prompt",
                code="context_length_exceeded",
            )
