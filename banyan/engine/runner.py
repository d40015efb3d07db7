"""Runs a transformers model on Banyan's pools: tokens and page tables in, logits out.

Owns the model call, its masks and positions. Knows no tree, no request and no scheduler. All calls
come from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from banyan.engine.cache_layers import BanyanCache
from banyan.engine.masks import attention_mask
from banyan.engine.plans import PagePlan, SeqInput
from banyan.errors import SpecError
from banyan.pools.assembler import PoolStack
from banyan.spec import CacheSpec, Full, Point, Reach, Window

__all__ = ["Runner", "SeqInput"]

_TYPE_OF_REACH: dict[type[Reach], str] = {
    Full: "full_attention",
    Window: "sliding_attention",
    Point: "linear_attention",
}

Masks = dict[str, Tensor | None] | Tensor | None


class Runner:
    """One model bound to one stack of pools.

    Args:
        model: a `transformers` causal language model, on the pools' device.
        spec: its components, as in `stack`.
        stack: the pools it reads and writes.

    Raises:
        SpecError: the spec and the model disagree about layers, or the model's attention
            implementation does not take additive masks.
    """

    def __init__(self, model: Any, spec: CacheSpec, stack: PoolStack) -> None:
        config = model.config.get_text_config()
        layers = int(config.num_hidden_layers)
        if spec.num_layers > layers:
            raise SpecError(f"the spec has {spec.num_layers} layers, the model {layers}")
        self._model = model
        self._cache = BanyanCache(spec, stack.device, layers)
        self._device = stack.device[0].device
        self._dtype: torch.dtype = model.dtype
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise SpecError(f"attention implementation {implementation!r}: use sdpa or eager")
        self._explicit = implementation == "eager"
        self._mask_of = _mask_sources(config, spec)
        self._places = torch.arange(int(config.max_position_embeddings), device=self._device)

    def forward(self, seqs: Sequence[SeqInput]) -> Tensor:
        """Compute the new tokens, store what they cache, return each sequence's next-token logits.

        Args:
            seqs: one sequence with any number of new tokens, or several with one each.

        Returns:
            float32[len(seqs), vocabulary] on the pools' device.

        Raises:
            ValueError: several sequences, and one does not have exactly one new token.
            LeaseError: a table does not cover the new tokens or what they look back at.
            CopyError: a load-back failed; nothing that was computed may be used.

        Mutates: pool rows of the new tokens, and the `write` state slots; nothing else.
        """
        if not seqs or (len(seqs) > 1 and any(len(seq.tokens) != 1 for seq in seqs)):
            raise ValueError("a forward takes one sequence, or several with one new token each")
        with torch.inference_mode():
            plans = self._cache.begin(seqs)
            logits: Tensor = self._model(
                input_ids=torch.tensor([list(seq.tokens) for seq in seqs], device=self._device),
                attention_mask=self._masks(plans),
                position_ids=self._positions(seqs),
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            self._cache.finish()
            return logits[:, -1].float()

    def _positions(self, seqs: Sequence[SeqInput]) -> Tensor:
        first = seqs[0]
        if len(seqs) == 1 and first.stop <= len(self._places):
            return self._places[first.start : first.stop][None]
        if len(seqs) == 1:
            return torch.arange(first.start, first.stop, device=self._device)[None]
        return torch.tensor([[seq.start] for seq in seqs], device=self._device)

    def _masks(self, plans: dict[int, PagePlan]) -> Masks:
        made: dict[int | None, Tensor | None] = {None: None}
        for component, plan in plans.items():
            made[component] = attention_mask(
                plan, dtype=self._dtype, device=self._device, explicit=self._explicit
            )
        if isinstance(self._mask_of, dict):
            return {kind: made[component] for kind, component in self._mask_of.items()}
        return made[self._mask_of]


def _mask_sources(config: Any, spec: CacheSpec) -> dict[str, int | None] | int | None:
    """Which component's mask the model wants: by layer type, or one for all its layers.

    A model whose config names layer types takes a mapping from type to mask (hybrids of attention
    and state take one per half, under the halves' type names); the others take a tensor.
    """
    paged = [
        next((i for i in spec.layer_components(n) if spec.components[i].reach.page_shaped), None)
        for n in range(config.num_hidden_layers)
    ]
    types = getattr(config, "layer_types", None)
    kinds = [str(kind) for kind in types or ["all"] * len(paged)]
    wanted = set(zip(kinds, paged, strict=True))
    sources = dict(wanted)
    if len(sources) != len(wanted):
        raise SpecError("layers of one type belong to different components, so need two masks")
    if not types:
        return sources["all"]
    for i, component in enumerate(spec.components):
        if component.buffers:
            half = _TYPE_OF_REACH[type(component.reach)]
            sources.setdefault(half, i if component.reach.page_shaped else None)
    return sources
