"""Makes leases: on what the device has, or on what a load-back started for it will bring.

Owns the way from a match to a lease whose tables name the right slots, and what becomes of a lease
when its load-back ends. Knows the tree and the controller; not the engine. Called by `PrefixCache`,
and by `Controller.poll` through `Operation.on_end`, from the scheduler thread.
"""

from __future__ import annotations

from collections import Counter

from banyan.lease import Lease, PageTable, StateTable
from banyan.tiers.controller import Controller, Shortage
from banyan.tiers.ops import Slots
from banyan.tree import Match, Node, Tree
from banyan.tree.chain import slots_to
from banyan.tree.node import joined


class Grants:
    """The leases of one cache, until they are given out.

    Args:
        counts: where misses are counted by reason.
    """

    def __init__(self, tree: Tree, controller: Controller, counts: Counter[str]) -> None:
        self.tree, self.controller, self.counts = tree, controller, counts
        parts = tree.spec.components
        self._paged = [c for c, part in enumerate(parts) if part.reach.page_shaped]

    def on_device(self, match: Match) -> Lease:
        """A lease on the best boundary that the device has by itself."""
        if match.epoch != self.tree.epoch:
            match = self.tree.match(match.key, match.namespace)
        node = self.tree.node_at(match, match.device_boundary)
        lease = self._new_lease(match, node, match.device_boundary)
        lease.lock_start = self.tree.lock(node)
        self._fill_tables(lease)
        self._borrow(lease, match)
        return lease

    def from_host(self, match: Match) -> Lease | Shortage | None:
        """A lease on what a load-back brings; None when there is none worth starting.

        A `Shortage` says why its slots could not be had.
        """
        if match.epoch != self.tree.epoch:
            match = self.tree.match(match.key, match.namespace)
        if match.boundary <= match.device_boundary:
            return None
        if match.loading:
            self.counts["miss_loading"] += 1
            return None
        node = self.tree.node_at(match, match.boundary)
        if not self.controller.pays(node, match.boundary - match.device_boundary):
            return None
        op = self.controller.load_back(node)
        if isinstance(op, Shortage):
            return op
        lease = self._new_lease(match, node, match.device_boundary)
        lease.loading, lease.ticket = op, op.ticket
        lease.lock_start = [None] * self.tree.width
        self._fill_tables(lease)
        self._borrow(lease, match)
        op.on_end = lambda ok: self._load_ended(lease, ok)
        return lease

    def _new_lease(self, match: Match, node: Node, device_len: int) -> Lease:
        boundary = node.end
        return Lease(
            boundary=boundary,
            device_len=device_len,
            host_len=boundary - device_len,
            namespace=match.namespace,
            node=node,
            tables=[
                PageTable() if c.reach.page_shaped else StateTable()
                for c in self.tree.spec.components
            ],
            length=boundary,
            generation=self.controller.generation,
        )

    def _fill_tables(self, lease: Lease) -> None:
        """Point the tables at the tree's slots, or at those a running load-back writes to."""
        node = lease.node
        for c in self._paged:
            low = self.tree.spec.components[c].reach.first_needed(
                lease.boundary, self.tree.page_size
            )
            table = PageTable(low // self.tree.page_size)
            if c == 0 and node.full is not None:
                table.append(slots_to(node, node.end))
            elif node.end > low:
                table.append(self._pages_of(lease, c, low))
            table.owned_from = lease.boundary // self.tree.page_size
            lease.tables[c] = table
        if node.parent is not None:
            for c in self.tree.need.points:
                state = lease.states(c)
                state.read, state.read_locked = int(self._slots_of(lease, node, c)[0]), True

    def _pages_of(self, lease: Lease, c: int, low: int) -> Slots:
        """Slots of component `c` from position `low` to the lease's node's end."""
        parts: list[Slots] = []
        n = lease.node
        while n.parent is not None and n.end > low:
            slots = self._slots_of(lease, n, c)
            parts.append(slots[max(0, low - n.start) // self.tree.page_size :])
            n = n.parent
        return joined(parts[::-1])

    def _borrow(self, lease: Lease, match: Match) -> None:
        """Give the lease the tree's own `Full` pages beyond its boundary, where only windows or
        states are missing: these tokens are computed again, but not stored again."""
        if match.device_full <= lease.boundary:
            return
        node = self.tree.node_at(match, match.device_full)
        self.tree.device.lock_path(node)
        lease.borrowed = node
        parts: list[Slots] = []
        n = node
        while n is not lease.node:
            slots = n.parts[0][0].slots
            assert slots is not None and n.parent is not None, n
            parts.append(slots)
            n = n.parent
        table = lease.pages(0)
        table.append(joined(parts[::-1]))
        table.owned_from = node.end // self.tree.page_size

    def return_borrowed(self, lease: Lease) -> None:
        """Let go of the pages beyond the boundary that the lease reads from the tree, if any."""
        if lease.borrowed is not None:
            self.tree.device.unlock_path(lease.borrowed)
            lease.borrowed = None

    def _slots_of(self, lease: Lease, node: Node, component: int) -> Slots:
        slots = node.parts[0][component].slots
        if slots is None:
            slots = next(
                p.dst
                for p in node.claims or ()
                if p.op is lease.loading and p.component == component
            )
        return slots

    def _load_ended(self, lease: Lease, ok: bool) -> None:
        """A lease's load-back was applied, or has failed: take over its pins, or mark it broken."""
        if not ok:
            lease.loading, lease.broken = None, True
            self.return_borrowed(lease)
            return
        reading = any(lease.states(c).read_locked for c in self.tree.need.points)
        lease.lock_start = self.tree.lock(lease.node, states=reading)
        self._repoint_loaded(lease)
        lease.loading = lease.ticket = None

    def _repoint_loaded(self, lease: Lease) -> None:
        """Use the tree's slots where somebody published the same pages while they were loaded."""
        n = lease.node
        while n.parent is not None:
            first, last = n.start // self.tree.page_size, n.end // self.tree.page_size
            for c in self._paged:
                table, slots = lease.pages(c), n.parts[0][c].slots
                low = max(first, table.first_page)
                if slots is not None and low < last:
                    table.replace(low, slots[low - first :])
            n = n.parent
        for c in self.tree.need.points:
            state, slots = lease.states(c), lease.node.parts[0][c].slots
            if state.read_locked and slots is not None:
                state.read = int(slots[0])
