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
from banyan.tiers.ops import CopyJob, Slots

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
    """Digests a verified backup takes on device before any byte moves, by block."""
    return [device_digests(stack.device[b.component], b.src) for b in job.blocks]


def verify_backup(stack: PoolStack, job: CopyJob, before: list[list[bytes]]) -> Verdict:
    """Hash the host records just written, compare with `before`, and keep the equal ones.

    Mutates: `digests` of the host pools, at the job's slots: None where the record differs.
    """
    verified = mismatched = 0
    for block, expected in zip(job.blocks, before, strict=True):
        pool = stack.host[block.component]
        found = host_digests(pool, block.dst)
        for slot, want, have in zip(block.dst.tolist(), expected, found, strict=True):
            pool.digests[slot] = have if have == want else None
            mismatched += have != want
        verified += len(found)
    return Verdict(verified, mismatched)


def verify_load_back(stack: PoolStack, job: CopyJob) -> Verdict:
    """Hash the device records just written and compare with the digests of their backup.

    A record backed up without verify has no digest; its host bytes are hashed now instead.
    """
    verified = mismatched = 0
    for block in job.blocks:
        host = stack.host[block.component]
        found = device_digests(stack.device[block.component], block.dst)
        for index, have in enumerate(found):
            want = host.digests[int(block.src[index])]
            if want is None:
                want = host_digests(host, block.src[index : index + 1])[0]
            mismatched += have != want
        verified += len(found)
    return Verdict(verified, mismatched)


def forget_digests(stack: PoolStack, job: CopyJob) -> None:
    """Drop the digests of host slots about to be overwritten: they describe older bytes."""
    for block in job.blocks:
        digests = stack.host[block.component].digests
        for slot in block.dst.tolist():
            digests[slot] = None


def _parts(pool: DevicePool, slots: Slots) -> Iterator[Slots]:
    step = max(1, _HASH_BYTES // max(1, pool.record_bytes))
    for start in range(0, len(slots), step):
        yield slots[start : start + step]


def _digests(records: npt.NDArray[np.uint8]) -> list[bytes]:
    return [hashlib.sha256(record).digest() for record in records]
