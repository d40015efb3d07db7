"""How ranks talk: `torch.distributed` behind the `Fabric` of `banyan.ranks`.

Owns the control group (gloo, on CPU, apart from the group that the model's own collectives use) and
its buffers. Knows no cache and no scheduler. Everything is sent by way of rank 0: on two busy cores
sixteen ranks take 3 ms for a report and its answer that way, 30 ms in gloo's all-reduce, whose ring
waits for thirty processes in turn (`benchmarks/ranks.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from banyan.errors import ConfigError, RankLostError
from banyan.ranks import Words

PATIENCE_S = 120.0
"""The longest that one rank waits for another: a forward pass, or a load of files, is shorter."""

START_PATIENCE_S = 1800.0
"""The same while models are loaded."""

_INLINE_BYTES = 4088
_HEAD = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this process is, and where it meets the others.

    Args:
        rank, ranks: this one's number, and how many there are.
        local_rank: its number on its own node: the index of its CUDA device.
        address: `host:port` of rank 0's store.
        alone: whether the process was started as one rank by somebody else, such as `torchrun`,
            who starts the others too.
    """

    rank: int
    ranks: int
    local_rank: int
    address: str
    alone: bool = False


def place_from_environment(ranks: int) -> Place | None:
    """The place that the usual rendezvous variables give this process; None without them.

    Reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, and `LOCAL_RANK` where it is set.

    Raises:
        ConfigError: only some of them are set, or they disagree with `--tp`.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if "RANK" not in found:
        return None
    lacking = [name for name in names if name not in found]
    if lacking:
        raise ConfigError("--tp", f"RANK is set, but not {', '.join(lacking)}", "Set all, or none")
    if int(found["WORLD_SIZE"]) != ranks:
        raise ConfigError(
            "--tp",
            f"{ranks} ranks, but WORLD_SIZE is {found['WORLD_SIZE']}",
            f"Write --tp {found['WORLD_SIZE']}",
        )
    address = f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}"
    rank = int(found["RANK"])
    return Place(rank, ranks, int(os.environ.get("LOCAL_RANK", rank)), address, alone=True)


def open_store(ranks: int) -> tuple[Any, str]:
    """A store for ranks of this machine, on a free port; its address. Called by rank 0."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = timedelta(seconds=START_PATIENCE_S)
    store = TCPStore("127.0.0.1", 0, ranks, True, patience, wait_for_workers=False)
    return store, f"127.0.0.1:{store.port}"


def join(place: Place, store: Any = None, device: str = "cpu") -> TorchFabric:
    """Meet the other ranks: initialises `torch.distributed` in this process.

    Args:
        store: rank 0's own, where it has opened one; the others connect to `place.address`.
        device: `cuda` makes the model's collectives nccl's.

    Raises:
        RankLostError: the others did not come in time.
    """
    host, _, port = place.address.rpartition(":")
    patience = timedelta(seconds=START_PATIENCE_S)
    if host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if store is None:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun has its own
            lead = place.rank == 0 and not agent
            store = TCPStore(host, int(port), place.ranks, lead, patience, not lead)
        if device == "cuda":
            torch.cuda.set_device(place.local_rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    except (RuntimeError, dist.DistError) as error:
        raise RankLostError(f"rank {place.rank} could not meet the others: {error}") from error
    return TorchFabric(place, group, store)


class TorchFabric:
    """Implements `banyan.ranks.Fabric` over a process group.

    Args:
        group: of gloo, with all ranks.
        store: where ranks meet while they start.
    """

    def __init__(self, place: Place, group: Any, store: Any) -> None:
        self.rank, self.size = place.rank, place.ranks
        self._group, self._store = group, store
        self._frame = torch.zeros(_HEAD + _INLINE_BYTES, dtype=torch.uint8)

    def wait_for_all(self, what: str) -> None:
        """Return when every rank has called this with the same `what`; for slow starts.

        Raises:
            RankLostError: one has not, in `START_PATIENCE_S`.
        """
        self._store.set(f"{what}/{self.rank}", "1")
        try:
            self._store.wait(
                [f"{what}/{rank}" for rank in range(self.size)],
                timedelta(seconds=START_PATIENCE_S),
            )
        except (RuntimeError, dist.DistError) as error:
            raise RankLostError(f"rank {self.rank} waited for {what!r} in vain: {error}") from error

    def collect(self, words: Words) -> list[Words] | None:
        """See `Fabric.collect`."""
        own = torch.from_numpy(words)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        self._call(lambda: dist.gather(own, parts, 0, self._group))
        return None if parts is None else [part.numpy() for part in parts]

    def broadcast(self, message: bytes | None) -> bytes:
        """See `Fabric.broadcast`. Cost: one collective up to `_INLINE_BYTES`, else two."""
        frame = self._frame
        if message is not None:
            head = message[:_INLINE_BYTES]
            frame[:_HEAD] = torch.from_numpy(_length(len(message)))
            frame[_HEAD : _HEAD + len(head)] = _bytes(head)
        self._call(lambda: dist.broadcast(frame, 0, self._group))
        size = int(frame[:_HEAD].numpy().view(np.int64)[0])
        if size <= _INLINE_BYTES:
            return message if message is not None else frame[_HEAD : _HEAD + size].numpy().tobytes()
        rest = torch.empty(size, dtype=torch.uint8) if message is None else _bytes(message)
        self._call(lambda: dist.broadcast(rest, 0, self._group))
        return message if message is not None else rest.numpy().tobytes()

    def gather(self, part: bytes) -> list[bytes]:
        """See `Fabric.gather`. Cost: four collectives; for what is rare."""
        sizes = self.collect(np.array([len(part)], np.int64))
        told = self.broadcast(None if sizes is None else np.concatenate(sizes).tobytes())
        lengths = np.frombuffer(told, np.int64)
        padded = np.zeros(-(-int(lengths.max(initial=0)) // 8), np.int64)
        padded.view(np.uint8)[: len(part)] = np.frombuffer(part, np.uint8)
        parts = self.collect(padded)
        whole = self.broadcast(None if parts is None else b"".join(p.tobytes() for p in parts))
        step = padded.nbytes
        return [whole[r * step : r * step + int(n)] for r, n in enumerate(lengths)]

    def close(self) -> None:
        """Leave the group; the others may be gone already."""
        dist.destroy_process_group()

    def _call(self, collective: Any) -> None:
        try:
            collective()
        except (RuntimeError, dist.DistError) as error:
            raise RankLostError(f"rank {self.rank} lost touch with the others: {error}") from error


def _length(size: int) -> np.ndarray:
    return np.array([size], np.int64).view(np.uint8)


def _bytes(message: bytes) -> torch.Tensor:
    if not message:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
