"""Sums over ranks by direct exchange: for a few ranks on CPU, where what costs is taking turns.

A ring takes 2 (N - 1) turns, each of which waits until the operating system lets the next process
run; here every rank sends its part to all others at once. Owns that sum, and the style by which a
tensor-parallel plan asks for it. Used on the thread that runs the model, by all ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel

ROWWISE = "rowwise_exchanged"
"""What transformers calls `rowwise`, with this sum."""

MOST_RANKS = 8
"""With more, each would send too many copies of its part."""


def sum_of_ranks(part: Tensor) -> Tensor:
    """The sum of what every rank gives, added in rank order: the same bits on all of them.

    Args:
        part: float[...] on CPU, of the same shape on every rank.

    Returns:
        a new tensor.

    Cost: one turn; every rank sends `part` once to each other. At 4 ranks on 2 busy cores 0.5 ms to
    2.9 ms, where a ring takes 4.3 ms.
    """
    ranks, rank = group.get_world_size(), group.get_rank()
    part = part.contiguous()
    parts = part.new_empty((ranks, *part.shape))
    parts[rank] = part
    others = [r for r in range(ranks) if r != rank]
    waiting = [group.irecv(parts[r], r) for r in others]
    waiting += [group.isend(part, r) for r in others]
    for one in waiting:
        assert one is not None
        one.wait()
    return parts.sum(0)


class ExchangedRowwise(RowwiseParallel):  # type: ignore[misc]
    """`RowwiseParallel` for serving: no gradients, and the mesh is the default process group."""

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """The sum of the ranks' outputs, and the bias once."""
        if isinstance(output, DTensor) or torch.is_grad_enabled():
            return super().transform_output_post_forward(module, output, mesh)
        total = sum_of_ranks(output)
        bias = module._parameters.get("bias")
        if bias is None:
            return total
        return total + (bias.to_local() if isinstance(bias, DTensor) else bias)


ALL_PARALLEL_STYLES.register(ROWWISE, ExchangedRowwise())
