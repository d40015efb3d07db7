"""Which keys each new token may see, as the additive masks that transformers models take.

Knows positions and windows, no pool and no layer. `None` stands for a mask that need not exist:
every new token sees all keys up to its own, which the attention kernel does by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from banyan.engine.plans import PagePlan

HIDDEN = float("-inf")


def attention_mask(
    plan: PagePlan, *, dtype: torch.dtype, device: torch.device, explicit: bool
) -> Tensor | None:
    """The mask for the layers of one page-shaped component.

    There is none exactly where transformers makes none, since kernels round differently with and
    without: no padding, no window that the keys fill, and either one new token or no past.

    Args:
        plan: this forward's plan of the component.
        dtype: the model's activation dtype.
        explicit: never leave causality to the kernel (attention implementations other than sdpa).

    Returns:
        dtype[batch, 1, new_len, key_len], 0 where visible and -inf where hidden; or None.
    """
    key_len, past = plan.key_len, plan.key_len - plan.new_len
    open_view = plan.window is None or key_len < plan.window
    if plan.new_len == 1:
        if open_view and min(plan.lengths) == key_len:
            return None
        return _padding_mask(plan, dtype, device)
    if open_view and past == 0 and not explicit:
        return None
    hidden = torch.full((plan.new_len, key_len), HIDDEN, dtype=dtype, device=device)
    mask = hidden.triu(past + 1)
    if plan.window is not None:
        mask += hidden.tril_(past - plan.window)
    return mask[None, None]


def _padding_mask(plan: PagePlan, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For one new token per sequence: hides what pads the shorter ones on the left."""
    padding = plan.key_len - torch.tensor(plan.lengths, device=device)
    mask = torch.zeros((len(plan.lengths), plan.key_len), dtype=dtype, device=device)
    mask.masked_fill_(torch.arange(plan.key_len, device=device) < padding[:, None], HIDDEN)
    return mask[:, None, None, :]
