"""One request inside the scheduler: its tokens, its key, what it holds and where it stands.

Owns the mutable record and what can be derived from it alone. Knows no queue and calls no cache.
Touched by the scheduler's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from banyan.engine.messages import GenerateRequest, Usage
from banyan.tree import Mark
from banyan.tree.keys import TOKEN_BYTES, common_bytes, encode_tokens

if TYPE_CHECKING:
    from banyan.engine.ports import TextStream
    from banyan.lease import Lease


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Prompt tokens by the tier that served them: as granted, then as things turned out.

    Args:
        rebuilt: tokens computed for windows and states alone.
    """

    device: int
    host: int
    rebuilt: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request from `submit` to its last output.

    Args:
        arrival: order of arrival, unique.
        namespace: encoded; a part of the cache key.
        tokens: the prompt and what was generated since.
        sampler, text: sampling and detokenising state; they live as long as the request.
        limit: length of `tokens` at which it ends.
        deadline: seconds of the scheduler's clock, or None.
        publish: whether it uses and feeds the cache.

    Attributes:
        lease: what it holds while it runs.
        goal: prefill runs to here: the length of `tokens` at admission.
        planned: end of the chunk whose slots are allocated, or None.
        marks: where its prefill takes checkpoints, and what for, from its admission on.
        device_only: a load-back failed under it: never again from host.
        alone: a batch with it failed: it is computed by itself from now on.
        passed: how often another request was preferred to it while it could have run.
        receipt: None until the first admission.
        computed: prompt tokens run through the model for its first token, over all admissions.
        rebuilt: of those, the tokens whose `Full` data was there.
        counted: whether its prompt has entered the counters.
        shared: whether it has waited for another request's prefill.
        stepping: whether it has slots for the decode of this step.
        load_patience: clock time after which it no longer waits for a load-back of its prefix that
            another request started, or None while there is none.
    """

    source: GenerateRequest
    arrival: int
    namespace: bytes
    tokens: list[int]
    sampler: Any
    text: TextStream
    limit: int
    deadline: float | None
    publish: bool
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    goal: int = 0
    planned: int | None = None
    marks: dict[int, Mark] = field(default_factory=dict)
    device_only: bool = False
    alone: bool = False
    passed: int = 0
    receipt: Receipt | None = None
    computed: int = 0
    rebuilt: int = 0
    counted: bool = False
    shared: bool = False
    stepping: bool = False
    load_patience: float | None = None
    _key: bytes = b""

    @property
    def request_id(self) -> str:
        """The client's name for it."""
        return self.source.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt as submitted."""
        return len(self.source.prompt)

    @property
    def generated(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - len(self.source.prompt)

    @property
    def length(self) -> int:
        """Tokens whose data the lease holds; 0 without one."""
        return self.lease.length if self.lease is not None else 0

    def key(self) -> bytes:
        """The tokens as bytes. Cost: O(tokens added since the last call), and one memcpy of them
        all when there were any."""
        known = len(self._key) // TOKEN_BYTES
        if known < len(self.tokens):
            self._key += encode_tokens(self.tokens[known:])
        return self._key

    def settle_receipt(self) -> None:
        """The prompt is computed: what of it was not, came from the tiers (INV-21)."""
        assert self.lease is not None
        saved = max(0, self.prompt_len - self.computed)
        host = min(self.lease.host_len, saved)
        self.receipt = Receipt(saved - host, host, min(self.rebuilt, self.prompt_len - saved))

    def usage(self) -> Usage:
        """The receipt for the client; its three sources sum to the prompt's length."""
        receipt = self.receipt or Receipt(0, 0)
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.generated,
            computed=self.prompt_len - receipt.device - receipt.host,
            device=receipt.device,
            host=receipt.host,
            rebuilt=receipt.rebuilt,
        )


def common_tokens(a: Request, b: Request, start: int, page_size: int) -> int:
    """Length of the common prefix of two requests, when it is longer than `start`; else 0.

    Args:
        start: position, a multiple of `page_size`, beyond which a common page is of interest.

    Cost: one comparison of one page where they differ there, which is the common case; else
        O(common prefix).
    """
    if a.namespace != b.namespace:
        return 0
    key, other = a.key(), b.key()
    at, stop = start * TOKEN_BYTES, (start + page_size) * TOKEN_BYTES
    if key[at:stop] != other[at:stop]:
        return 0
    return common_bytes(key, other, 0, len(other)) // TOKEN_BYTES
