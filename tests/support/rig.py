"""A small cache with a toy model whose cached bytes say what they should be.

Each token's entry is a hash of the token prefix, the layer and the component; a state is the hash
of the prefix it has consumed. `Rig.read` checks everything a forward pass would read against that,
so a wrong slot, a stale byte or a state one page off is an error at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from banyan.cache import AllocateOutcome, PrefixCache
from banyan.errors import CopyError
from banyan.lease import Lease
from banyan.pools.assembler import PoolStack, assemble
from banyan.pools.sizing import PoolSize, SizePlan
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window
from banyan.tiers.controller import TierOptions, WritePolicy
from banyan.tree import Tier, encode_namespace, encode_tokens, make_policy
from tests.support.manual_engine import ManualCopyEngine

KINDS = ("full", "full+window", "full+state", "full+window+state")
_MASK = (1 << 31) - 1


def toy_spec(kind: str, page_size: int = 4, window: int = 8) -> CacheSpec:
    """One of `KINDS`, with several buffers per component so that none can be forgotten.

    `narrow` in the kind adds a second, shorter window.
    """
    parts = [
        Component("full", Full(), (Buffer("k", 0, (2,), "int32"), Buffer("v", 0, (1,), "int32")))
    ]
    if "window" in kind:
        buffers = (Buffer("k", 1, (1,), "int32"), Buffer("v", 2, (2,), "int32"))
        parts.append(Component("window", Window(window), buffers))
    if "narrow" in kind:
        parts.append(Component("narrow", Window(3), (Buffer("k", 4, (1,), "int32"),)))
    if "state" in kind:
        buffers = (Buffer("conv", 3, (2,), "int32"), Buffer("recurrent", 3, (3,), "int32"))
        parts.append(Component("state", Point(), buffers))
    return CacheSpec(tuple(parts), page_size)


def toy_stack(spec: CacheSpec, device: list[int], host: list[int]) -> PoolStack:
    """Pools with `device[c]` and `host[c]` slots of component c; an empty `host` means no tier."""
    page = spec.page_size

    def sizes(counts: list[int]) -> tuple[PoolSize, ...]:
        return tuple(
            PoolSize(c.name, n, c.record_bytes(page))
            for c, n in zip(spec.components, counts, strict=bool(counts))
        )

    reaches = tuple(c.reach for c in spec.components)
    return assemble(spec, SizePlan(sizes(device), sizes(host), reaches, page, "full"))


def prefix_hashes(tokens: list[int]) -> np.ndarray:
    """int64[n + 1]: entry i stands for tokens[:i]."""
    out = np.empty(len(tokens) + 1, np.int64)
    out[0] = value = 7
    for i, token in enumerate(tokens):
        value = (value * 1_000_003 + token + 1) & _MASK
        out[i + 1] = value
    return out


def mixed(hashes: np.ndarray, component: int, layer: int, name: str, width: int) -> np.ndarray:
    salt = 31 * component + 17 * layer + sum(name.encode())
    columns = hashes[:, None] * 2_654_435_761 + np.arange(1, width + 1) * 40_503 * (salt + 1)
    return ((columns >> 7) & _MASK).astype(np.int32)


class WrongBytes(AssertionError):
    """A read found bytes that do not belong to the prefix."""


@dataclass
class Rig:
    """A cache, its pools and the toy model.

    Args:
        kind: one of `KINDS`.
        device, host: slots per component; host empty for no host tier.
    """

    kind: str = "full"
    page_size: int = 4
    window: int = 8
    device: list[int] | None = None
    host: list[int] | None = None
    write_policy: str = "write_through"
    evict_policy: str = "lru"
    verify: bool = False
    threshold: int = 1
    spec: CacheSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = toy_spec(self.kind, self.page_size, self.window)
        defaults = {"full": (32, 64), "window": (16, 32), "narrow": (12, 24), "state": (4, 8)}
        names = [c.name for c in self.spec.components]
        device = self.device or [defaults[n][0] for n in names]
        host = [defaults[n][1] for n in names] if self.host is None else self.host
        self.stack = toy_stack(self.spec, device, host)
        self.now = 0.0
        self.engine = ManualCopyEngine(self.stack)
        self.cache = PrefixCache(
            self.stack,
            self.engine,
            TierOptions(
                write_policy=WritePolicy(self.write_policy if host else "none"),
                load_back_threshold=self.threshold,
                verify=self.verify,
                weigh_cost=False,
            ),
            make_policy(self.evict_policy),
            clock=lambda: self.now,
        )

    # ---- the toy model ---------------------------------------------------------------------------

    def write(self, lease: Lease, tokens: list[int], start: int, stop: int) -> None:
        """Write what a forward pass over tokens[start:stop] would, to the lease's slots."""
        hashes = prefix_hashes(tokens[:stop])
        for c, component in enumerate(self.spec.components):
            for buffer in component.buffers:
                tensor = self.stack.device[c].buffers[buffer.layer, buffer.name]
                width = buffer.shape[0]
                if component.reach.page_shaped:
                    table = lease.pages(c)
                    values = mixed(hashes[start + 1 :], c, buffer.layer, buffer.name, width)
                    for i in range(max(start, 0 if c else lease.present), stop):
                        slot = table.slots[i // self.page_size - table.first_page]
                        tensor[int(slot), i % self.page_size] = torch.from_numpy(values[i - start])
                else:
                    write = lease.states(c).write
                    assert write is not None
                    value = mixed(hashes[stop:], c, buffer.layer, buffer.name, width)[0]
                    tensor[write] = torch.from_numpy(value)

    def read(self, lease: Lease, tokens: list[int]) -> None:
        """Check all that the next forward pass at `lease.length` would read.

        Raises:
            WrongBytes: some entry is not that of this prefix.
            CopyError: the lease's load-back failed.
        """
        length = lease.length
        hashes = prefix_hashes(tokens[:length])
        for c, component in enumerate(self.spec.components):
            for buffer in component.buffers:
                if lease.ticket is not None:
                    lease.ticket.wait_layer(buffer.layer)
                tensor = self.stack.device[c].buffers[buffer.layer, buffer.name]
                width = buffer.shape[0]
                match component.reach:
                    case Point():
                        slot = lease.states(c).read
                        if (slot is None) != (length == 0):
                            raise WrongBytes(f"{component.name}: state slot {slot} at {length}")
                        if slot is not None:
                            want = mixed(hashes[length:], c, buffer.layer, buffer.name, width)[0]
                            self._compare(tensor[slot], want, component.name, length)
                        continue
                    case Window(size):
                        first = max(0, length - (size - 1))
                    case _:
                        first = 0
                table = lease.pages(c)
                want = mixed(hashes[1:], c, buffer.layer, buffer.name, width)
                for i in range(first, length):
                    page = i // self.page_size - table.first_page
                    if page < 0:
                        raise WrongBytes(f"{component.name}: no page for position {i} at {length}")
                    entry = tensor[int(table.slots[page]), i % self.page_size]
                    self._compare(entry, want[i], component.name, i)

    @staticmethod
    def _compare(entry: torch.Tensor, want: np.ndarray, name: str, at: int) -> None:
        if not np.array_equal(entry.numpy(), want):
            raise WrongBytes(f"{name} at {at}: {entry.tolist()} where {want.tolist()} belongs")

    # ---- steps -----------------------------------------------------------------------------------

    def acquire(self, tokens: list[int], namespace: str = "", **kwargs: object) -> Lease:
        """Match and acquire."""
        space = encode_namespace([("salt", namespace)]) if namespace else b""
        match = self.cache.match(encode_tokens(tokens), space)
        return self.cache.acquire(match, **kwargs)  # type: ignore[arg-type]

    def compute(self, lease: Lease, tokens: list[int], stop: int) -> AllocateOutcome:
        """One forward pass up to `stop`: allocate, check what is read, write, advance."""
        outcome = self.cache.allocate(lease, stop)
        if outcome is AllocateOutcome.OK:
            self.read(lease, tokens)
            self.write(lease, tokens, lease.length, stop)
            self.cache.advance(lease, stop)
        return outcome

    def commit(self, lease: Lease, tokens: list[int]) -> None:
        """Publish what was computed."""
        self.cache.commit(lease, encode_tokens(tokens))

    def run(
        self, tokens: list[int], chunk: int = 16, namespace: str = "", settle: bool = True
    ) -> Lease:
        """A whole request: prefill in chunks with a cut at the last page boundary, then release.

        Returns its (released) lease, whose `device_len` and `host_len` say what was reused.
        """
        lease = self.acquire(tokens, namespace)
        last = (len(tokens) - 1) // self.page_size * self.page_size
        try:
            while lease.length < len(tokens):
                stop = min(lease.length + chunk, len(tokens))
                if lease.length < last < stop:
                    stop = last
                if self.compute(lease, tokens, stop) is not AllocateOutcome.OK:
                    break
                self.commit(lease, tokens)
        except CopyError:
            pass
        self.cache.release(lease)
        if settle:
            self.settle()
        return lease

    def settle(self, ok: bool = True) -> None:
        """Finish every running copy and apply it."""
        while self.cache.controller.operations:
            for op_id in self.engine.pending:
                self.engine.finish(op_id, ok=ok)
            self.cache.poll()

    def hit(self, tokens: list[int], namespace: str = "") -> tuple[int, int]:
        """(device boundary, boundary) of a match for `tokens` followed by one more token."""
        space = encode_namespace([("salt", namespace)]) if namespace else b""
        match = self.cache.match(encode_tokens([*tokens, 0]), space)
        return match.device_boundary, match.boundary

    def evict_device(self) -> None:
        """Evict everything that may go from the device."""
        cache = self.cache
        counts = [
            pool.free_count + cache.tree.device.evictable[c]
            for c, pool in enumerate(self.stack.device_slots)
        ]
        got = cache.controller.reserve(Tier.DEVICE, counts)
        assert isinstance(got, list), got
        cache.controller.free(Tier.DEVICE, got)

    def check(self) -> None:
        """Every invariant."""
        self.cache.check()
