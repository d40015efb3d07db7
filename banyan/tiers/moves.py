"""The bytes of a copy job, moved and checked: pure functions of pools and slots.

Owns how records are gathered and scattered between CPU pools. Knows no thread, no queue and no
tree; whoever calls it owns the job's slots on both sides meanwhile. May be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from banyan.errors import PoolError
from banyan.pools.assembler import PoolStack
from banyan.pools.device import DevicePool
from banyan.pools.host import HostPool
from banyan.tiers import verify
from banyan.tiers.ops import CopyBlock, CopyJob, CopyKind, Slots

_RUN_BYTES = 32768
"""From this many bytes a run on, one strided call per run beats one indexed call per buffer: a call
costs 0.8 us, and indexing scattered slots writes every byte twice (benchmarks/copies.py)."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which slot goes to which, prepared once per block for all its layers.

    Args:
        take, put: the slots on either side; a slice where they are consecutive.
        count: slots.
        runs: (source, destination, length) of the runs that are consecutive on both sides.
    """

    take: slice | Slots
    put: slice | Slots
    count: int
    runs: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(src: Slots, dst: Slots) -> Pairing:
        """Pair `src[i]` with `dst[i]`. Cost: O(n) in C, and a tuple per run."""
        ahead, behind = np.diff(src) == 1, np.diff(dst) == 1
        breaks = (np.flatnonzero(~(ahead & behind)) + 1).tolist()
        starts = [0, *breaks] if len(src) else []
        stops = [*breaks, len(src)]
        runs = tuple((int(src[a]), int(dst[a]), b - a) for a, b in zip(starts, stops, strict=False))
        return Pairing(_selection(src, ahead), _selection(dst, behind), len(src), runs)


def _selection(slots: Slots, steps: npt.NDArray[np.bool_]) -> slice | Slots:
    """A slice where all slots are consecutive: indexing with it makes no temporary copy."""
    if len(slots) and steps.all():
        return slice(int(slots[0]), int(slots[0]) + len(slots))
    return slots


def job_layers(stack: PoolStack, job: CopyJob) -> tuple[int, ...]:
    """Layers whose bytes the job moves, ascending."""
    parts = (stack.spec.components[b.component].layers for b in job.blocks if len(b.src))
    return tuple(sorted({layer for layers in parts for layer in layers}))


def job_bytes(stack: PoolStack, job: CopyJob) -> int:
    """Bytes that this rank writes on the destination tier."""
    if job.kind is CopyKind.LOAD_BACK:
        return sum(len(b.dst) * stack.device[b.component].record_bytes for b in job.blocks)
    return sum(
        len(b.dst) * lane.host.record_bytes
        for b in job.blocks
        for lane in stack.written_lanes(b.component)
    )


def check_job(stack: PoolStack, job: CopyJob) -> None:
    """Refuse a job whose slots are not in the pools, before any byte moves.

    Raises:
        PoolError: unknown component, no host tier, unequal lengths, or a slot out of range.
    """
    for block in job.blocks:
        if not 0 <= block.component < len(stack.host):
            raise PoolError(f"copy {job.op_id}: no host pool for component {block.component}")
        if len(block.src) != len(block.dst):
            raise PoolError(f"copy {job.op_id}: {len(block.src)} slots to {len(block.dst)}")
        device, host = (
            (block.src, block.dst) if job.kind is CopyKind.BACKUP else (block.dst, block.src)
        )
        limits = (stack.device[block.component].slots, stack.host[block.component].slots)
        for tier, slots, limit in zip(("device", "host"), (device, host), limits, strict=True):
            if len(slots) and (slots.min() < 0 or slots.max() >= limit):
                raise PoolError(f"copy {job.op_id}: {tier} slots outside 0..{limit - 1}")


@dataclass(frozen=True, slots=True)
class _StripView:
    """The same strip of buffers on both sides, as numpy views of the pools' own memory.

    Args:
        device: uint8[buffers, slots, nbytes]. host: uint8[buffers, slots, nbytes], strided.
        device_items, host_items: void[buffers, slots], one item per buffer and slot.
    """

    device: npt.NDArray[np.uint8]
    host: npt.NDArray[np.uint8]
    device_items: npt.NDArray[np.void]
    host_items: npt.NDArray[np.void]

    def part(self, start: int, stop: int) -> _StripView:
        """The strip of some of the buffers."""
        return _StripView(
            self.device[start:stop],
            self.host[start:stop],
            self.device_items[start:stop],
            self.host_items[start:stop],
        )


class PoolMover:
    """Copies slots between one CPU device pool and its host pool.

    Views are made here once. A run that is consecutive on both sides moves in one strided call
    for all its buffers, at the speed of a plain copy; short runs of small entries move in one
    indexed call per buffer instead of one Python step per slot. NumPy is used because it copies on
    the calling thread alone and without the GIL: torch would start its own team of threads
    beside the model's.

    Args:
        device: a pool on CPU.
        host: the pool of the same buffers.
        writes: False where another rank writes the host pool; then nothing here can.

    Raises:
        PoolError: the device pool is not on CPU.
    """

    def __init__(self, device: DevicePool, host: HostPool, *, writes: bool = True) -> None:
        if device.device.type != "cpu":
            raise PoolError(f"{device.component.name}: this mover needs a CPU pool")
        data: npt.NDArray[np.uint8] = host.data.numpy()
        self.layers, self.writes = host.layout.layers, writes
        self._views: list[_StripView] = []
        self._by_layer: dict[int, list[_StripView]] = {layer: [] for layer in self.layers}
        for strip, stack in zip(host.layout.strips, device.stacks, strict=True):
            if strip.nbytes == 0:
                continue
            on_host = np.lib.stride_tricks.as_strided(
                data[:, strip.offset :],
                (len(strip.buffers), host.slots, strip.nbytes),
                (strip.step, host.record_bytes, 1),
                writeable=writes,
            )
            on_device: npt.NDArray[np.uint8] = stack.numpy()
            view = _StripView(on_device, on_host, _items(on_device), _items(on_host))
            self._views.append(view)
            for layer in self.layers:
                start, stop = strip.layer_range(layer)
                if stop > start:
                    self._by_layer[layer].append(view.part(start, stop))

    def backup(self, pairing: Pairing) -> None:
        """Copy all layers, device to host."""
        for view in self._views:
            _move(view.device, view.host, view.device_items, view.host_items, pairing)

    def load_layer(self, layer: int, pairing: Pairing) -> None:
        """Copy one layer, host to device; nothing if the component owns none of it."""
        for view in self._by_layer.get(layer, ()):
            _move(view.host, view.device, view.host_items, view.device_items, pairing)


def _items(strip: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """void[buffers, slots]: each slot's bytes as one item, without a copy."""
    items: npt.NDArray[np.void] = strip.view(f"V{strip.shape[2]}")[:, :, 0]
    return items


