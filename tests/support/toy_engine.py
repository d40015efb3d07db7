"""A scheduler on a real cache with the toy model, for tests of the engine.

Copies are finished by hand or before each step; every invariant is checked after each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from banyan.cache import PrefixCache
from banyan.engine.messages import GenerateRequest, Output, Sampling
from banyan.engine.scheduler import Scheduler, SchedulerOptions
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tiers.ops import CopyJob, CopyKind
from banyan.tree import Tier, encode_tokens, make_policy
from tests.support.manual_engine import ManualCopyEngine
from tests.support.rig import toy_spec, toy_stack
from tests.support.toy_model import ToyModel

KINDS = {
    "full": [48],
    "full+window": [48, 32],
    "full+state": [48, 10],
    "full+window+state": [48, 32, 10],
}
"""Device slots with room for a few requests of forty tokens."""
HOST = {
    "full": [96],
    "full+window": [96, 64],
    "full+state": [96, 20],
    "full+window+state": [96, 64, 20],
}
A = list(range(1, 90))
B = list(range(101, 190))


class ToyEngine:
    """A scheduler on a real cache with the toy model; copies are finished by hand or each step.

    Args:
        kind, page_size, window, device, host: as in `toy_spec` and `toy_stack`; device slots are
            those of `KINDS` unless given, and there is no host tier.
        auto_copy: finish all running copies before each step.
        options: of `SchedulerOptions`; `chunk` is 16 unless given.
    """

    def __init__(
        self,
        kind: str = "full",
        *,
        device: list[int] | None = None,
        host: list[int] | None = None,
        page_size: int = 4,
        window: int = 8,
        write_policy: str = "write_through",
        evict_policy: str = "lru",
        auto_copy: bool = True,
        **options: object,
    ) -> None:
        self.now = 0.0
        self.stack = toy_stack(toy_spec(kind, page_size, window), device or KINDS[kind], host or [])
        self.copies = ManualCopyEngine(self.stack)
        self.auto_copy = auto_copy
        self.cache = PrefixCache(
            self.stack,
            self.copies,
            TierOptions(
                write_policy=WritePolicy(write_policy if host else "none"), weigh_cost=False
            ),
            make_policy(evict_policy),
            clock=lambda: self.now,
        )
        self.model = ToyModel(self.stack)
        self.scheduler = Scheduler(
            self.cache,
            self.model,
            SchedulerOptions(**{"chunk": 16, **options}),  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self.roster = self.scheduler.roster
        self.outputs: dict[str, list[Output]] = {}
        self._names = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        name: str | None = None,
        priority: int = 0,
        use_cache: bool = True,
        timeout_s: float | None = None,
        namespace: tuple[tuple[str, str], ...] = (),
        **sampling: object,
    ) -> str:
        """Queue a request; returns its name."""
        name = name or f"r{self._names}"
        self._names += 1
        self.roster.submit(
            GenerateRequest(
                request_id=name,
                prompt=list(prompt),
                sampling=Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
                priority=priority,
                use_cache=use_cache,
                timeout_s=timeout_s,
                namespace=namespace,
            )
        )
        return name

    def step(self, check: bool = True) -> list[Output]:
        """One step, with every invariant checked after it."""
        if self.auto_copy:
            self.copies.finish_all()
        outputs = self.scheduler.step()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        if check:
            self.cache.check()
        return outputs

    def run(self, limit: int = 2_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.roster.busy:
                return
            self.step()
        raise AssertionError(f"requests are still open after {limit} steps")

    def ask(self, prompt: Sequence[int], max_tokens: int = 4, **kwargs: object) -> Output:
        """Run one request to its end; its last output."""
        name = self.submit(prompt, max_tokens, **kwargs)  # type: ignore[arg-type]
        self.run()
        return self.last(name)

    def tokens(self, name: str) -> list[int]:
        """All tokens a request was sent."""
        return [t for output in self.outputs.get(name, []) for t in output.tokens]

    def text(self, name: str) -> str:
        """All text a request was sent."""
        return "".join(output.text for output in self.outputs.get(name, []))

    def last(self, name: str) -> Output:
        """The output that ended a request; there must be exactly one, and it must be the last."""
        outputs = self.outputs[name]
        assert [o.finish_reason is not None for o in outputs].count(True) == 1, outputs
        assert outputs[-1].finish_reason is not None
        return outputs[-1]

    def settle(self) -> None:
        """Finish every copy, and those that their end starts."""
        while self.cache.controller.operations:
            self.copies.finish_all()
            self.cache.poll()

    def load_backs(self) -> list[CopyJob]:
        """Every load-back ever started."""
        return [job for job in self.copies.submitted if job.kind is CopyKind.LOAD_BACK]

    def hit(self, prefix: list[int]) -> int:
        """Device boundary of a prompt that goes on after `prefix`."""
        return self.cache.match(encode_tokens([*prefix, 0])).device_boundary

    def evict_device(self) -> None:
        """Drop from the device what no request holds."""
        self.settle()
        counts = [
            pool.free_count + self.cache.tree.device.evictable[c]
            for c, pool in enumerate(self.stack.device_slots)
        ]
        got = self.cache.controller.reserve(Tier.DEVICE, counts)
        assert isinstance(got, list), got
        self.cache.controller.free(Tier.DEVICE, got)

    def assert_idle(self) -> None:
        """No request holds anything: no lease, no lock, and every slot is free or evictable."""
        self.settle()
        self.cache.check()
        assert not self.cache.leases and not self.roster.running
        for name, pool in self.cache.stats()["tiers"]["device"].items():
            assert pool["protected"] == 0 and pool["other"] == 0, (name, pool)
