"""Host memory that all ranks of a node map, for bytes that are equal on every one of them.

Owns the mapping and how it is handed on. Knows no record, no slot and no collective: the caller
brings the one exchange of a few bytes. Nothing here is locked. One rank writes; when another may
read is agreed elsewhere, by applying a backup only when all ranks have finished theirs.

The memory is a memfd: it has no name in any file system, and the kernel frees it when the last
process that maps it is gone, however that ends. The other ranks open it through the writer's
`/proc/<pid>/fd/<fd>`, so ranks that share must see one another's processes.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from banyan.errors import PoolError

Exchange = Callable[[bytes | None], bytes]
"""Called by every rank of the node in the same order: the writer's bytes, returned to all. The
others pass None."""

_PREFIX = "banyan-host-"


class HostSharing(Protocol):
    """Where a rank gets the host memory that all ranks of its node share.

    Attributes:
        writes: True on the one rank that backs up into it.
    """

    writes: bool

    def allocate(self, name: str, nbytes: int) -> Tensor:
        """The same zeroed memory on every rank. Every rank asks for the same, in the same order.

        Returns:
            uint8[nbytes] on CPU.

        Raises:
            PoolError: it cannot be had, on this rank or on the one that writes.
        """


class SharedHost:
    """Implements `HostSharing` over one memfd per allocation.

    Args:
        exchange: hands the writer's bytes to all; see `Exchange`. One call per allocation.
        writes: whether this rank is the writer, usually the lowest on its node.
        pin: page-lock the memory, for copies from and to a CUDA device.

    Attributes:
        nbytes: bytes allocated so far, equal on all ranks and there once.
    """

    def __init__(self, exchange: Exchange, *, writes: bool, pin: bool = False) -> None:
        self.writes, self.nbytes = writes, 0
        self._exchange, self._pin = exchange, pin
        self._held: list[int] = []
        self._pinned: list[Tensor] = []

    def allocate(self, name: str, nbytes: int) -> Tensor:
        """See `HostSharing.allocate`. Cost: the writer takes all pages at once, as for zeros."""
        if nbytes <= 0:
            raise PoolError(f"shared host memory {name!r}: {nbytes} bytes cannot be shared")
        memory = self._create(name, nbytes) if self.writes else self._attach(name, nbytes)
        if self._pin:
            _page_lock(memory)
            self._pinned.append(memory)
        self.nbytes += nbytes
        return memory

    def close(self) -> None:
        """Let go of the descriptors: nobody can attach any more. What is mapped stays. Again:
        nothing."""
        for memory in self._pinned:
            _check_cuda(_cudart().cudaHostUnregister(memory.data_ptr()))
        for fd in self._held:
            os.close(fd)
        self._pinned.clear()
        self._held.clear()

    def _create(self, name: str, nbytes: int) -> Tensor:
        """Make the memory, and tell the others: of a failure too, so that none of them waits."""
        try:
            _check_available(nbytes)
            fd = os.memfd_create(_PREFIX + name, os.MFD_CLOEXEC)
            self._held.append(fd)
            os.ftruncate(fd, nbytes)
            memory = _mapped(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)  # else a page that cannot be had is a signal later
        except OSError as error:
            self._exchange(_handle(name, error=str(error)))
            raise PoolError(f"shared host memory {name!r}: {error}") from error
        inode = os.fstat(fd).st_ino
        self._exchange(_handle(name, pid=os.getpid(), fd=fd, inode=inode, nbytes=nbytes))
        return memory

    def _attach(self, name: str, nbytes: int) -> Tensor:
        """Map what the writer made."""
        told: dict[str, Any] = json.loads(self._exchange(None))
        if told["error"]:
            raise PoolError(f"shared host memory {name!r}: the rank that writes: {told['error']}")
        if (told["name"], told["nbytes"]) != (name, nbytes):
            raise PoolError(
                f"shared host memory {name!r} of {nbytes} bytes: the rank that writes made "
                f"{told['name']!r} of {told['nbytes']}"
            )
        try:
            fd = os.open(f"/proc/{told['pid']}/fd/{told['fd']}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_ino, found.st_size) != (told["inode"], nbytes):
                    raise PoolError(
                        f"shared host memory {name!r}: process {told['pid']} here is not the rank "
                        "that writes; ranks of a node must share a process namespace"
                    )
                return _mapped(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise PoolError(f"shared host memory {name!r}: {error}") from error


def _handle(
    name: str, *, pid: int = 0, fd: int = -1, inode: int = 0, nbytes: int = 0, error: str = ""
) -> bytes:
    """What the others need to attach, or why they cannot."""
    told = {"name": name, "pid": pid, "fd": fd, "inode": inode, "nbytes": nbytes, "error": error}
    return json.dumps(told).encode()


def _check_available(nbytes: int) -> None:
    """Refuse what the machine cannot hold: pages of a memfd are no process's own, so running out of
    memory over them would end some other process.

    Raises:
        OSError: as the kernel would for a process's memory.
    """
    with open("/proc/meminfo") as lines:
        rows = dict(line.split(":") for line in lines)
    available = int(rows["MemAvailable"].split()[0]) * 1024
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{nbytes:,} bytes wanted, {available:,} available")


def _mapped(fd: int, nbytes: int) -> Tensor:
    """uint8[nbytes] over the descriptor's memory; the mapping lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def _page_lock(memory: Tensor) -> None:
    """Register memory with CUDA, so that copies of it are asynchronous."""
    _check_cuda(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda(status: Any) -> None:
    if int(status):
        raise PoolError(f"shared host memory: CUDA cannot page-lock it (error {int(status)})")
