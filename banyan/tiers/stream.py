"""The copy engine for CUDA pools: jobs run on a stream of their own, beside the compute stream.

Owns the stream and the jobs in flight; it has no thread. All methods, and `wait_layer` of its
tickets, are called from the thread that runs the model.

Before any copy the stream waits for the compute stream: a backup reads what the last forward wrote,
a load-back overwrites slots that an earlier forward may still read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from banyan.errors import CopyError, PoolError
from banyan.pools.assembler import PoolStack
from banyan.pools.lanes import Lane
from banyan.tiers import moves, staging, verify
from banyan.tiers.ops import CopyBlock, CopyDone, CopyJob, CopyKind, CopyTicket, OpId
from banyan.tiers.staging import LayerGroup, layer_groups


@dataclass(eq=False, slots=True)
class _Running:
    """A job whose copies are enqueued.

    Args:
        started, ended: timing events on the copy stream.
        ready: by layer, the event after which its bytes are in place.
        before: device digests of a verified backup, by block and lane.
    """

    job: CopyJob
    started: torch.cuda.Event
    ended: torch.cuda.Event
    ready: dict[int, torch.cuda.Event] = field(default_factory=dict)
    before: list[list[bytes]] = field(default_factory=list)
    settled: bool = False
    failure: str | None = None


class StreamTicket:
    """A reader's handle: its compute stream waits for a layer's event, the caller goes on.

    The wait for the last layer, and under verify for any layer, also blocks the caller until the
    job is settled, so that its completion is polled no later.
    """

    def __init__(self, engine: StreamCopyEngine, running: _Running) -> None:
        self._engine, self._running = engine, running
        self._last = max(running.ready, default=-1)

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for the bytes of `layer`.

        Raises:
            CopyError: the job failed.
        """
        running = self._running
        if running.failure is None and layer in running.ready and not running.settled:
            torch.cuda.current_stream(self._engine.device).wait_event(running.ready[layer])
            if layer == self._last or running.job.verify:
                self._engine.settle(running)
        if running.failure is not None and layer in running.ready:
            raise CopyError(f"layer {layer} was not loaded: {running.failure}")


class StreamCopyEngine:
    """Implements `CopyEngine` over CUDA pools and pinned host pools.

    Every job is enqueued when it is submitted, so none can be cancelled. Under verify, hashing
    makes `submit`, `poll` and `wait_layer` wait for the copy: that is the price of the mode.

    Args:
        stack: the pools; device pools on one CUDA device, host pools pinned.

    Raises:
        PoolError: a pool is not where it must be.
    """

    def __init__(self, stack: PoolStack) -> None:
        require_cuda(stack)
        self._stack = stack
        self.device = stack.device[0].device
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._running: list[_Running] = []
        self._done: list[CopyDone] = []
        self._closed = False

    def submit(self, job: CopyJob) -> CopyTicket:
        """Enqueue `job` on the copy stream, behind what the current stream has been given."""
        running = _Running(job, _timer(), _timer())
        if self._closed:
            self._fail(running, "cancelled")
            return StreamTicket(self, running)
        try:
            moves.check_job(self._stack, job)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._enqueue(running)
        except (PoolError, RuntimeError):  # a bad slot, or CUDA (out of memory): counted, a miss
            self._stream.synchronize()
            self._fail(running, "copy_error")
        else:
            self._running.append(running)
        return StreamTicket(self, running)

    def poll(self) -> list[CopyDone]:
        """Completions since the last call. Cost: one event query per running job."""
        for running in list(self._running):
            if running.ended.query():  # type: ignore[no-untyped-call]
                self.settle(running)
        done, self._done = self._done, []
        return done

    def cancel(self, op_id: OpId) -> bool:
        """False: a submitted job has started."""
        return False

    def close(self) -> None:
        """Wait for the running jobs and report them. Again: nothing."""
        self._closed = True
        for running in list(self._running):
            self.settle(running)

    def settle(self, running: _Running) -> None:
        """Wait for a job's copies, check them under verify, and post its completion, once."""
        if running.settled:
            return
        running.ended.synchronize()
        job, verdict = running.job, verify.Verdict()
        if job.verify and job.kind is CopyKind.BACKUP:
            verdict = verify.verify_backup(self._stack, job, running.before)
        elif job.verify:
            with torch.cuda.stream(self._stream):
                verdict = verify.verify_load_back(self._stack, job)
        running.settled = True
        running.failure = "checksum" if verdict.mismatched else None
        self._running.remove(running)
        self._done.append(
            CopyDone(
                job.op_id,
                ok=running.failure is None,
                reason=running.failure or "",
                seconds=running.started.elapsed_time(running.ended) / 1e3,
                moved_bytes=0 if running.failure else moves.job_bytes(self._stack, job),
                verified=verdict.verified,
                mismatched=verdict.mismatched,
            )
        )

    # ---- on the copy stream --------------------------------------------------------------------

    def _enqueue(self, running: _Running) -> None:
        job = running.job
        layers = moves.job_layers(self._stack, job)
        running.ready = dict.fromkeys(layers, running.ended)
        if job.kind is CopyKind.BACKUP:
            verify.forget_digests(self._stack, job)
            running.before = verify.source_digests(self._stack, job) if job.verify else []
        running.started.record(self._stream)
        if job.kind is CopyKind.BACKUP:
            for block in job.blocks:
                for lane in self._stack.written_lanes(block.component):
                    for src, dst in staging.chunks(block.src, block.dst, lane.host.record_bytes):
                        staging.backup_records(lane.device, lane.host, src, dst)
        else:
            self._load_back(running)
        running.ended.record(self._stream)

    def _load_back(self, running: _Running) -> None:
        """Enqueue groups in layer order; a layer's event follows the last of its groups."""
        pieces: list[tuple[CopyBlock, Lane, LayerGroup]] = []
        for block in running.job.blocks:
            for lane in self._stack.lanes[block.component]:
                groups = layer_groups(lane.host.layout, staging.PIECE_BYTES)
                pieces += [(block, lane, group) for group in groups]
        for block, lane, group in sorted(pieces, key=lambda piece: piece[2].layers[0]):
            for src, dst in staging.chunks(block.src, block.dst, group.nbytes):
                staging.load_group(lane.device, lane.host, group, src, dst)
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record(self._stream)
            running.ready.update(dict.fromkeys(group.layers, reached))

    def _fail(self, running: _Running, reason: str) -> None:
        running.settled, running.failure = True, reason
        running.ready = dict.fromkeys(moves.job_layers(self._stack, running.job), running.ended)
        self._done.append(CopyDone(running.job.op_id, ok=False, reason=reason))


def require_cuda(stack: PoolStack) -> None:
    """Refuse pools that a stream cannot serve asynchronously.

    Raises:
        PoolError: a device pool is not on CUDA, or a host pool is not pinned.
    """
    for lane in (lane for lanes in stack.lanes for lane in lanes):
        pinned = lane.host.data.is_pinned() or not lane.host.nbytes
        if lane.device.device.type != "cuda" or not pinned:
            raise PoolError(f"{lane.host.component.name}: needs CUDA and pinned host memory")


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
