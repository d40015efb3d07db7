"""Whether the bytes that arrived are the bytes that left: SHA-256 of records on both tiers.

Owns the digests of a verified job. Knows no thread and no tree; whoever calls it owns the job's
slots meanwhile. May be called from any thread; hashing releases the GIL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from banyan.pools.assembler import PoolStack
from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool
from banyan.pools.lanes import Lane
from banyan.tiers.ops import CopyBlock, CopyJob, Slots

_HASH_BYTES = 8 << 20
"""Device bytes gathered at a time for hashing: bounds the temporary copy."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many records were compared by SHA-256, and how many of them differed."""

    verified: int = 0
    mismatched: int = 0


def device_digests(pool: DevicePool, slots: Slots) -> list[bytes]:
    """SHA-256 of each slot's record as the device holds it. Cost: a gather and a hash per byte."""
    return [digest for part in _parts(pool, slots) for digest in _digests(pool.read_records(part))]


def host_digests(pool: HostPool, slots: Slots) -> list[bytes]:
    """SHA-256 of each slot's record as the host holds it. Cost: a hash per byte, no copy."""
    data: npt.NDArray[np.uint8] = pool.data.numpy()
    return [hashlib.sha256(data[slot]).digest() for slot in slots]


def source_digests(stack: PoolStack, job: CopyJob) -> list[list[bytes]]:
    """Digests a verified backup takes on device before any byte moves, by block and lane."""
    return [device_digests(lane.device, b.src) for b, lane in _lane_blocks(stack, job)]


def verify_backup(stack: PoolStack, job: CopyJob, before: list[list[bytes]]) -> Verdict:
    """Hash the host records just written, compare with `before`, and keep the equal ones.

    A record that another rank writes may not be there yet, so nothing is compared: `before` is kept
    as it is, and a load-back finds out whether all ranks had the same bytes.

    Mutates: `digests` of the host pools, at the job's slots: None where the record differs.
    """
    verified = mismatched = 0
    for (block, lane), expected in zip(_lane_blocks(stack, job), before, strict=True):
        digests = lane.host.digests
        found = host_digests(lane.host, block.dst) if lane.writes else expected
        for slot, want, have in zip(block.dst.tolist(), expected, found, strict=True):
            digests[slot] = have if have == want else None
            mismatched += have != want
        verified += len(found) if lane.writes else 0
    return Verdict(verified, mismatched)


def verify_load_back(stack: PoolStack, job: CopyJob) -> Verdict:
    """Hash the device records just written and compare with the digests of their backup.

    A record backed up without verify has no digest; its host bytes are hashed now instead.
    """
    verified = mismatched = 0
    for block, lane in _lane_blocks(stack, job):
        found = device_digests(lane.device, block.dst)
        wanted = _kept_digests(lane.host, block.src)
        mismatched += sum(have != want for have, want in zip(found, wanted, strict=True))
        verified += len(found)
    return Verdict(verified, mismatched)


def forget_digests(stack: PoolStack, job: CopyJob) -> None:
    """Drop the digests of host slots about to be overwritten: they describe older bytes."""
    for block, lane in _lane_blocks(stack, job):
        digests = lane.host.digests
        for slot in block.dst.tolist():
            digests[slot] = None


def _lane_blocks(stack: PoolStack, job: CopyJob) -> Iterator[tuple[CopyBlock, Lane]]:
    """The job's records: each block, once per lane of its component."""
    return ((b, lane) for b in job.blocks for lane in stack.lanes[b.component])


def _kept_digests(pool: HostPool, slots: Slots) -> Iterator[bytes]:
    """The digest of each slot's backup, or of its host bytes now where there is none."""
    for index, slot in enumerate(slots.tolist()):
        kept = pool.digests[slot]
        yield host_digests(pool, slots[index : index + 1])[0] if kept is None else kept


def _parts(pool: DevicePool, slots: Slots) -> Iterator[Slots]:
    step = max(1, _HASH_BYTES // max(1, pool.record_bytes))
    for start in range(0, len(slots), step):
        yield slots[start : start + step]


def _digests(records: npt.NDArray[np.uint8]) -> list[bytes]:
    return [hashlib.sha256(record).digest() for record in records]
