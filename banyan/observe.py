"""What each layer of a transformers model caches, seen by running it once on a few tokens.

Owns the reading of `transformers`' own cache objects. Knows no component and no pool: it reports
plain data, and `CacheSpec` makes components of it. torch and transformers are imported when a model
is looked at, not before. No model family is named but those whose cache is a class of their own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from banyan.errors import SpecError

_TOKENS = 5
"""Length of the trial input: long enough that no tensor's length is taken for another dimension."""

_REMEMBERED = 32
_seen: OrderedDict[tuple[str, str], tuple[LayerData, ...]] = OrderedDict()

OWN_CACHES = {"minimax": ("transformers.models.minimax.modeling_minimax", "MiniMaxCache")}
"""By model type, the cache class that its forward insists on."""


COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Layer types that keep one entry for a group of tokens, as DeepSeek V4 does."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor that a layer keeps between forwards.

    Args:
        name: `k`, `v`, `indexer`, or `conv`, `recurrent` with the number of the state when it is
            not 0.
        shape: per token, or of one state.
        dtype: as in `Buffer`.
        per_token: False for a state.
        stride: tokens per entry.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per_token: bool
    stride: int = 1


@dataclass(frozen=True, slots=True)
class LayerData:
    """What one layer keeps.

    Args:
        window: tokens that its attention looks back, the current one included; None: all.
        held: empty for a layer that caches nothing or uses another layer's keys.
    """

    window: int | None
    held: tuple[Held, ...]


def observe_config(config: Any, dtype: str) -> tuple[LayerData, ...]:
    """What a model of this config would cache, by layer. Makes no weights: the model is a skeleton
    on the meta device.

    Args:
        config: a transformers text config; not changed.
        dtype: of the activations.

    Raises:
        SpecError: no causal model of this kind, or a layer that no cache layer can serve.

    Cost: building the skeleton, 0.2 s for 32 dense layers and 0.7 s for 61 of experts; remembered
        for the last few configs.
    """
    key = (config.to_json_string(use_diff=False), dtype)
    if key not in _seen:
        _seen[key] = observe_model(_skeleton(config, dtype))
        if len(_seen) > _REMEMBERED:
            _seen.popitem(last=False)
    _seen.move_to_end(key)
    return _seen[key]


def observe_model(model: Any) -> tuple[LayerData, ...]:
    """What `model` caches, by layer; runs it on five tokens.

    Args:
        model: a `transformers` causal language model, on any device; its weights do not matter.

    Raises:
        SpecError: the trial forward failed, or a layer keeps something that is not known.
    """
    import torch

    config = model.config.get_text_config()
    cache = _cache_for(config)
    place = torch.device(model.device)
    try:
        with torch.inference_mode(), place:
            tokens = torch.zeros((1, _TOKENS), dtype=torch.long)
            model(input_ids=tokens, cache=cache, use_cache=True)
    except Exception as error:  # whatever a model's code may raise; told with its cause
        raise SpecError(
            f"a trial run of {_name(config)} failed, so what it caches is not known: "
            f"{type(error).__name__}: {error}"
        ) from error
    states = getattr(cache, "linear_cache", ())
    count = int(config.num_hidden_layers)
    found = []
    for index in range(count):
        known = index < len(cache.layers)
        layer = _read_layer(cache.layers[index], config, index) if known else None
        own = states[index] if index < len(states) else None
        if isinstance(own, torch.Tensor):
            layer = LayerData(None, (_held("recurrent", own.shape[1:], own.dtype, False),))
        found.append(layer or LayerData(None, ()))
    return tuple(found)


def own_cache_class(config: Any) -> type | None:
    """The cache class that models of this config insist on; None for nearly all."""
    where = OWN_CACHES.get(str(getattr(config, "model_type", "")))
    return None if where is None else getattr(import_module(where[0]), where[1])


