"""Lets Mamba-1 layers go on from a state when they are given several tokens at once.

In transformers 5.24 their selective scan starts from zeros whenever it gets more than one token, so
the second chunk of a prompt forgets the first (single tokens do go on). The recurrence is linear in
its state, `h[t] = exp(dt[t] A) h[t-1] + ...`, so what the earlier state contributes can be added to
the scan's own result. Owns that addition, and the way by which the cache hands the state over.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NAME = "mamba_selective_scan"
_handed = threading.local()


def hand_over(state: Tensor | None) -> None:
    """The state that the next scan of this thread goes on from; None: zeros.

    Args:
        state: float[batch, channels, state size].
    """
    _handed.state = state


def continue_scans(model: Any) -> bool:
    """Make the scans of `model`'s layers go on from the state handed over; whether it has any.

    Mutates: the function in the module that defines the model, once; without a state handed over
    it does what it did.
    """
    home = sys.modules[type(model).__module__]
    scan = getattr(home, _NAME, None)
    if scan is None:
        return False
    if not hasattr(scan, "continues"):
        setattr(home, _NAME, _continuing(scan))
    return True


def _continuing(scan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scan)
    def run(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        return_last_state: bool = False,
        **options: Any,
    ) -> Any:
        state, _handed.state = getattr(_handed, "state", None), None
        if state is None:
            return scan(
                hidden_states, dt, A, B, C, D, z, return_last_state=return_last_state, **options
            )
        output, last = scan(hidden_states, dt, A, B, C, D, None, return_last_state=True, **options)
        carried = _carried(state, dt, A, options)
        output = output + torch.einsum("bcts,bst->bct", carried, C.float()).to(output.dtype)
        if z is not None:
            output = output * functional.silu(z)
        last = last + carried[:, :, -1].to(last.dtype)
        return (output, last) if return_last_state else output

    run.continues = True  # type: ignore[attr-defined]
    return run


def _carried(state: Tensor, dt: Tensor, decay: Tensor, options: dict[str, Any]) -> Tensor:
    """What is left of `state` after each token: float32[batch, channels, tokens, state size]."""
    bias = options.get("delta_bias")
    step = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
    if options.get("delta_softplus"):
        step = functional.softplus(step)
    elapsed = step.float().cumsum(-1)
    return torch.exp(decay[None, :, None, :] * elapsed[..., None]) * state.float()[:, :, None, :]
