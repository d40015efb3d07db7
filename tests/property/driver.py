"""Drives a `Rig` by operations that take plain numbers, and has every step judged.

A seeded loop and a Hypothesis state machine both choose them. Here is what each operation may
take away from the cache; `Judge` knows what may appear in it.
"""

from __future__ import annotations

import random

from banyan.cache import AllocateOutcome
from banyan.errors import CopyError
from banyan.spec import Window
from banyan.tree import Mark, Tier, encode_namespace, encode_tokens
from tests.property.judge import Judge, Running
from tests.support.reference import TOKEN, Held, Mismatch, survey
from tests.support.rig import Rig

SPACES = ("", "other")
MAX_RUNNING = 3


class Driver(Judge):
    """One cache under operations.

    Args:
        rig, source: as `Judge`.

    Attributes:
        hits: tokens reused, by tier.
    """

    def __init__(self, rig: Rig, source: random.Random) -> None:
        super().__init__(rig, source)
        self.hits = {"device": 0, "host": 0}

    # ---- operations ------------------------------------------------------------------------------

    def begin(self, stream: int, shared: int, extra: int, flags: int) -> None:
        """A new request of `shared` tokens of a stream and some of its own."""
        if len(self.running) >= MAX_RUNNING:
            return
        tokens = self.streams[stream % len(self.streams)][: shared % 61]
        tokens = tokens + [self.source.randrange(3) for _ in range(1 + extra % 12)]
        namespace = _space(SPACES[flags % 8 == 7])
        key = encode_tokens(tokens)
        device, anywhere, _, full = self.reference.answer(key, namespace)
        device_only, publish = flags // 8 % 8 == 7, flags // 64 % 8 != 7
        match, priority = self.cache.match(key, namespace), flags % 3
        if flags // 512 % 2 and not device_only:
            ready = self.cache.acquire_if_ready(match, priority=priority, publish=publish)
            if ready is None:
                return self.judge()
            lease = ready
        else:
            lease = self.cache.acquire(
                match, priority=priority, device_only=device_only, publish=publish
            )
        expected = {device} if device_only else {device, anywhere}
        if lease.boundary not in expected or lease.length != lease.boundary:
            raise Mismatch(f"acquired {lease.boundary} of {device} on device, {anywhere} anywhere")
        if lease.device_len + lease.host_len != lease.boundary or lease.host_len < 0:
            raise Mismatch(f"{lease.device_len} + {lease.host_len} make {lease.boundary}")
        self.hits["device"] += lease.device_len
        self.hits["host"] += lease.host_len
        op = lease.loading.op_id if lease.loading is not None else None
        if lease.present != max(lease.boundary, full):
            raise Mismatch(f"at {lease.boundary}, the tree's pages to {lease.present}, not {full}")
        self.reference.borrow(lease, key, namespace, lease.boundary, full, op)
        self.running.append(Running(lease, tokens, namespace))
        self.judge()

    def compute(self, which: int, count: int) -> None:
        """One forward pass over up to `count` tokens, decoding where the prompt is used up."""
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        lease, tokens = request.lease, request.tokens
        if lease.length >= len(tokens):
            tokens.append(self.source.randrange(3))
        stop = min(len(tokens), lease.length + 1 + count % 16)
        try:
            outcome = self._allocate(request, stop)
            if outcome is AllocateOutcome.OK:
                self.rig.read(lease, tokens)
                self.rig.write(lease, tokens, lease.length, stop)
                self.cache.advance(lease, stop)
                self.reference.borrowers[lease].reads_state = False
                if stop % self.page == 0:
                    request.kept = stop
        except CopyError:
            self._drop(request)
        self.judge()

    def _allocate(self, request: Running, stop: int) -> AllocateOutcome:
        lease = request.lease
        skipped = self.cache.counts["checkpoints_skipped"]
        before, leftovers = survey(self.cache.tree), bool(self.cache.tree.detached)
        had = [0 if c in self.points else lease.pages(c).stop_page for c in range(self.width)]
        free = [pool.free_count for pool in self.rig.stack.device_slots]
        slid = self._will_slide(request)
        outcome = self.cache.allocate(lease, stop)
        for c in range(self.width):
            if c not in self.points:
                first = (lease.pages(c).first_page + 1) * self.page
                self.reference.slide(lease, lease.length, c, first)
        if self.cache.counts["checkpoints_skipped"] > skipped:
            request.kept = None
        need = [max(0, -(-stop // self.page) - pages) for pages in had]
        short = [
            max(0, n - f - s) if outcome is AllocateOutcome.OK else 0
            for n, f, s in zip(need, free, slid, strict=True)
        ]
        if self.rig.write_policy != "write_back" and not leftovers:
            self._lost_exactly(before, short)
        return outcome

    def _will_slide(self, request: Running) -> list[int]:
        """Request-owned window pages that `allocate` gives back before it asks for more."""
        lease, counts = request.lease, [0] * self.width
        whole = lease.length // self.page * self.page
        for c, component in enumerate(self.rig.spec.components):
            if isinstance(component.reach, Window):
                table = lease.pages(c)
                least = min(self.reference.needed(c, whole), default=self.page) // self.page - 1
                counts[c] = max(0, least - max(table.first_page, table.owned_from))
        return counts

    def _lost_exactly(self, before: Held, short: list[int]) -> None:
        """INV-18: the device lost the shortfall, and windows and states of the pages that went.

        (Said only while nothing waits in trees cut off by a flush: that goes like the rest.)
        """
        now = survey(self.cache.tree)
        gone = before[0][0].keys() - now[0][0].keys()
        if len(gone) != short[0]:
            raise Mismatch(f"{len(gone)} full pages evicted for a shortfall of {short[0]}")
        for c in range(1, self.width):
            lost = before[0][c].keys() - now[0][c].keys()
            alone = lost - gone
            if c not in self.points and len(alone) != max(0, short[c] - len(lost & gone)):
                raise Mismatch(f"{len(alone)} of component {c} evicted, short of {short[c]}")
            if c in self.points and len(alone) > 1:
                raise Mismatch(f"{len(alone)} states evicted for one")

    def commit(self, which: int, mark: Mark = Mark.KEEP) -> None:
        """Publish what a request has computed."""
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        lease, key = request.lease, encode_tokens(request.tokens)
        borrower = self.reference.borrowers[lease]
        stop = lease.length // self.page * self.page
        offered = self._offered(request, stop)
        state = next((places for c in self.points for places in [offered[0][c]]), {})
        before = survey(self.cache.tree)
        try:
            self.cache.commit(lease, key, mark)
        except CopyError:
            self._drop(request)
            return self.judge()
        moves = stop > borrower.published or bool(state)
        if lease.loading is not None or not lease.publish or not borrower.settled or not moves:
            return self.judge()
        taken = any(place not in before[0][c] for c in self.points for place in offered[0][c])
        if request.kept is not None and state:
            current, request.kept = request.kept == lease.length, None
        else:
            current = False
        self.reference.move(lease, key, stop, reads_state=current and taken)
        self.judge(offered)
        for c in range(self.width):
            missing = offered[0][c].keys() - self.reference.held[0][c].keys()
            if missing:
                raise Mismatch(f"committed but not there: {len(missing)} of component {c}")

    def _offered(self, request: Running, stop: int) -> Held:
        """Places and slots that a commit up to `stop` publishes."""
        lease, key = request.lease, encode_tokens(request.tokens)
        borrower = self.reference.borrowers[lease]
        offered: Held = ([{} for _ in range(self.width)], [{} for _ in range(self.width)])
        for c in range(self.width):
            if c in self.points:
                kept = request.kept
                if kept is not None and borrower.published < kept <= stop:
                    slot = lease.states(c).kept
                    assert slot is not None
                    offered[0][c][request.namespace, key[: kept * TOKEN]] = slot
                continue
            table = lease.pages(c)
            for end in range(borrower.published + self.page, stop + 1, self.page):
                if end >= borrower.keeps_from[c]:
                    slot = int(table.slots[end // self.page - 1 - table.first_page])
                    offered[0][c][request.namespace, key[: end * TOKEN]] = slot
        return offered

    def release(self, which: int) -> None:
        """A request ends, however far it has come."""
        if self.running:
            before = survey(self.cache.tree)
            self._drop(self.running[which % len(self.running)])
            if survey(self.cache.tree) != before:
                raise Mismatch("a release changed what is cached")
            self.judge()

    def _drop(self, request: Running) -> None:
        self.running.remove(request)
        del self.reference.borrowers[request.lease]
        self.cache.release(request.lease)

    def finish(self, which: int, ok: bool) -> None:
        """One running copy completes or fails; nothing may show before the next poll."""
        pending = self.rig.engine.pending
        if pending:
            before = survey(self.cache.tree)
            op_id = pending[which % len(pending)]
            self.rig.engine.finish(op_id, ok=ok, reason="" if ok else "lost")
            if survey(self.cache.tree) != before:
                raise Mismatch("a completion showed before it was polled")
            self.judge()

    def start(self, which: int) -> None:
        """One running copy passes the point where it can be cancelled."""
        pending = self.rig.engine.pending
        if pending:
            self.rig.engine.start(pending[which % len(pending)])

    def hold(self, on: bool) -> None:
        """While the engine holds, a reader of what is still being loaded gives up."""
        self.rig.engine.hold = on

    def poll(self) -> None:
        """A scheduler step."""
        self.cache.poll()
        self.judge()

    def wait(self, seconds: int) -> None:
        """Time passes; what is overdue is given up at the next poll."""
        self.rig.now += seconds
        self.poll()

    def evict(self, tier: int, percents: list[int]) -> None:
        """Somebody takes a part of what can be had (over 100: too much), and leaves."""
        controller, which = self.cache.controller, Tier(tier % 2)
        free = [pool.free_count for pool in controller.allocators[which]]
        evictable = self.cache.tree.index[which].evictable
        asked = [-(-p * (f + e) // 100) for p, f, e in zip(percents, free, evictable, strict=False)]
        before, leftovers = survey(self.cache.tree), bool(self.cache.tree.detached)
        slots = controller.reserve(which, asked)
        if isinstance(slots, list):
            controller.free(which, slots)
        if which is Tier.DEVICE and self.rig.write_policy != "write_back" and not leftovers:
            short = [max(0, n - f) for n, f in zip(asked, free, strict=True)]
            self._lost_any(before, short if isinstance(slots, list) else [0] * self.width)
        self.judge()

    def _lost_any(self, before: Held, short: list[int]) -> None:
        now = survey(self.cache.tree)
        for c in range(self.width):
            lost = len(before[0][c].keys() - now[0][c].keys())
            if lost < short[c] or (c == 0 and lost != short[c]):
                raise Mismatch(f"{lost} of component {c} evicted, short of {short[c]}")

    def flush(self) -> None:
        """Forget everything cached."""
        self.cache.flush()
        self.reference.flush()
        if any(part for tier in survey(self.cache.tree) for part in tier):
            raise Mismatch("something is matchable after a flush")
        self.judge()

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everything ends; every slot must be back and every lock gone."""
        while self.running:
            self.release(0)
        self.rig.engine.hold = False
        while self.cache.controller.operations:
            for op_id in self.rig.engine.pending:
                self.rig.engine.finish(op_id)
            self.poll()
        tree = self.cache.tree
        if any(tree.device.protected) or any(tree.host.protected) or tree.detached:
            raise Mismatch(f"locked at idle: {tree.device.protected} {tree.host.protected}")
        self.flush()
        for tier in (self.rig.stack.device_slots, self.rig.stack.host_slots):
            for pool in tier:
                if pool.free_count != pool.capacity:
                    raise Mismatch(f"{pool.name}: {pool.free_count} of {pool.capacity} came back")


def _space(name: str) -> bytes:
    return encode_namespace([("salt", name)]) if name else b""
