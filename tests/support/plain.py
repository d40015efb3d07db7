"""The plain `transformers` answer that the engine's answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def reference_generate(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """What `transformers` itself answers greedily, never stopping early."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(t) for t in out[0, len(prompt) :]]
