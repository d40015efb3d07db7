"""Host memory that processes share: the same bytes, no name, and nothing left whoever is killed."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from banyan.errors import PoolError
from banyan.pools.shared import SharedHost
from tests.support.node import Relay, sharing_ranks

MIB = 1 << 20
WRITER = """
import sys
from banyan.pools.shared import SharedHost

def exchange(message):
    print(message.decode(), flush=True)
    return message

memory = SharedHost(exchange, writes=True).allocate(sys.argv[1], int(sys.argv[2]))
memory.fill_(7)
print("filled", flush=True)
sys.stdin.read()
"""
READER = """
import hashlib, sys
from banyan.pools.shared import SharedHost

share = SharedHost(lambda message: sys.argv[3].encode(), writes=False)
memory = share.allocate(sys.argv[1], int(sys.argv[2]))
print(hashlib.sha256(memory.numpy()).hexdigest(), flush=True)
sys.stdin.readline()
print(int(memory[12345]), flush=True)
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A second process; killed at the end."""
    command = [sys.executable, "-c", script, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    """The child's next line."""
    assert child.stdout
    return child.stdout.readline().strip()


def holders(name: str) -> list[int]:
    """Processes that have the memory open or mapped."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            seen = [(entry / "maps").read_text()]
            for fd in list((entry / "fd").iterdir()):
                with suppress(FileNotFoundError):
                    seen.append(os.readlink(fd))
        except OSError:  # it has ended, or belongs to someone else
            continue
        if any(f"memfd:banyan-host-{name}" in line for line in seen):
            found.append(int(entry.name))
    return sorted(found)


def names() -> set[str]:
    """What of ours has a name in the folder of shared memory; others use it too."""
    return {name for name in os.listdir("/dev/shm") if "banyan" in name}


def test_another_process_maps_the_same_bytes() -> None:
    told: list[bytes] = []
    share, before = SharedHost(Relay(told), writes=True), names()
    memory = share.allocate("full", 2 * MIB)
    assert not memory.any() and memory.shape == (2 * MIB,)
    memory.copy_(torch.randint(0, 256, (2 * MIB,), dtype=torch.uint8))
    with process(READER, "full", str(2 * MIB), told[0].decode()) as reader:
        assert said(reader) == hashlib.sha256(memory.numpy()).hexdigest()
        memory[12345] = 201
        assert reader.stdin
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert said(reader) == "201", "what is written later is seen too"
        assert names() == before, "no name ever existed"
    assert share.nbytes == 2 * MIB
    share.close()


def test_a_killed_writer_leaves_nothing() -> None:
    """The bytes stay while another rank maps them; then the memory is gone, and no name with it."""
    name, before = f"killed-{os.getpid()}", names()
    with process(WRITER, name, str(MIB)) as writer:
        handle = said(writer)
        share = SharedHost(lambda message: handle.encode(), writes=False)
        memory = share.allocate(name, MIB)
        assert said(writer) == "filled"
        assert holders(name) == sorted((writer.pid, os.getpid()))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
        assert bool((memory == 7).all())
        assert holders(name) == [os.getpid()]
        with pytest.raises(PoolError, match=name):
            SharedHost(lambda message: handle.encode(), writes=False).allocate(name, MIB)
    share.close()
    del memory
    gc.collect()
    assert holders(name) == []
    assert names() == before


def test_a_killed_reader_takes_nothing_with_it() -> None:
    told: list[bytes] = []
    share = SharedHost(Relay(told), writes=True)
    memory = share.allocate("full", MIB)
    memory.fill_(3)
    with process(READER, "full", str(MIB), told[0].decode()) as reader:
        assert said(reader)
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait(10)
    assert bool((memory == 3).all())
    memory.fill_(4)
    share.close()


def test_memory_is_taken_at_once_and_once() -> None:
    """What cannot be had fails at start; and ranks that attach and write take nothing more."""
    with sharing_ranks(3) as shares:
        made = [share.allocate("full", 8 * MIB) for share in shares]
        (fd,) = shares[0]._held
        assert os.fstat(fd).st_size == 8 * MIB
        assert os.fstat(fd).st_blocks * 512 == 8 * MIB
        made[2].fill_(1)
        assert bool((made[1] == 1).all())
        assert os.fstat(fd).st_blocks * 512 == 8 * MIB


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_writer_that_cannot_tells_the_others(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for memory that will not come."""

    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, call, refuse)
    with sharing_ranks(2) as (writer, reader):
        for share, who in ((writer, "full"), (reader, "the rank that writes")):
            with pytest.raises(PoolError, match=f"{who}.*Cannot allocate memory"):
                share.allocate("full", MIB)
        assert writer.nbytes == reader.nbytes == 0


def test_more_than_the_machine_has_is_refused_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(*_: object) -> int:
        pytest.fail("memory was asked for")

    monkeypatch.setattr(os, "memfd_create", taken)
    with sharing_ranks(2) as (writer, reader):
        for share in (writer, reader):
            with pytest.raises(PoolError, match="bytes wanted"):
                share.allocate("full", 1 << 62)


@pytest.mark.parametrize(("name", "nbytes"), [("window", MIB), ("full", 2 * MIB)])
def test_ranks_that_ask_for_different_memory_are_refused(name: str, nbytes: int) -> None:
    with sharing_ranks(2) as (writer, reader):
        writer.allocate("full", MIB)
        with pytest.raises(PoolError, match="the rank that writes made 'full'"):
            reader.allocate(name, nbytes)


@pytest.mark.parametrize(
    ("change", "match"),
    [({"fd": 999_999}, "No such file"), ({"inode": 1}, "not the rank"), ({"pid": 1 << 22}, "No")],
)
def test_a_descriptor_of_something_else_is_refused(change: dict[str, Any], match: str) -> None:
    """A process of that number in another namespace is not the writer."""
    told: list[bytes] = []
    writer = SharedHost(Relay(told), writes=True)
    writer.allocate("full", MIB)
    forged = json.dumps(json.loads(told[0]) | change).encode()
    with pytest.raises(PoolError, match=match):
        SharedHost(lambda message: forged, writes=False).allocate("full", MIB)
    writer.close()


def test_after_close_nobody_attaches_and_what_is_mapped_stays() -> None:
    with sharing_ranks(3) as (writer, reader, late):
        memory, seen = writer.allocate("full", MIB), reader.allocate("full", MIB)
        writer.close()
        writer.close()
        memory[5] = 9
        assert int(seen[5]) == 9
        with pytest.raises(PoolError, match="full"):
            late.allocate("full", MIB)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_shared(nbytes: int) -> None:
    with sharing_ranks(1) as (share,), pytest.raises(PoolError, match=f"{nbytes} bytes"):
        share.allocate("full", nbytes)


@pytest.mark.gpu
def test_pinned_memory_is_page_locked_on_every_rank() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    told: list[bytes] = []
    shares = [SharedHost(Relay(told), writes=flag, pin=True) for flag in (True, False)]
    first, second = (share.allocate("full", MIB) for share in shares)
    assert first.is_pinned() and second.is_pinned()
    first.copy_(torch.full((MIB,), 6, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert bool((second.to("cuda") == 6).all())
    for share in shares:
        share.close()
    assert not first.is_pinned()