def _skeleton(config: Any, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    # the experts' matrices as one batched product: the other ways look at values, which meta lacks
    config._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # whatever a model's code may raise; told with its cause
        raise SpecError(
            f"transformers builds no causal language model of {_name(config)}: {error}"
        ) from error


def _cache_for(config: Any) -> Any:
    from transformers import DynamicCache

    own = own_cache_class(config)
    if own is not None:
        return own()
    try:
        return DynamicCache(config=config)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise SpecError(
            f"transformers makes no cache for {_name(config)}: {type(error).__name__}: {error}"
        ) from error


def _read_layer(layer: Any, config: Any, index: int) -> LayerData:
    """What a transformers cache layer holds after the trial run."""
    from transformers import cache_utils as known

    kind = type(layer)
    if getattr(layer, "_layer_type", None) in COMPRESSED:
        return _read_compressed(layer, config, index)
    plain = {
        known.DynamicLayer,
        known.DynamicSlidingWindowLayer,
        known.DynamicIndexedLayer,
        known.LinearAttentionLayer,
        known.LinearAttentionAndFullAttentionLayer,
        known.LinearAttentionAndSlidingWindowAttentionLayer,
    }
    if kind is known.DummyLayer:
        return LayerData(None, ())
    if kind not in plain:
        raise SpecError(
            f"layer {index} of {_name(config)} keeps its data in a {kind.__name__}, which no cache "
            "layer here reads"
        )
    held: list[Held] = []
    for name, tensor in (("k", "keys"), ("v", "values")):
        kept = getattr(layer, tensor, None)
        if kept is not None:
            held.append(_held(name, (kept.shape[1], kept.shape[3]), kept.dtype, True))
    indexer = getattr(layer, "indexer_keys", None)
    if indexer is not None:
        held.append(_held("indexer", indexer.shape[2:], indexer.dtype, True))
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise SpecError(f"layer {index} of {_name(config)} keeps positions beside its indexer keys")
    for name in ("conv", "recurrent"):
        for number, kept in (getattr(layer, f"{name}_states", None) or {}).items():
            if kept is not None:
                whole = _held(name, kept.shape[1:], kept.dtype, False)
                held.append(replace(whole, name=f"{name}{number or ''}"))
    window = int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None
    return LayerData(window, tuple(held))


def _read_compressed(layer: Any, config: Any, index: int) -> LayerData:
    """A window of tokens, and for each series: its entries, one for every `compress_rate` tokens;
    projections and gates of the tokens that are in none yet, kept for the whole window; and where
    groups overlap, the gates that the next group reads, as wide as an entry."""
    stride, window = int(layer.compress_rate), int(layer.sliding_window)
    overlap = getattr(layer, "overlap_gate", {})
    reach = 2 * stride if overlap else stride
    if reach > window:
        raise SpecError(
            f"layer {index} of {_name(config)} looks back {reach} tokens to compress them, further "
            f"than its window of {window}"
        )
    keys = layer.keys
    held = [_held("k", (keys.shape[1], keys.shape[3]), keys.dtype, True)]
    for series, entries in layer.compressed_kv.items():
        entry = _held(f"{series}_entry", entries.shape[2:], entries.dtype, True)
        held.append(replace(entry, stride=stride))
        for part, kept in (("kv", layer.buffer_kv), ("gate", layer.buffer_gate)):
            tensor = kept[series]
            held.append(_held(f"{series}_{part}", tensor.shape[2:], tensor.dtype, True))
        if series in overlap:
            # the gates get a float32 bias per position, so they are float32 from there on
            held.append(Held(f"{series}_prior", entry.shape, "float32", True))
    return LayerData(window, tuple(held))


def _held(name: str, shape: Any, dtype: Any, per_token: bool) -> Held:
    return Held(name, tuple(int(n) for n in shape), str(dtype).removeprefix("torch."), per_token)


def _name(config: Any) -> str:
    return repr(str(getattr(config, "model_type", type(config).__name__)))
