"""`PrefixCache`: what an engine calls to reuse what was computed before.

Six verbs, `match`, `acquire`, `allocate`, `advance`, `commit`, `release`; `poll` once per step; and
`flush`, `stats`, `check`. Owns the leases; the tree, the pools and the controller
are its parts. Any engine may use it: it needs the pools only to read and write the slots that
a lease names. Called from one thread, the scheduler's.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from banyan import audit
from banyan.errors import CopyError, LeaseError
from banyan.grants import Grants
from banyan.lease import Lease, PageTable
from banyan.pools.assembler import PoolStack
from banyan.rolling import Rolling
from banyan.spec import CacheSpec
from banyan.tiers.controller import Controller, Shortage, TierOptions, WritePolicy
from banyan.tiers.journal import Journal, Mutation
from banyan.tiers.operation import NO_SLOTS
from banyan.tiers.ops import CopyEngine, Slots
from banyan.tree import ROOT_NAMESPACE, Mark, Match, Node, Offer, Policy, Tier, Tree
from banyan.tree.keys import TOKEN_BYTES


class AllocateOutcome(Enum):
    """What became of a request for slots; nothing has changed unless OK."""

    OK = "ok"
    PENDING = "pending"
    """Transfers are running whose end will free slots: ask again next step."""
    FULL = "full"
    """All slots are in use by running requests."""


class PrefixCache:
    """One radix tree over device and host.

    Args:
        stack: the pools; `stack.spec` says what is cached.
        engine: copies between the tiers.
        options: write policy, threshold, verification.
        policy: order of eviction, LRU by default.
        clock: seconds, monotonic; only used to weigh and to time out transfers.
        journal: where every operation is written down, when there are ranks to compare.
        record_bytes: bytes of a slot by component, to weigh copies with; the stack's own, unless
            ranks differ in theirs and have agreed on others.
    """

    def __init__(
        self,
        stack: PoolStack,
        engine: CopyEngine,
        options: TierOptions | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        record_bytes: Sequence[int] | None = None,
    ) -> None:
        self.journal = journal
        self.spec: CacheSpec = stack.spec
        self.stack = stack
        self.options = options or TierOptions()
        write_back = self.options.write_policy is WritePolicy.WRITE_BACK
        self.tree = Tree(self.spec, policy, mirrors_first=write_back)
        self.page_size = self.spec.page_size
        self.controller = Controller(
            self.tree,
            (stack.device_slots, stack.host_slots),
            record_bytes or [c.record_bytes(self.page_size) for c in self.spec.components],
            engine,
            clock,
            self.options,
            journal,
        )
        self.leases: set[Lease] = set()
        self.counts: Counter[str] = Counter()
        self.grants = Grants(self.tree, self.controller, self.counts)
        self._paged = [c for c, x in enumerate(self.spec.components) if x.reach.page_shaped]
        self._points = list(self.tree.need.points)
        self.rolling = Rolling(self.tree, self._checkpoint_room())

    # ---- match and acquire -----------------------------------------------------------------------

    def match(self, key: bytes, namespace: bytes = ROOT_NAMESPACE) -> Match:
        """Where `key` can be resumed. Read-only; cheap enough to ask for every waiting request.

        Args:
            key: int32 little-endian tokens (`encode_tokens`).
        """
        return self.tree.match(key, namespace)

    def acquire(
        self,
        match: Match,
        *,
        priority: int = 0,
        device_only: bool = False,
        publish: bool = True,
    ) -> Lease:
        """Take hold of a match's boundary at once; starts a load-back where that is worth it.

        Always succeeds: where the better boundary cannot be had, the device's is used. The tokens
        before `lease.boundary` need not be computed; `lease.ticket`, when set, must be waited on
        layer by layer before their data is read.

        Mutates: splits at the boundary and pins it; may evict and start copies. It counts as used
        when `advance` is first called: a lease given back before has consumed nothing (INV-23).
        """
        lease = None if device_only else self.grants.from_host(match)
        if not isinstance(lease, Lease):
            lease = self.grants.on_device(match)
        return self._granted(lease, match, priority, publish)

    def acquire_if_ready(
        self, match: Match, *, priority: int = 0, publish: bool = True
    ) -> Lease | None:
        """As `acquire`; None when the load-back needs slots that running transfers will free.

        Ask again next step then, or `acquire` to go on with less.
        """
        lease = self.grants.from_host(match)
        if lease is Shortage.PENDING:
            return None
        if not isinstance(lease, Lease):
            lease = self.grants.on_device(match)
        return self._granted(lease, match, priority, publish)

    def _granted(self, lease: Lease, match: Match, priority: int, publish: bool) -> Lease:
        lease.priority, lease.publish = priority, publish
        self.rolling.granted(lease, match)
        self.leases.add(lease)
        if self.journal is not None:
            self.journal.note(Mutation.ACQUIRE, lease.boundary, lease.device_len, lease.present)
        return lease

    # ---- allocate and advance --------------------------------------------------------------------

    def allocate(self, lease: Lease, stop: int) -> AllocateOutcome:
        """Slots for tokens [lease.length, stop) in every component, and a state slot to write to.

        Evicts the shortfall. Mutates the lease's tables, and gives back window pages that no later
        token can reach before it takes new ones. Cost: O(components) when nothing is wanting.
        """
        self._usable(lease)
        pages = -(-stop // self.page_size)
        if not self._lacks_slots(lease, pages):
            return AllocateOutcome.OK
        self._slide_all([lease])
        counts = [0] * self.tree.width
        for c in self._paged:
            counts[c] = max(0, pages - lease.pages(c).stop_page)
        for c in self._points:
            counts[c] = int(lease.states(c).needs_slot)
        slots = self.controller.reserve(Tier.DEVICE, counts) if any(counts) else None
        if isinstance(slots, Shortage) and any(counts[c] for c in self._points):
            slots = self._without_checkpoint(lease, counts, slots)
        if isinstance(slots, Shortage):
            return AllocateOutcome(slots.value)
        for c in self._paged:
            if slots is not None and counts[c]:
                lease.pages(c).append(slots[c])
        for c in self._points:
            fresh = slots[c] if slots is not None else NO_SLOTS
            lease.states(c).choose_write(int(fresh[0]) if len(fresh) else None)
        return AllocateOutcome.OK

    def _lacks_slots(self, lease: Lease, pages: int) -> bool:
        """Whether a page or a state slot to write to is wanting; seldom, while decoding."""
        for c in self._paged:
            if lease.tables[c].stop_page < pages:  # type: ignore[union-attr]
                return True
        return any(lease.states(c).is_wanting for c in self._points)

    def _without_checkpoint(
        self, lease: Lease, counts: list[int], shortage: Shortage
    ) -> list[Slots] | Shortage | None:
        """Go on in the kept state's own slot: the checkpoint is skipped, the request is not."""
        for c in self._points:
            if counts[c] and lease.states(c).write is None:
                return shortage
        counts = [0 if c in self._points else n for c, n in enumerate(counts)]
        slots = self.controller.reserve(Tier.DEVICE, counts)
        if not isinstance(slots, Shortage):
            self.counts["checkpoints_skipped"] += 1
        return slots

    def allocate_next(self, leases: Sequence[Lease]) -> bool:
        """A slot for one more token of each lease, all in one go: a decode step's.

        Returns:
            False when that cannot be: one lease is broken, or they cannot all have theirs now. Then
            nothing has changed but that window pages were given back; ask for each by itself.

        Cost: O(leases), and one reservation however many want a slot.
        """
        size = self.page_size
        wanting = []
        for lease in leases:
            if lease.broken or lease.released:
                return False
            if self._lacks_slots(lease, lease.length // size + 1):
                wanting.append(lease)
        if not wanting:
            return True
        self._slide_all(wanting)
        width = self.tree.width
        counts = [0] * width
        for lease in wanting:
            stop = lease.length // size + 1
            for c in self._paged:
                counts[c] += lease.tables[c].stop_page < stop  # type: ignore[union-attr]
            for c in self._points:
                counts[c] += lease.tables[c].needs_slot  # type: ignore[union-attr]
        slots = self.controller.reserve(Tier.DEVICE, counts) if any(counts) else [NO_SLOTS] * width
        if isinstance(slots, Shortage):
            return False
        given = [iter(part.tolist()) for part in slots]
        for lease in wanting:
            stop = lease.length // size + 1
            for c in self._paged:
                table = lease.tables[c]
                if table.stop_page < stop:  # type: ignore[union-attr]
                    table.push(next(given[c]))  # type: ignore[union-attr]
            for c in self._points:
                state = lease.states(c)
                state.choose_write(next(given[c]) if state.needs_slot else None)
        return True

    def _slide_all(self, leases: Iterable[Lease]) -> None:
        """Let go of the window pages of many leases that none of them needs any more."""
        for c, reach in self.tree.need.windows:
            freed = [slots for lease in leases if len(slots := self._slide(lease, c, reach))]
            if freed:
                self.stack.device_slots[c].free(np.concatenate(freed))

    def _slide(self, lease: Lease, c: int, reach: int) -> Slots:
        """Let go of window pages that neither a later token nor the next commit needs; those to
        be freed are returned. `reach`: tokens that must be there before a boundary."""
        size = self.page_size
        page = (lease.length // size * size - reach) // size
        table = lease.tables[c]
        assert isinstance(table, PageTable)
        if table.first_page >= page:
            return NO_SLOTS
        freed = table.drop_before(page)
        start = lease.lock_start[c]
        if start is not None and start < lease.node.end:
            lease.lock_start[c] = self.tree.unlock_window(lease.node, c, start, page * size)
        return freed

    def advance(self, lease: Lease, stop: int) -> None:
        """Tokens before `stop` are computed and their data written to the slots allocated.

        At a whole number of pages the state just written is kept, to be published by the next
        commit: decoding so carries one rolling snapshot.

        Raises:
            LeaseError: `stop` lies before what is computed or beyond the slots; nothing changed.
        """
        self._usable(lease)
        covered = lease.pages(0).stop_page * self.page_size
        ready = all(lease.states(c).write is not None for c in self._points)
        if not lease.length <= stop <= covered or not ready:
            raise LeaseError(
                f"cannot advance from {lease.length} to {stop}: allocate has given "
                f"{covered} tokens{'' if ready else ' and no state slot to write to'}"
            )
        if lease.length == lease.boundary:
            self._consume(lease)
        lease.length = stop
        for c in self._points:
            self._unlock_state(lease, c)
            lease.states(c).has_written(stop, keep=stop % self.page_size == 0)

    def _consume(self, lease: Lease) -> None:
        """The boundary has been read: refresh it, count it, and keep a copy as the policy says."""
        lease.node.priority = max(lease.node.priority, lease.priority)
        self.tree.use(lease.node)
        self.rolling.used(lease)
        self.counts["hit_tokens_device"] += lease.device_len
        self.counts["hit_tokens_host"] += lease.host_len
        if lease.generation == self.generation and lease.loading is None:
            self._write_through(lease.node)  # what a load-back brings is on host

    def _unlock_state(self, lease: Lease, component: int) -> None:
        """The tree's state has been read: others may have its slot again."""
        if lease.lock_start[component] is not None:
            self.tree.device.unlock(lease.node, component)
            lease.lock_start[component] = None

    # ---- commit and release ----------------------------------------------------------------------

    def commit(self, lease: Lease, key: bytes, mark: Mark = Mark.KEEP) -> None:
        """Publish the whole pages of what was computed, and the kept state.

        Duplicates of what the tree has meanwhile are freed and the tables repointed first. The
        lease then protects the new boundary. Starts a backup as the write policy says. While the
        lease's own load-back waits for an earlier transfer, nothing is published yet.

        Args:
            key: the tokens, at least `lease.length` of them.
            mark: what a later prompt may resume here for. `PASSED`: nothing; the windows and states
                of this boundary are then the first to go and are not copied to host. `TURN` and
                `PROMPT` supersede the lease's earlier ones (`banyan.rolling`).

        Raises:
            LeaseError: `key` is shorter than that; nothing changed.
        """
        self._usable(lease)
        if len(key) < lease.length * TOKEN_BYTES:
            raise LeaseError(f"a key of {len(key) // TOKEN_BYTES} tokens for {lease.length}")
        if lease.loading is not None:
            self.poll()  # its bytes have been read, so the engine has reported it
            self._usable(lease)
        if lease.loading is not None:
            self.counts["commits_deferred"] += 1
            return
        stop = lease.length // self.page_size * self.page_size
        if not lease.publish or lease.generation != self.generation:
            return
        node = lease.node if lease.node.parent else self.tree.root(lease.namespace)
        states = {
            c: (s.kept_at, s.kept)
            for c in self._points
            if (s := lease.states(c)).kept is not None and node.end < s.kept_at <= stop
        }
        if stop <= node.end and not states:
            if node.parent is not None and node.mark is Mark.PASSED and stop == node.end:
                self._keep(lease, node, mark, states)
            return
        starts = [lease.present, *[node.end] * (self.tree.width - 1)]
        offers = [self._offer(lease, c, start, stop) for c, start in enumerate(starts)]
        done = self.tree.insert(node, key, stop, offers, states, lease.priority)
        for c, first, slots in done.repoint:
            lease.pages(c).replace(first, slots)
        for c, slots in done.duplicates:
            self.stack.device_slots[c].free(slots)
            self.counts["duplicate_slots"] += len(slots)
        if self.journal is not None:
            sums = (int(slots.sum()) for _, _, slots in done.repoint)
            new = zlib.crc32(key[node.end * TOKEN_BYTES : stop * TOKEN_BYTES])
            self.journal.note(Mutation.COMMIT, node.end, stop, new, *sorted(done.taken), *sums)
        self._move(lease, done.node, states, done.taken)
        self._keep(lease, done.node, mark, states)

    def _offer(self, lease: Lease, c: int, start: int, stop: int) -> Offer | None:
        if c not in self._paged:
            return None
        table = lease.pages(c)
        first = max(start // self.page_size, table.first_page)
        begin, end = first - table.first_page, stop // self.page_size - table.first_page
        return Offer(first, table.slots[begin:end].copy()) if end > begin else None

    def _move(
        self, lease: Lease, node: Node, states: dict[int, tuple[int, int]], taken: Sequence[int]
    ) -> None:
        """Lock the new boundary, then let go of the old one."""
        for c in states:
            lease.states(c).has_published(taken=c in taken)
        old, starts = lease.node, lease.lock_start
        lease.node = node
        lease.lock_start = self.tree.lock(node, states=False)
        for c in states:
            if lease.states(c).read_locked:  # the next forward pass starts from what is the tree's
                self.tree.device.lock(node, c)
                lease.lock_start[c] = node.end
        self.tree.unlock(old, starts)
        for c in self._paged:
            lease.pages(c).owned_from = node.end // self.page_size
        lease.pages(0).owned_from = lease.present // self.page_size
        if lease.borrowed is not None and lease.borrowed.end <= node.end:
            self.grants.return_borrowed(lease)

    def _keep(
        self, lease: Lease, node: Node, mark: Mark, states: dict[int, tuple[int, int]]
    ) -> None:
        """The boundary at `node` is published for what `mark` says: refresh and copy it, or not."""
        stays = self.rolling.published(lease, node, mark)
        self.tree.use(node, checkpoint=stays)
        if not stays:
            return
        self._write_through(node)
        for at in {at for at, _ in states.values()} - {node.end}:
            inner = self._ancestor_at(node, at)
            self.tree.use(inner)
            self._write_through(inner)

    def _write_through(self, node: Node) -> None:
        """Copy to host what a boundary in use needs there, where the policy says so.

        A boundary is in use when it was published, and also when a request resumed at it: it may
        lie inside what others published, and its windows then are not those of their ends.
        """
        policy = self.options.write_policy
        selected = policy is WritePolicy.WRITE_THROUGH_SELECTIVE and node.hits >= 2
        if selected or policy is WritePolicy.WRITE_THROUGH:
            self.controller.backup(node)

    def _ancestor_at(self, node: Node, at: int) -> Node:
        while node.parent is not None and node.start >= at:
            node = node.parent
        return node

    def release(self, lease: Lease) -> None:
        """Give back everything the request holds; the lease cannot be used again (INV-12).

        Raises:
            LeaseError: it has been released already.
        """
        if lease not in self.leases:
            raise LeaseError("this lease was released before, or belongs to another cache")
        self.leases.remove(lease)
        if self.journal is not None:
            self.journal.note(Mutation.RELEASE, lease.length, lease.node.end)
        lease.released = True
        for c in self._paged:
            self.stack.device_slots[c].free(lease.pages(c).owned)
        for c in self._points:
            self.stack.device_slots[c].free(np.array(lease.states(c).owned, np.int32))
        self.grants.return_borrowed(lease)
        if lease.loading is not None:
            lease.loading.on_end = None
            self.controller.engine.cancel(lease.loading.op_id)
        elif not lease.broken:
            self.tree.unlock(lease.node, lease.lock_start)
        self.controller.purge()

    def _usable(self, lease: Lease) -> None:
        if lease.released or lease not in self.leases:
            raise LeaseError("this lease was released before, or belongs to another cache")
        if lease.broken:
            raise CopyError("the load-back of this lease failed: release it and acquire again")

    # ---- upkeep ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Apply finished transfers. Call once per scheduler step."""
        self.controller.poll()

    @property
    def generation(self) -> int:
        """How often `flush` was called; leases of an older one publish nothing."""
        return self.controller.generation

    def flush(self) -> None:
        """Forget all cached data. Running requests keep what they hold and publish nothing more."""
        self.controller.flush()

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long a prefill took, to weigh load-backs against."""
        self.controller.note_prefill(tokens, seconds)

    def _checkpoint_room(self) -> int:
        """Checkpoints that the larger tier holds: of the component of which it holds the fewest."""
        slots = dict.fromkeys(self._points, 1)
        slots |= {c: -(-reach // self.page_size) for c, reach in self.tree.need.windows}
        tiers = (self.stack.device_slots, self.stack.host_slots)
        return max(min((t[c].capacity // n for c, n in slots.items()), default=1) for t in tiers)

    def capacity_tokens(self) -> int:
        """Tokens of one request, prompt and output, that the device can hold at most."""
        return self.stack.device_slots[0].capacity * self.page_size

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain data. Cost: O(components)."""
        return audit.stats(self)

    def check(self) -> None:
        """Verify every invariant over the tree, the pools, the leases and the operations.

        Raises:
            InvariantError: naming everything found. Cost: O(nodes + slots).
        """
        audit.check(self)

    def close(self) -> None:
        """Stop the copy engine. Leases must be released before."""
        self.controller.engine.close()
