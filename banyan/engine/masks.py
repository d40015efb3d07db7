"""Which keys each new token may see, as the additive masks that transformers models take.

Knows positions and windows, no pool and no layer. `None` stands for a mask that need not exist:
causal and complete, which lets the attention kernel take its fast path.
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

    Args:
        plan: this forward's plan of the component.
        dtype: the model's activation dtype.
        explicit: never leave causality to the kernel (attention implementations other than sdpa).

    Returns:
        dtype[batch, 1, new_len, key_len], 0 where visible and -inf where hidden; or None when the
        newest token sees every key and, for several new tokens, there is no past and no window cut.
    """
    if plan.new_len == 1:
        return _padding_mask(plan, dtype, device)
    past = plan.key_len - plan.new_len
    cut = plan.window is not None and plan.key_len > plan.window
    if past == 0 and not cut and not explicit:
        return None
    hidden = torch.full((plan.new_len, plan.key_len), HIDDEN, dtype=dtype, device=device)
    mask = hidden.triu(past + 1)
    if cut and plan.window is not None:
        mask += hidden.tril_(past - plan.window)
    return mask[None, None]


def _padding_mask(plan: PagePlan, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """For one new token per sequence: hides what pads the shorter ones on the left."""
    key_len = plan.key_len
    if min(plan.lengths) == key_len:
        return None
    padding = key_len - torch.tensor(plan.lengths, device=device)
    mask = torch.zeros((len(plan.lengths), key_len), dtype=dtype, device=device)
    mask.masked_fill_(torch.arange(key_len, device=device) < padding[:, None], HIDDEN)
    return mask[:, None, None, :]
