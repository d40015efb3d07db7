"""Runs a transformers model on Banyan's pools: tokens and page tables in, logits out.

Owns the model call and its positions. Masks are the model's own, made from what the cache says of
its lengths, so they are those of `generate`. Knows no tree, no request and no scheduler. All calls
come from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from banyan.engine.cache_layers import make_cache
from banyan.engine.plans import SeqInput
from banyan.engine.scan import continue_scans
from banyan.errors import SpecError
from banyan.observe import observe_model, own_cache_class
from banyan.pools.assembler import PoolStack
from banyan.spec import CacheSpec

__all__ = ["Runner", "SeqInput"]


_PLACES = 4_096
"""Positions that are kept ready; those beyond are made when they are needed."""


class _EnoughError(Exception):
    """All layers that were wanted have run."""


class Runner:
    """One model bound to one stack of pools.

    Args:
        model: a `transformers` causal language model, on the pools' device.
        spec: its components, as in `stack`.
        stack: the pools it reads and writes.

    Attributes:
        batches: False computes sequences one by one: for models that do not go by the positions
            they are given, and so cannot have sequences of unequal length side by side.

    Raises:
        SpecError: the spec and the model disagree about layers, or the model's attention
            implementation is not one that has been tried.
    """

    def __init__(self, model: Any, spec: CacheSpec, stack: PoolStack) -> None:
        config = model.config.get_text_config()
        layers = int(config.num_hidden_layers)
        if spec.num_layers > layers:
            raise SpecError(f"the spec has {spec.num_layers} layers, the model {layers}")
        _check_spec(spec, model)
        self._model = model
        self._cache = make_cache(spec, stack.device, layers, own_cache_class(config))
        self._cache.hands_over = continue_scans(model)
        self._device = stack.device[0].device
        self._vocab_size = int(config.vocab_size)
        self._beyond = _layer_beyond(model, spec, layers)
        self._pads = any(c.buffers and c.reach.page_shaped for c in spec.components)
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise SpecError(f"attention implementation {implementation!r}: use sdpa or eager")
        self._places = torch.arange(_PLACES, device=self._device)
        self.batches = True

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

        A sequence whose new tokens are all `present` may get zeros for logits: only what is wanting
        is computed, that is, no layer above the last one that keeps windows or states.
        """
        if not seqs or (len(seqs) > 1 and any(len(seq.tokens) != 1 for seq in seqs)):
            raise ValueError("a forward takes one sequence, or several with one new token each")
        if len(seqs) > 1 and (self._cache.one_at_a_time or not self.batches):
            return torch.cat([self.forward([seq]) for seq in seqs])
        with torch.inference_mode():
            self._cache.begin(seqs)
            brief = len(seqs) == 1 and seqs[0].stop <= seqs[0].present
            logits = self._run_in_part(seqs) if brief else self._run(seqs)
            self._cache.finish()
            return logits

    def _run(self, seqs: Sequence[SeqInput]) -> Tensor:
        logits: Tensor = self._model(
            input_ids=torch.tensor([list(seq.tokens) for seq in seqs], device=self._device),
            attention_mask=self._padding(seqs),
            position_ids=self._positions(seqs),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1].float()

    def _run_in_part(self, seqs: Sequence[SeqInput]) -> Tensor:
        """Run the layers whose windows or states are wanted, and those below them; no logits."""
        if self._beyond is None:
            return self._run(seqs)
        stop = self._beyond.register_forward_pre_hook(_stop_here)
        try:
            return self._run(seqs)
        except _EnoughError:
            return torch.zeros((1, self._vocab_size), device=self._device)
        finally:
            stop.remove()

    def _positions(self, seqs: Sequence[SeqInput]) -> Tensor:
        first = seqs[0]
        if len(seqs) == 1 and first.stop <= len(self._places):
            return self._places[first.start : first.stop][None]
        if len(seqs) == 1:
            return torch.arange(first.start, first.stop, device=self._device)[None]
        return torch.tensor([[seq.start] for seq in seqs], device=self._device)

    def _padding(self, seqs: Sequence[SeqInput]) -> Tensor | None:
        """bool[batch, longest], False for what pads the shorter ones on the left; None without.

        States are not padded, so a model with nothing else needs none.
        """
        stops = [seq.stop for seq in seqs]
        longest = max(stops)
        if min(stops) == longest or not self._pads:
            return None
        padding = longest - torch.tensor(stops, device=self._device)
        return torch.arange(longest, device=self._device) >= padding[:, None]


def _check_spec(spec: CacheSpec, model: Any) -> None:
    """Refuse a spec that describes another model: the model would read what is not there.

    Raises:
        SpecError: naming the first buffer that differs.
    """
    own = CacheSpec.from_layers(observe_model(model), spec.page_size)
    wanted, given = _buffers(own), _buffers(spec)
    for layer, name in sorted({**wanted, **given}):
        if wanted.get((layer, name)) != given.get((layer, name)):
            raise SpecError(
                f"layer {layer}, buffer {name!r}: the model keeps {wanted.get((layer, name))}, the "
                f"spec says {given.get((layer, name))}; derive it from the model"
            )


def _buffers(spec: CacheSpec) -> dict[tuple[int, str], str]:
    return {
        (b.layer, b.name): f"{b.dtype}{list(b.shape)} with reach {part.reach}"
        for part in spec.components
        for b in part.buffers
    }


def _layer_beyond(model: Any, spec: CacheSpec, layers: int) -> torch.nn.Module | None:
    """The module of the first layer above all that keep windows or states; None if there is none,
    or the model's layers are not found."""
    kept = [b.layer for part in spec.components[1:] for b in part.buffers]
    first = max(kept, default=layers) + 1
    if first >= layers:
        return None
    for name, module in model.named_modules():
        if name.endswith("layers") and isinstance(module, torch.nn.ModuleList):
            return module[first] if len(module) == layers else None
    return None


def _stop_here(*_: Any) -> None:
    raise _EnoughError
