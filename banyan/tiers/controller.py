"""Moves data between the tiers: decides what is copied, keeps it pinned, publishes it when done.

Owns the running operations and the counters of the tiers. The tree decides what may go and in what
order; copy engines move bytes; this stands between them. Clock and engine are injected. Called from
the scheduler thread only; `poll` is the one place where a completion touches the tree.

  C1  source and destination of an operation are pinned from submission to application (INV-09);
  C2  nothing is attached before the engine says that all its bytes are there (INV-10);
  C3  an operation that fails gives back its slots and pins and counts, and nothing else (INV-19);
  C4  completions of a kind are applied in submission order; only those given up are passed over;
  C5  a backup is attached only below a backed-up parent (INV-08).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from banyan.pools.allocator import SlotAllocator
from banyan.tiers.journal import Journal, Mutation
from banyan.tiers.operation import NO_SLOTS, Operation, Victim
from banyan.tiers.ops import CopyDone, CopyEngine, CopyJob, CopyKind, CopyTotals, OpId, Slots
from banyan.tree.eviction import Freed, drop
from banyan.tree.node import Node, Tier
from banyan.tree.tree import Tree

_CLEAN_AT_ONCE = 8


class WritePolicy(Enum):
    """When data is copied to the host."""

    NONE = "none"
    WRITE_THROUGH = "write_through"
    """When it is committed."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is used a second time."""
    WRITE_BACK = "write_back"
    """When it is about to be evicted from the device."""


class Shortage(Enum):
    """Why slots could not be given."""

    PENDING = "pending"
    """Transfers are running whose end will free some: ask again next step."""
    FULL = "full"
    """All that is there is in use."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How the tiers behave.

    Args:
        load_back_threshold: tokens that a load-back must gain to be started.
        verify: compare a SHA-256 of every record copied, on both sides.
        timeout_s: after which nobody waits for a transfer any longer.
        clean_ahead: under write-back, while less than this part of the device's `Full` slots is
            free, the next victims are backed up ahead of need, into free host slots.
        weigh_cost: recompute rather than load when measured speeds say that it is faster.
    """

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load_back_threshold: int = 1
    verify: bool = False
    timeout_s: float = 30.0
    clean_ahead: float = 0.1
    weigh_cost: bool = True


