"""What is asked after every operation: nothing from nowhere, right bytes, right matches.

Compares a `Rig` with the reference; what a step may publish, the driver says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from banyan.lease import Lease
from banyan.spec import Point
from banyan.tiers.ops import CopyDone
from banyan.tree import Tier, decode_tokens, encode_tokens
from tests.support.reference import TOKEN, Held, Mismatch, Place, Reference, survey
from tests.support.rig import Rig, WrongBytes, mixed, prefix_hashes


@lru_cache(maxsize=8192)
def hashes_of(prefix: bytes) -> np.ndarray:
    """`prefix_hashes` of a key."""
    return prefix_hashes(decode_tokens(prefix))


@dataclass(eq=False)
class Running:
    """A request: its lease, its tokens, the position of the state it keeps."""

    lease: Lease
    tokens: list[int]
    namespace: bytes
    kept: int | None = None


class Judge:
    """One cache under test beside its reference.

    Args:
        rig: whose cache is judged.
        source: chooses tokens and keys to ask for.
    """

    def __init__(self, rig: Rig, source: random.Random) -> None:
        self.rig, self.cache, self.source = rig, rig.cache, source
        self.page = rig.page_size
        self.width = len(rig.spec.components)
        self.points = [c for c, x in enumerate(rig.spec.components) if isinstance(x.reach, Point)]
        self.reference = Reference(rig.spec)
        self.running: list[Running] = []
        self.streams = [[source.randrange(3) for _ in range(60)] for _ in range(2)]
        self._listen()

    def _listen(self) -> None:
        """Hear what the engine reports, as the cache hears it."""
        real = self.rig.engine.poll

        def poll() -> list[CopyDone]:
            done = real()
            for one in done:
                self.reference.transfers[one.op_id].ok = one.ok
            return done

        self.rig.engine.poll = poll  # type: ignore[method-assign]

    def judge(self, offered: Held | None = None) -> None:
        """Compare everything; `offered` is what a commit in this step published.

        Raises:
            Mismatch, WrongBytes, InvariantError: naming what is wrong.
        """
        now = survey(self.cache.tree)
        for request in self.running:
            if request.lease.broken:
                self.reference.borrowers[request.lease].settled = False
        self.reference.note_jobs(self.rig.engine.submitted, now)
        nothing: Held = ([{} for _ in range(self.width)], [{} for _ in range(self.width)])
        operations = set(self.cache.controller.operations)
        fresh = self.reference.follow(now, offered or nothing, operations)
        for tier in Tier:
            for c in range(self.width):
                for place, slot in fresh[tier][c].items():
                    self._compare_bytes(tier, c, place, slot)
        self._tables_name_the_tree()
        self._minimal_protection()
        self._compare_matches()
        self.rig.check()

    def _compare_bytes(self, tier: Tier, component: int, place: Place, slot: int) -> None:
        """The record in `slot` is that of the prefix."""
        stack = self.rig.stack
        if tier is Tier.DEVICE:
            record = stack.device[component].read_records(np.array([slot], np.int32))[0]
        else:
            record = stack.host[component].data[slot].numpy()
        hashes = hashes_of(place[1])
        if component not in self.points:
            hashes = hashes[-self.page :]
        else:
            hashes = hashes[-1:]
        for layer, name, offset, nbytes in stack.device[component].layout.entries:
            width = nbytes // 4 // len(hashes)
            want = mixed(hashes, component, layer, name, width).tobytes()
            if record[offset : offset + nbytes].tobytes() != want:
                where = f"{tier.name} slot {slot} of component {component}, {layer}/{name}"
                raise WrongBytes(f"{where} is not of {decode_tokens(place[1])}")

    def _tables_name_the_tree(self) -> None:
        """What a request reads of the cache is in the slots where the cache has it (INV-02)."""
        for request in self.running:
            lease, borrower = request.lease, self.reference.borrowers[request.lease]
            if not borrower.settled or borrower.source is not None:
                continue
            for c, place in self.reference.needs(borrower):
                end = len(place[1]) // TOKEN
                if c in self.points:
                    named = lease.states(c).read
                else:
                    table = lease.pages(c)
                    if not table.first_page < end // self.page <= table.stop_page:
                        raise Mismatch(f"component {c} at {end} is needed and in no table")
                    named = int(table.slots[end // self.page - 1 - table.first_page])
                if self.reference.held[Tier.DEVICE][c][place] != named:
                    raise Mismatch(f"component {c} at {end} is read from slot {named}")

    def _minimal_protection(self) -> None:
        """INV-05: with no transfer running, locks cover what requests need and nothing else."""
        if self.cache.controller.operations or self.cache.tree.detached:
            return
        wanted: list[set[Place]] = [set() for _ in range(self.width)]
        for borrower in self.reference.borrowers.values():
            if borrower.settled:
                for c in range(self.width):
                    reach = borrower.published if c else borrower.present
                    for end in self.reference.needed(c, reach):
                        wanted[c].add((borrower.namespace, borrower.key[: end * TOKEN]))
        for c in range(self.width):
            if self.cache.tree.device.protected[c] > len(wanted[c]):
                raise Mismatch(
                    f"{self.cache.tree.device.protected[c]} slots of component {c} are locked "
                    f"where {len(wanted[c])} are needed"
                )
        if any(self.cache.tree.host.protected):
            raise Mismatch(f"host data is locked by nobody: {self.cache.tree.host.protected}")

    def _compare_matches(self) -> None:
        """A few keys of every kind: running requests', and prefixes of streams with some change."""
        keys = [(encode_tokens(r.tokens), r.namespace) for r in self.running[-2:]]
        for _ in range(3):
            tokens = list(self.source.choice(self.streams))
            at = self.source.randrange(len(tokens) + 1)
            keys.append((encode_tokens(tokens[:at] + [7] * self.source.randrange(4)), b""))
        parts = (*self.reference.held[0], *self.reference.held[1])
        held = [place for part in parts[:3] for place in part]
        if held:
            namespace, key = self.source.choice(held)
            keys.append((key + encode_tokens([0]), namespace))
        before = (self.cache.tree.epoch, self.cache.tree.tick)
        for key, namespace in keys:
            match = self.cache.match(key, namespace)
            got = (match.device_boundary, match.boundary, match.full_len, match.device_full)
            want = self.reference.answer(key, namespace)
            if got != want:
                raise Mismatch(f"match of {decode_tokens(key)}: {got}, the reference says {want}")
        if before != (self.cache.tree.epoch, self.cache.tree.tick):
            raise Mismatch("a match changed the tree")