def _move(
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    source_items: npt.NDArray[np.void],
    target_items: npt.NDArray[np.void],
    pairing: Pairing,
) -> None:
    """Copy `[buffers, slots, nbytes]` from slots to slots, by runs or by index."""
    buffers, _, nbytes = source.shape
    calls = len(pairing.runs)
    if calls <= buffers or buffers * nbytes * pairing.count >= _RUN_BYTES * calls:
        for first, to, length in pairing.runs:
            target[:, to : to + length] = source[:, first : first + length]
        return
    for index in range(buffers):
        target_items[index][pairing.put] = source_items[index][pairing.take]


class StackMover:
    """Runs whole copy jobs between the pools of a stack on CPU, on the calling thread.

    A backup leaves out the lanes that another rank writes; a load-back reads them all.

    Raises:
        PoolError: a device pool is not on CPU.
    """

    def __init__(self, stack: PoolStack) -> None:
        self._stack = stack
        every = [[PoolMover(x.device, x.host, writes=x.writes) for x in own] for own in stack.lanes]
        self._movers = {
            CopyKind.LOAD_BACK: every,
            CopyKind.BACKUP: [[mover for mover in movers if mover.writes] for movers in every],
        }

    def backup(self, job: CopyJob) -> verify.Verdict:
        """Copy all blocks, all layers, device to host; hash both sides if the job says so.

        Raises:
            PoolError: the job's slots are not in the pools; nothing moved.

        Mutates: the host records and digests at the blocks' `dst`.
        """
        check_job(self._stack, job)
        verify.forget_digests(self._stack, job)
        before = verify.source_digests(self._stack, job) if job.verify else []
        for mover, pairing in self._pairs(job):
            mover.backup(pairing)
        return verify.verify_backup(self._stack, job, before) if job.verify else verify.Verdict()

    def load_back(self, job: CopyJob, on_layer: Callable[[int], None]) -> verify.Verdict:
        """Copy all blocks layer by layer, host to device, then hash if the job says so.

        Args:
            on_layer: told of each layer of `job_layers` once its bytes are in place, ascending.

        Raises:
            PoolError: the job's slots are not in the pools; nothing moved.

        Mutates: the device buffers at the blocks' `dst`.
        """
        check_job(self._stack, job)
        pairs = self._pairs(job)
        for layer in job_layers(self._stack, job):
            for mover, pairing in pairs:
                mover.load_layer(layer, pairing)
            on_layer(layer)
        return verify.verify_load_back(self._stack, job) if job.verify else verify.Verdict()

    def _pairs(self, job: CopyJob) -> list[tuple[PoolMover, Pairing]]:
        """One pairing per component, for each lane: runs go on across the blocks of a path."""
        parts: dict[int, list[CopyBlock]] = {}
        for block in job.blocks:
            if len(block.src):
                parts.setdefault(block.component, []).append(block)
        pairs: list[tuple[PoolMover, Pairing]] = []
        for component, blocks in parts.items():
            src = np.concatenate([b.src for b in blocks])
            pairing = Pairing.of(src, np.concatenate([b.dst for b in blocks]))
            pairs += [(mover, pairing) for mover in self._movers[job.kind][component]]
        return pairs
