"""Device memory of one component: per layer and buffer one tensor indexed by slot.

Owns the tensors that attention and state layers read and write. Knows no tree, no request and no
thread. The tensors are written by the runner (the slots of running requests) and by the copy
engine (the slots of a load-back), never both for one slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan.errors import PoolError
from banyan.pools.host import RecordLayout, Strip
from banyan.spec import Component

Slots = npt.NDArray[np.int32]
Records = npt.NDArray[np.uint8]


class DevicePool:
    """Zero-filled tensors for every buffer of a component.

    Buffers of equal shape that are evenly spaced in a record are views of one stacked tensor (see
    `Strip`), which is what lets a copy move all layers in one call.

    Args:
        component: whose buffers to hold.
        slots: capacity.
        page_size: tokens per page.
        device: where the tensors live.
        parts: pools of the same slots that hold the component's buffers between them, to be seen
            as one; default, tensors of its own.

    Attributes:
        buffers: by (layer, name): dtype[slots, page_size // stride, *shape] for page-shaped
            components, dtype[slots, *shape] for `Point`; contiguous.
        stacks: by strip of `layout` (of each part in turn), uint8[buffers, slots, nbytes]: the same
            memory as bytes.
        layout: where each buffer lies in a record.
    """

    def __init__(
        self,
        component: Component,
        slots: int,
        page_size: int,
        device: torch.device | str = "cpu",
        parts: Sequence[DevicePool] = (),
    ) -> None:
        self.component = component
        self.slots = slots
        self.device = torch.device(device)
        self.layout = RecordLayout(component, page_size)
        self.buffers: dict[tuple[int, str], Tensor] = {}
        self._bytes: dict[tuple[int, str], Tensor] = {}
        self.stacks: tuple[Tensor, ...]
        if parts:
            self.stacks = tuple(stack for part in parts for stack in part.stacks)
            for part in parts:
                self.buffers |= part.buffers
                self._bytes |= part._bytes
        else:
            self.stacks = tuple(self._allocated(strip, page_size) for strip in self.layout.strips)

    def _allocated(self, strip: Strip, page_size: int) -> Tensor:
        """A strip's memory as bytes; its buffers are views of it."""
        like = strip.buffers[0]
        paged = self.component.reach.page_shaped
        entries = (self.component.entries(like, page_size),) if paged else ()
        shape = (len(strip.buffers), self.slots, *entries, *like.shape)
        stack = torch.zeros(shape, dtype=getattr(torch, like.dtype), device=self.device)
        flat = stack.view(-1).view(torch.uint8).view(len(strip.buffers), self.slots, strip.nbytes)
        for index, buffer in enumerate(strip.buffers):
            self.buffers[buffer.layer, buffer.name] = stack[index]
            self._bytes[buffer.layer, buffer.name] = flat[index]
        return flat

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(stack.nbytes for stack in self.stacks)

    @property
    def record_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        return self.layout.record_bytes

    def read_records(self, slots: Slots) -> Records:
        """Gather whole slots, in record layout: for checksums and tests, not the copy path.

        Args:
            slots: int32[n].

        Returns:
            uint8[n, record_bytes] on CPU, a copy.

        Raises:
            PoolError: a slot is out of range.

        Cost: one gather per buffer, plus a synchronising copy from a CUDA device.
        """
        index = self._index(slots)
        records = np.empty((len(index), self.record_bytes), np.uint8)
        for layer, name, offset, nbytes in self.layout.entries:
            source = self._bytes[layer, name]
            if source.is_cuda:
                taken = source[torch.from_numpy(index).to(self.device)].cpu().numpy()
            else:
                taken = source.numpy()[index]
            records[:, offset : offset + nbytes] = taken
        return records

    def write_records(self, slots: Slots, records: Records) -> None:
        """Scatter whole slots from record layout: for tests and fault injection.

        Args:
            slots: int32[n], distinct.
            records: uint8[n, record_bytes].

        Raises:
            PoolError: a slot is out of range, or the shapes do not agree.

        Mutates: the buffers, at `slots`.
        """
        index = self._index(slots)
        if records.shape != (len(index), self.record_bytes) or records.dtype != np.uint8:
            raise PoolError(
                f"{self.component.name}: records must be uint8[{len(index)}, {self.record_bytes}],"
                f" got {records.dtype}{list(records.shape)}"
            )
        for layer, name, offset, nbytes in self.layout.entries:
            piece = np.ascontiguousarray(records[:, offset : offset + nbytes])
            where = torch.from_numpy(index).to(self.device)
            self._bytes[layer, name][where] = torch.from_numpy(piece).to(self.device)

    def _index(self, slots: Slots) -> npt.NDArray[np.int64]:
        index = np.asarray(slots, np.int64)
        outside = (index < 0) | (index >= self.slots)
        if outside.any():
            raise PoolError(
                f"{self.component.name}: slots {index[outside][:8].tolist()} are outside the "
                f"device pool of {self.slots}"
            )
        return index