class Controller:
    """The tiers of one rank.

    Args:
        tree: whose data is moved.
        allocators: slot allocators by tier, by component; a host capacity of 0 means no host tier.
        record_bytes: bytes per slot, by component.
        engine: moves the bytes.
        clock: seconds, monotonic.
        journal: where every operation is written down, when there are ranks to compare.
    """

    def __init__(
        self,
        tree: Tree,
        allocators: tuple[list[SlotAllocator], list[SlotAllocator]],
        record_bytes: Sequence[int],
        engine: CopyEngine,
        clock: Callable[[], float],
        options: TierOptions,
        journal: Journal | None = None,
    ) -> None:
        self.journal = journal
        self.tree, self.allocators, self.record_bytes = tree, allocators, record_bytes
        self.engine, self.clock, self.options = engine, clock, options
        self.has_host = allocators[Tier.HOST][0].capacity > 0
        self.write_back = self.has_host and options.write_policy is WritePolicy.WRITE_BACK
        self.operations: dict[OpId, Operation] = {}
        self.generation = 0
        self.totals = {kind: CopyTotals() for kind in CopyKind}
        self.counts: Counter[str] = Counter()
        self.prefill_speed = 0.0
        self._done: dict[OpId, CopyDone] = {}
        self._next_id = 0

    # ---- slots -----------------------------------------------------------------------------------

    def reserve(self, tier: Tier, counts: Sequence[int]) -> list[Slots] | Shortage:
        """Slots of `tier`, `counts[c]` of each component, evicting the shortfall.

        All or nothing: on a shortage no slot is taken, and if even eviction could not help,
        nothing is evicted (INV-18). What a flush has left behind goes before anything else.
        """
        pools = self.allocators[tier]
        if _exceeds(counts, pools):
            self.purge()
            self._make_room(tier, counts)
        if _exceeds(counts, pools):
            waiting = any(not op.abandoned for op in self.operations.values())
            return Shortage.PENDING if waiting else Shortage.FULL
        slots = [pool.allocate(n) for n, pool in zip(counts, pools, strict=True)]
        assert all(s is not None for s in slots)
        found = [s for s in slots if s is not None]
        if self.journal is not None:
            firsts = (int(s[0]) if len(s) else -1 for s in found)
            self.journal.note(Mutation.RESERVE, tier, *counts, *firsts)
        return found

    def _make_room(self, tier: Tier, counts: Sequence[int]) -> None:
        """Evict what is short of `counts` beyond what comes free when victims are saved."""
        spare = self._save_first if self.write_back and tier is Tier.DEVICE else None
        coming = self._coming() if spare else [0] * self.tree.width
        short = [
            max(0, n - pool.free_count - more)
            for n, pool, more in zip(counts, self.allocators[tier], coming, strict=True)
        ]
        freed = self.tree.evict(tier, short, spare) if any(short) else None
        if freed is not None:
            self.give_back(freed)

    def _coming(self) -> list[int]:
        """Device slots, by component, of victims that are being saved."""
        coming = [0] * self.tree.width
        for op in self.operations.values():
            if op.victim is not None and not op.abandoned:
                node, component, _ = op.victim
                slots = node.parts[Tier.DEVICE][component].slots
                coming[component] += 0 if slots is None else len(slots)
        return coming

    def give_back(self, freed: Freed) -> None:
        """Return evicted slots to their pools, and count them."""
        for tier in Tier:
            for c, pool in enumerate(self.allocators[tier]):
                if freed.slots[tier][c]:
                    slots = freed.take(tier, c)
                    pool.free(slots)
                    if self.journal is not None:
                        self.journal.note(Mutation.EVICT, tier, c, len(slots), int(slots.sum()))
        self.counts["demoted_pages"] += freed.demoted
        self.counts["dropped_pages"] += freed.dropped
        self.counts["tombstoned_slots"] += freed.tombstones

    def free(self, tier: Tier, slots: Sequence[Slots]) -> None:
        """Return slots, by component, to the pools of `tier`."""
        for pool, part in zip(self.allocators[tier], slots, strict=True):
            if len(part):
                pool.free(part)

    # ---- device to host --------------------------------------------------------------------------

    def backup(self, node: Node) -> bool:
        """Copy to host what boundary `node.end` needs and host lacks. True when one was started."""
        return self._start_backup(node, self._unsaved(node))

    def _unsaved(self, node: Node) -> list[tuple[Node, int]]:
        """What of boundary `node.end` the device has, and host neither has nor is getting."""
        return [
            (n, c)
            for n, c in self.tree.missing(node, Tier.HOST)
            if n.has(c, Tier.DEVICE) and not self._is_leaving(n, c)
        ]

    def _start_backup(
        self, node: Node, parts: list[tuple[Node, int]], victim: Victim | None = None
    ) -> bool:
        if not self.has_host or not parts:
            return False
        op = self._new(CopyKind.BACKUP, node)
        op.victim = victim
        op.pin_path(self.tree, Tier.DEVICE, node)
        backed = node
        while backed.parent is not None and not backed.has(0, Tier.HOST):
            backed = backed.parent
        op.pin_path(self.tree, Tier.HOST, backed)
        for n, c in parts:
            src = n.parts[Tier.DEVICE][c].slots
            assert src is not None
            op.claim(self.tree, n, c, Tier.DEVICE, src, NO_SLOTS)
        shortage = self._launch(op)
        if shortage is not None:
            self.counts[f"miss_host_{shortage.value}"] += 1
        return shortage is None

    def _is_leaving(self, node: Node, component: int) -> bool:
        """Whether a running backup copies this already."""
        return any(
            claim.component == component and claim.op.kind is CopyKind.BACKUP
            for claim in node.claims or ()
        )

    def _save_first(self, node: Node, component: int) -> bool:
        """Write-back: back up a victim; it goes when that has ended. False: let it go now."""
        if component:
            parts = [] if node.has(component, Tier.HOST) else [(node, component)]
        else:
            parts = self._unsaved(node)
        if not parts:
            return False
        victim = Victim(node, component, self.tree.device.key_of(node, component))
        saving = self._start_backup(node, parts, victim)
        self.counts["lost_unsaved"] += not saving
        return saving

    def _let_go(self, victim: Victim) -> None:
        """Drop a victim whose backup has ended, unless it was used since."""
        node, component, key = victim
        device = self.tree.device
        if device.is_victim(node, component) and device.key_of(node, component) == key:
            self.counts["lost_unsaved"] += not node.has(component, Tier.HOST)
            freed = Freed(self.tree.width)
            drop(self.tree, node, component, Tier.DEVICE, freed)
            self.give_back(freed)

    def clean_ahead(self) -> None:
        """Write-back: back up the next victims before anybody needs their slots.

        Only into free host slots: to evict there for what may yet be used again gains nothing.
        """
        pool = self.allocators[Tier.DEVICE][0]
        if pool.free_count >= int(pool.capacity * self.options.clean_ahead):
            return
        for node in self.tree.device.peek(0, _CLEAN_AT_ONCE):
            parts = [] if node.claims else self._unsaved(node)
            room = [host.free_count for host in self.allocators[Tier.HOST]]
            for n, c in parts:
                slots = n.parts[Tier.DEVICE][c].slots
                room[c] -= 0 if slots is None else len(slots)
            if parts and min(room) >= 0:
                self._start_backup(node, parts)

    # ---- host to device --------------------------------------------------------------------------

    def pays(self, node: Node, gain: int) -> bool:
        """Whether loading back what boundary `node.end` lacks beats recomputing `gain` tokens."""
        if gain < self.options.load_back_threshold:
            self.counts["miss_below_threshold"] += 1
            return False
        done = self.totals[CopyKind.LOAD_BACK]
        if not self.options.weigh_cost or not self.prefill_speed or not done.moved_bytes:
            return True
        load = 0
        for n, c in self.tree.missing(node, Tier.DEVICE):
            slots = n.parts[Tier.HOST][c].slots
            load += 0 if slots is None else len(slots) * self.record_bytes[c]
        cheaper = load * done.seconds / done.moved_bytes < gain / self.prefill_speed
        self.counts["miss_cheaper_to_compute"] += not cheaper
        return cheaper

    def load_back(self, node: Node) -> Operation | Shortage:
        """Start copying to the device what boundary `node.end` lacks there."""
        parts = self.tree.missing(node, Tier.DEVICE)
        op = self._new(CopyKind.LOAD_BACK, node)
        self._pin_for_load(op, node, parts)
        shortage = self._launch(op)
        if shortage is not None:
            self.counts[f"miss_device_{shortage.value}"] += 1
            return shortage
        return op

    def _pin_for_load(self, op: Operation, node: Node, parts: list[tuple[Node, int]]) -> None:
        """Pin the host data to be read, and the device data of the same boundary."""
        for n, c in parts:
            src = n.parts[Tier.HOST][c].slots
            assert src is not None, (n, c)
            op.claim(self.tree, n, c, Tier.HOST, src, NO_SLOTS)
        base = node
        while base.parent is not None and not base.has(0, Tier.DEVICE):
            base = base.parent
        if base is not node:
            op.pin_path(self.tree, Tier.HOST, node)
        op.pin_path(self.tree, Tier.DEVICE, base)
        for c, reach in self.tree.need.windows:
            n = node
            while n.parent is not None and n.end > node.end - reach:
                if n.has(c, Tier.DEVICE):
                    op.claim(self.tree, n, c, Tier.DEVICE, NO_SLOTS, NO_SLOTS)
                n = n.parent
        for c in self.tree.need.points:
            if node.has(c, Tier.DEVICE):
                op.claim(self.tree, node, c, Tier.DEVICE, NO_SLOTS, NO_SLOTS)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Learn how fast the model computes prompts (tokens per second, smoothed)."""
        if seconds > 0 and tokens > 0:
            speed = tokens / seconds
            old = self.prefill_speed or speed
            self.prefill_speed = 0.8 * old + 0.2 * speed

    # ---- operations ------------------------------------------------------------------------------

    def _new(self, kind: CopyKind, node: Node) -> Operation:
        self._next_id += 1
        deadline = self.clock() + self.options.timeout_s
        return Operation(OpId(self._next_id), kind, node, self.generation, deadline)

    def _launch(self, op: Operation) -> Shortage | None:
        """Find slots for all that `op` has claimed and submit it; else undo its pins.

        Claims come before slots: making room may split a claimed node, and claims follow splits.
        """
        counts = [0] * self.tree.width
        for part in op.claims:
            counts[part.component] += len(part.src)
        slots = self.reserve(op.target, counts)
        if isinstance(slots, Shortage):
            op.unpin(self.tree)
            return slots
        given = [0] * self.tree.width
        for part in op.claims:
            at = given[part.component]
            given[part.component] = at + len(part.src)
            part.dst = slots[part.component][at : at + len(part.src)]
        self.operations[op.op_id] = op
        if self.journal is not None:
            self.journal.note(Mutation.SUBMIT, op.op_id, op.target, op.node.end, *counts)
        job = CopyJob(op.op_id, op.kind, op.blocks(), self.options.verify)
        op.ticket = self.engine.submit(job)
        self.totals[op.kind].jobs += 1
        return None

    def poll(self) -> None:
        """Apply what has completed, in submission order; give up on what is overdue.

        Cost: O(running operations) when something has completed, else O(1).
        """
        for done in self.engine.poll():
            self._done[done.op_id] = done
        unfinished: set[CopyKind] = set()
        for op_id, op in list(self.operations.items()) if self._done else ():
            if op.kind in unfinished:
                continue
            if op_id in self._done:
                del self.operations[op_id]
                self._apply(op, self._done.pop(op_id))
            elif not op.abandoned:
                unfinished.add(op.kind)
        if self.operations:
            self._abandon_overdue()
        self.purge()
        if self.write_back:
            self.clean_ahead()

    def purge(self) -> None:
        """Free what became unlocked in trees cut off by a flush. Cost: O(1) if there are none."""
        if self.tree.detached:
            self.give_back(self.tree.purge())

    def _abandon_overdue(self) -> None:
        now = self.clock()
        for op in self.operations.values():
            if op.deadline > now:
                break
            if not op.abandoned and op.op_id not in self._done:
                op.abandoned = True
                if self.journal is not None:
                    self.journal.note(Mutation.ABANDON, op.op_id)
                self.counts["miss_timeout"] += 1
                if op.kind is CopyKind.LOAD_BACK:
                    self.counts["miss_load_failed"] += 1
                self.engine.cancel(op.op_id)
                self._end(op, ok=False)

    def _apply(self, op: Operation, done: CopyDone) -> None:
        self._count(op.kind, done)
        if self.journal is not None:
            self.journal.note(Mutation.APPLY, op.op_id, int(done.ok))
        stale = op.generation != self.generation and op.on_end is None
        rest = [NO_SLOTS] * self.tree.width
        if done.ok and not stale:
            for part in op.moving():
                if self._may_attach(op, part.node, part.component):
                    self.tree.attach(part.node, part.component, op.target, part.dst)
                else:
                    self.free(op.target, _only(part.component, part.dst, self.tree.width))
        else:
            rest = op.target_slots(self.tree.width)
        self._end(op, done.ok)
        sources = [(claim.node, claim.component) for claim in op.claims]
        op.unpin(self.tree)
        self.free(op.target, rest)
        if op.kind is CopyKind.LOAD_BACK and not done.ok and done.reason != "cancelled":
            if not op.abandoned:
                self.counts["miss_load_failed"] += 1
            if done.reason == "checksum":
                self._forget_on_host(sources)
        if op.victim is not None:
            self._let_go(op.victim)

    def _forget_on_host(self, parts: list[tuple[Node, int]]) -> None:
        """Drop host copies of which some have wrong bytes, so that nobody loads them again."""
        freed = Freed(self.tree.width)
        for node, component in sorted(parts, key=lambda part: part[0].end, reverse=True):
            if self.tree.host.is_victim(node, component):
                self.counts["dropped_wrong"] += 1
                drop(self.tree, node, component, Tier.HOST, freed)
        self.give_back(freed)

    def _may_attach(self, op: Operation, node: Node, component: int) -> bool:
        """Whether the tier still lacks this and its parent is there (C5)."""
        parent = node.parent
        if parent is None or node.has(component, op.target):
            return False
        if component:
            return op.target is Tier.HOST or node.has(0, Tier.DEVICE)
        return parent.parent is None or parent.has(0, op.target)

    def _end(self, op: Operation, ok: bool) -> None:
        on_end, op.on_end = op.on_end, None
        if on_end is not None:
            on_end(ok)

    def _count(self, kind: CopyKind, done: CopyDone) -> None:
        totals = self.totals[kind]
        totals.verified += done.verified
        totals.mismatched += done.mismatched
        if done.ok:
            totals.moved_bytes += done.moved_bytes
            totals.seconds += done.seconds
        else:
            totals.failed += 1
            totals.reasons[done.reason] = totals.reasons.get(done.reason, 0) + 1

    def flush(self) -> None:
        """Forget all cached data; completions of running transfers only give back their slots."""
        self.generation += 1
        if self.journal is not None:
            self.journal.note(Mutation.FLUSH, self.generation)
        for op in self.operations.values():
            self.engine.cancel(op.op_id)
        self.give_back(self.tree.flush())


def _only(component: int, slots: Slots, width: int) -> list[Slots]:
    return [slots if c == component else NO_SLOTS for c in range(width)]


def _exceeds(counts: Sequence[int], pools: Sequence[SlotAllocator]) -> bool:
    return any(n > pool.free_count for n, pool in zip(counts, pools, strict=True))
