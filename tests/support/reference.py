"""A slow reference cache of plain dictionaries, run beside the real one.

It knows a place in a prefix as (namespace, key bytes up to it), and per tier and component which
places are held in which slot. It answers matches by brute force from the definition of reach, and
follows the real tree from snapshot to snapshot: whatever appears must have been committed or
copied there, whatever is needed by a request or a transfer must stay, nothing may change its slot.
It shares no code with what it judges but the key encoding and the shape of a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from banyan.spec import CacheSpec, Full, Point, Window
from banyan.tiers.ops import CopyJob, CopyKind
from banyan.tree import Tier, Tree

Place = tuple[bytes, bytes]
"""(namespace, key bytes up to the end of the page, or up to the state)."""
Held = tuple[list[dict[Place, int]], list[dict[Place, int]]]
"""By tier and component: place to slot."""

TOKEN = 4


class Mismatch(AssertionError):
    """The real cache did what the reference rules out."""


def survey(tree: Tree) -> Held:
    """What can be found from the roots, read off the nodes one by one. Cost: O(pages)."""
    held: Held = ([{} for _ in range(tree.width)], [{} for _ in range(tree.width)])
    page_bytes = tree.page_size * TOKEN
    for namespace, root in tree.roots.items():
        stack = [(child, b"") for child in root.children.values()]
        while stack:
            node, above = stack.pop()
            prefix = above + node.edge
            stack += [(child, prefix) for child in node.children.values()]
            for tier in Tier:
                for c, part in enumerate(node.parts[tier]):
                    slots = part.slots
                    if slots is None:
                        continue
                    ends = [len(prefix)]
                    if not isinstance(tree.spec.components[c].reach, Point):
                        ends = list(range(len(above) + page_bytes, len(prefix) + 1, page_bytes))
                    for end, slot in zip(ends, slots.tolist(), strict=True):
                        held[tier][c][namespace, prefix[:end]] = slot
    return held


@dataclass
class Borrower:
    """A running request as the reference sees it: positions in tokens.

    Args:
        published: up to where its data is the tree's.
        keeps_from: by component, the first position that later tokens still need.
        reads_state: whether its next forward pass starts from the tree's state at `published`.
        present: tokens whose `Full` data the tree has for it, at least `published`.
        source: operation that loads what it stands on, None once the tree has it.
        settled: False when nothing of it is in the matchable tree: the cache was flushed
            under it, or its load-back failed.
    """

    namespace: bytes
    key: bytes
    published: int
    keeps_from: list[int]
    reads_state: bool
    present: int = 0
    source: int | None = None
    settled: bool = True


@dataclass
class Transfer:
    """A copy: from where to where, by component, worked out from its job when submitted."""

    kind: CopyKind
    places: list[dict[Place, int]]
    stale: bool = False
    ok: bool | None = None
    applied: bool = False


class Reference:
    """Follows one cache.

    Args:
        spec: of the cache followed.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.page = spec.page_size
        width = len(spec.components)
        self.held: Held = ([{} for _ in range(width)], [{} for _ in range(width)])
        self.borrowers: dict[object, Borrower] = {}
        self.transfers: dict[int, Transfer] = {}
        self._seen_jobs = 0
        self._needed: dict[tuple[int, int], tuple[int, ...]] = {}

    # ---- the definition of reach -----------------------------------------------------------------

    def needed(self, component: int, boundary: int) -> tuple[int, ...]:
        """Ends (tokens) of the pages, or the state, without which `boundary` cannot be resumed."""
        known = self._needed.get((component, boundary))
        if known is None:
            known = tuple(self._work_out(component, boundary))
            self._needed[component, boundary] = known
        return known

    def _work_out(self, component: int, boundary: int) -> list[int]:
        """The token at `boundary` looks back as far as its reach goes: in which pages is that?"""
        match self.spec.components[component].reach:
            case Full():
                positions = range(boundary)
            case Window(size):
                positions = range(max(0, boundary - (size - 1)), boundary)
            case _:
                return [boundary] if boundary else []
        return sorted({(at // self.page + 1) * self.page for at in positions})

    def covered(
        self, prefixes: dict[int, Place], component: int, boundary: int, tiers: tuple[Tier, ...]
    ) -> bool:
        """Whether `boundary` has on one of `tiers` all that it needs of a component."""
        parts = [self.held[tier][component] for tier in tiers]
        return all(
            any(prefixes[end] in part for part in parts) for end in self.needed(component, boundary)
        )

    def answer(self, key: bytes, namespace: bytes) -> tuple[int, int, int, int]:
        """(device boundary, boundary, full length, the same on device) that a match must give.

        Cost: O(len^2).
        """
        most = max(0, len(key) // TOKEN - 1) // self.page * self.page
        candidates = range(most, -1, -self.page)
        prefixes = {end: (namespace, key[: end * TOKEN]) for end in candidates}
        both, device = (Tier.DEVICE, Tier.HOST), (Tier.DEVICE,)
        every = tuple(reversed(range(len(self.spec.components))))  # the rarest first

        def best(components: Iterable[int], tiers: tuple[Tier, ...]) -> int:
            for b in candidates:
                if all(self.covered(prefixes, c, b, tiers) for c in components):
                    return b
            return 0

        return best(every, device), best(every, both), best((0,), both), best((0,), device)

    # ---- requests --------------------------------------------------------------------------------

    def borrow(
        self, lease: object, key: bytes, namespace: bytes, at: int, present: int, op: int | None
    ) -> None:
        """A lease was granted at `at` tokens, with `Full` data of `present`; `op` loads what it
        needs, if anything does."""
        starts = [min(self.needed(c, at), default=at) for c in range(len(self.spec.components))]
        self.borrowers[lease] = Borrower(namespace, key, at, starts, at > 0, max(at, present), op)

    def move(self, lease: object, key: bytes, to: int, reads_state: bool) -> None:
        """A commit has published up to `to` tokens."""
        borrower = self.borrowers[lease]
        borrower.key, borrower.published, borrower.reads_state = key, to, reads_state
        borrower.present = max(borrower.present, to)
        for c in range(len(self.spec.components)):
            borrower.keeps_from[c] = min(self.needed(c, to), default=to)

    def slide(self, lease: object, length: int, component: int, first: int) -> None:
        """A request at `length` tokens keeps pages from the one that ends at `first` on.

        Raises:
            Mismatch: it has let go of one that its next token needs.
        """
        borrower = self.borrowers[lease]
        whole = length // self.page * self.page
        if first > min(self.needed(component, whole), default=whole + self.page):
            raise Mismatch(f"at {length} tokens the pages before {first} are still needed")
        borrower.keeps_from[component] = max(borrower.keeps_from[component], first)

    def needs(self, borrower: Borrower) -> Iterator[tuple[int, Place]]:
        """(component, place) of all the tree must keep on device for this request."""
        for c, component in enumerate(self.spec.components):
            if isinstance(component.reach, Point) and not borrower.reads_state:
                continue
            reach = borrower.published if c else borrower.present
            for end in self.needed(c, reach):
                if end >= borrower.keeps_from[c]:
                    yield c, (borrower.namespace, borrower.key[: end * TOKEN])

    # ---- transfers -------------------------------------------------------------------------------

    def note_jobs(self, jobs: list[CopyJob], now: Held) -> None:
        """Work out, from slots alone, which places the jobs submitted in this step will copy."""
        for job in jobs[self._seen_jobs :]:
            source = Tier.DEVICE if job.kind is CopyKind.BACKUP else Tier.HOST
            places: list[dict[Place, int]] = [{} for _ in self.spec.components]
            for block in job.blocks:
                owner = {slot: place for place, slot in now[source][block.component].items()}
                for src, dst in zip(block.src.tolist(), block.dst.tolist(), strict=True):
                    if src not in owner:
                        raise Mismatch(f"{job.kind} {job.op_id} reads slot {src}: whose is it?")
                    places[block.component][owner[src]] = dst
            self.transfers[job.op_id] = Transfer(job.kind, places)
        self._seen_jobs = len(jobs)

    def flush(self) -> None:
        """Everything is forgotten: nothing of before may come back."""
        for borrower in self.borrowers.values():
            borrower.settled = False
        for transfer in self.transfers.values():
            transfer.stale = True

    # ---- from snapshot to snapshot ---------------------------------------------------------------

    def follow(self, now: Held, published: Held, running: set[int]) -> Held:
        """Compare `now` with the last snapshot; returns what is new.

        Args:
            published: what a commit in this step offered, on device.
            running: ids of the operations not applied yet.

        Raises:
            Mismatch: naming the place.
        """
        allowed: Held = tuple([dict(part) for part in tier] for tier in published)  # type: ignore[assignment]
        for op_id, transfer in list(self.transfers.items()):
            target = Tier.HOST if transfer.kind is CopyKind.BACKUP else Tier.DEVICE
            if op_id not in running:
                del self.transfers[op_id]
                if transfer.ok and not transfer.stale:
                    for c, places in enumerate(transfer.places):
                        allowed[target][c].update(places)
        fresh = self._appeared(now, allowed)
        self.held = now
        self._kept(running)
        return fresh

    def _appeared(self, now: Held, allowed: Held) -> Held:
        width = len(self.spec.components)
        fresh: Held = ([{} for _ in range(width)], [{} for _ in range(width)])
        for tier in Tier:
            for c in range(width):
                before, name = self.held[tier][c], f"{tier.name} {self.spec.components[c].name}"
                for place, slot in now[tier][c].items():
                    if place not in before:
                        fresh[tier][c][place] = slot
                        if allowed[tier][c].get(place) != slot:
                            raise Mismatch(f"{name} at {_at(place)} in slot {slot}: from nowhere")
                    elif before[place] != slot:
                        raise Mismatch(f"{name} at {_at(place)} moved to slot {slot}")
        return fresh

    def _kept(self, running: set[int]) -> None:
        """What requests stand on and transfers read is still there."""
        for borrower in self.borrowers.values():
            if not borrower.settled:
                continue
            if borrower.source is not None and borrower.source not in running:
                borrower.source = None
            coming = self.transfers[borrower.source].places if borrower.source else None
            for c, place in self.needs(borrower):
                if place not in self.held[0][c] and (coming is None or place not in coming[c]):
                    name = self.spec.components[c].name
                    raise Mismatch(f"{name} at {_at(place)} gone under a running request")
        for op_id, transfer in self.transfers.items():
            source = Tier.DEVICE if transfer.kind is CopyKind.BACKUP else Tier.HOST
            for c, places in enumerate(transfer.places):
                if not transfer.stale and not places.keys() <= self.held[source][c].keys():
                    raise Mismatch(f"operation {op_id}: its source was evicted under it")


def _at(place: Place) -> str:
    return f"{place[0]!r}[:{len(place[1]) // TOKEN}]"
