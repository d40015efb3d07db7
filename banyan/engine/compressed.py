"""Cache layers that keep one compressed entry for every few tokens beside a window of tokens.

Compressed attention closes a group of `stride` tokens at a time: their projections, weighted by
gates, become one entry that all later tokens see. The entries are a strided buffer of the `Full`
component. What a group still needs while it is open (its tokens' projections and gates), and what
the next group needs of the last one, is kept per token in the `Window` component, so that every
boundary can be resumed at; pages are whole groups, so no group is open at one. Follows the
interface of transformers' DeepSeek V4 layers. One sequence at a time: groups of several would not
line up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from banyan.engine.plans import Rows, SeqInput
from banyan.errors import LeaseError
from banyan.lease import PageTable
from banyan.pools.device import DevicePool

if TYPE_CHECKING:
    from banyan.engine.cache_layers import Pass


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Where one forward of one sequence finds a stride's entries and tokens, as rows of buffers.

    Args:
        first: position at which the open group begins; `first // stride` entries exist before.
        entries: int64[n], rows of all entries once the new tokens are in, in the `Full` component.
        new: index of the first entry that this forward closes.
        there: how many of those it closes are there already, and not written.
        tokens: int64[stop - first], rows of the tokens from `first` on, in the `Window` component.
        last: int64[stride], rows of the tokens of the last closed group; None when there is none.
    """

    first: int
    entries: Tensor
    new: int
    there: int
    tokens: Tensor
    last: Tensor | None


def plan_groups(
    seq: SeqInput, full: int, window: int, page_size: int, stride: int, device: torch.device
) -> GroupPlan:
    """Plan the layers of one stride.

    Args:
        full, window: indices of the components that hold entries and tokens.

    Raises:
        LeaseError: a table does not cover what the layers will read and write.

    Cost: O(stop / stride) numpy work.
    """
    first = seq.start // stride * stride
    count = seq.stop // stride
    entries = _rows(seq, full, np.arange(count) * stride, page_size, stride)
    tokens = _rows(seq, window, np.arange(first, seq.stop), page_size, 1)
    last = None
    if first:
        before = _rows(seq, window, np.arange(first - stride, first), page_size, 1)
        last = torch.from_numpy(before).to(device)
    new = first // stride
    return GroupPlan(
        first=first,
        entries=torch.from_numpy(entries).to(device),
        new=new,
        there=max(0, min(count, seq.present // stride) - new),
        tokens=torch.from_numpy(tokens).to(device),
        last=last,
    )


def _rows(seq: SeqInput, component: int, at: Rows, page_size: int, stride: int) -> Rows:
    """Rows of the entries that begin at the positions `at`."""
    table = seq.tables[component]
    if not isinstance(table, PageTable):
        raise LeaseError(f"component {component} needs a page table, got {type(table).__name__}")
    pages = at // page_size
    if len(at) and not table.first_page <= pages[0] <= pages[-1] < table.stop_page:
        raise LeaseError(
            f"component {component}: the table covers pages [{table.first_page}, "
            f"{table.stop_page}), the forward needs [{pages[0]}, {pages[-1] + 1})"
        )
    slots = table.slots.astype(np.int64)[pages - table.first_page]
    rows: Rows = slots * (page_size // stride) + at % page_size // stride
    return rows


class GroupStore:
    """The compressed half of a layer: entries, open group and last group of each of its series.

    A series is what the model calls by a name, `compressor` or `indexer`.

    Args:
        shared: the current forward.
        layer: the model layer.
        full, window: (index, pool) of the components that hold entries and tokens.
    """

    def __init__(
        self, shared: Pass, layer: int, full: tuple[int, DevicePool], window: tuple[int, DevicePool]
    ) -> None:
        self._groups_of, self._stride = shared, _stride_of(full[1], layer)
        self._rows_of = {
            name: tensor.flatten(0, 1)
            for _, pool in (full, window)
            for (at, name), tensor in pool.buffers.items()
            if at == layer
        }

    @property
    def _plan(self) -> GroupPlan:
        return self._groups_of.groups[self._stride]

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Keep the new tokens' projections; return those of the groups that are now whole.

        Args:
            kv, gate: dtype[1, new_len, n].

        Returns:
            Both for the tokens of the groups that this forward closes, dtype[1, whole, n], and the
            position of the first of them.

        Mutates: the pool rows of the new tokens.
        """
        plan = self._plan
        fresh = plan.tokens[len(plan.tokens) - kv.shape[1] :]
        whole = len(plan.tokens) // self._stride * self._stride
        closed = []
        for kind, new in (("kv", kv), ("gate", gate)):
            rows = self._rows_of[f"{name}_{kind}"]
            rows.index_copy_(0, fresh, new[0])
            closed.append(rows.index_select(0, plan.tokens[:whole])[None])
        return closed[0], closed[1], plan.first

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keep what the next group needs of each closed one; return what the first needs.

        Args:
            chunk_kv, chunk_gate: dtype[1, groups, stride, n], gates with their position's bias.
            head_dim: leading columns that the next group reads.

        Returns:
            Projections and gates of the group before, dtype[1, stride, head_dim], or None twice.

        Mutates: the pool rows of the closed groups' tokens.
        """
        plan, closed = self._plan, chunk_gate.shape[1] * self._stride
        prior = self._rows_of[f"{name}_prior"]
        before: tuple[Tensor | None, Tensor | None] = (None, None)
        if plan.last is not None:
            kv = self._rows_of[f"{name}_kv"].index_select(0, plan.last)[:, :head_dim]
            before = kv[None], prior.index_select(0, plan.last)[None]
        biased = chunk_gate[0, :, :, :head_dim].reshape(closed, head_dim)
        prior.index_copy_(0, plan.tokens[:closed], biased.to(prior.dtype))
        return before

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store the entries of the closed groups; return all entries, oldest first.

        Args:
            compressed: dtype[1, groups, head_dim].

        Mutates: the pool rows of the new entries.
        """
        plan, rows = self._plan, self._rows_of[f"{name}_entry"]
        rows.index_copy_(0, plan.entries[plan.new + plan.there :], compressed[0, plan.there :])
        return rows.index_select(0, plan.entries)[None]


def _stride_of(pool: DevicePool, layer: int) -> int:
    strides: Any = {b.stride for b in pool.component.buffers if b.layer == layer}
    (stride,) = strides
    return int(stride)
