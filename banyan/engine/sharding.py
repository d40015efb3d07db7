"""Tensor parallelism: leaves of a model that is in memory one rank's part of it.

Owns the sharding, by transformers' own plan for the model, and the repetition of key-value heads
where there are fewer of them than ranks. Knows no cache. `torch.distributed` is initialised by the
caller, with one process per rank; `shard` is called by all ranks, at start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from banyan.engine.exchange import MOST_RANKS, ROWWISE
from banyan.engine.selftest import distance, fixed_tokens, rounding_limit
from banyan.errors import ConfigError

_SHARDS_HEADS = "colwise"
"""The style of a projection whose output, and so whose heads, are divided between the ranks."""

_GATHERS = ("colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise")
"""The styles that divide a weight for its memory alone: every rank gets the whole output."""

WHOLE_BELOW = 1 << 18
"""Bytes of a weight below which such a style is not worth its collective. At 4 ranks on 2 cores one
costs 0.3 ms to 5 ms; `tiny-linear` has 32 of 42 a forward that way."""

_COMPARED_TOKENS = 8


# ---- what can be sharded -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Heads:
    """Query and key-value heads of one attention module whose plan divides them."""

    module: nn.Module
    query: int
    key_value: int

    def allows(self, ranks: int) -> bool:
        """Whether each rank can have as many query heads as any other, and the keys for them."""
        many, few = max(self.key_value, ranks), min(self.key_value, ranks)
        return self.query % ranks == 0 and many % few == 0


def check_ranks(config: Any, ranks: int) -> None:
    """Refuse a number of ranks that a model of this config cannot be divided between.

    Args:
        config: a transformers text config; not changed.
        ranks: 1 is always accepted.

    Raises:
        ConfigError: no plan, or heads that do not divide; with the numbers that would do.

    Cost: building a skeleton without weights, see `observe_config`.
    """
    if ranks > 1:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _check(model, _plan_of(model, ranks), ranks)


def _plan_of(model: Any, ranks: int, whole_below: int = WHOLE_BELOW) -> dict[str, str]:
    """Transformers' plan for `model`: by name of each module or parameter that it divides, how.
    What is smaller than `whole_below` and gathered again is left out.

    Raises:
        ConfigError: there is none.
    """
    if not model.tp_plan:
        raise ConfigError(
            "--tp",
            f"transformers has no tensor-parallel plan for {model.config.model_type!r}, so it "
            f"cannot be divided between {ranks} ranks",
            "Use --tp 1",
        )
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if plan.get(name) in _GATHERS and weight is not None and weight.nbytes < whole_below:
            for key in (name, *(f"{name}.{own}" for own, _ in module.named_parameters())):
                plan.pop(key, None)
    return dict(plan)


def _check(model: Any, plan: Mapping[str, str], ranks: int) -> list[_Heads]:
    """The heads that `plan` divides.

    Raises:
        ConfigError: they cannot be divided between `ranks`.
    """
    found = list(_divided_heads(model, plan))
    for heads in found:
        if not heads.allows(ranks):
            most = min(h.query for h in found)
            fits = [n for n in range(1, most + 1) if all(h.allows(n) for h in found)]
            raise ConfigError(
                "--tp",
                f"{ranks} ranks cannot share the {heads.query} query heads and {heads.key_value} "
                f"key-value heads of {model.config.model_type!r}",
                f"Use --tp {' or '.join(map(str, fits))}",
            )
    return found


def _divided_heads(model: Any, plan: Mapping[str, str]) -> Iterator[_Heads]:
    """Every attention module of which `plan` divides the query heads."""
    total = int(getattr(model.config.get_text_config(), "num_attention_heads", 0) or 0)
    for name, module in model.named_modules():
        styles = {part: plan.get(f"{name}.{part}") for part in ("q_proj", "q_b_proj", "kv_b_proj")}
        if _SHARDS_HEADS not in styles.values():
            continue
        width, groups = (
            getattr(module, "head_dim", None),
            getattr(module, "num_key_value_groups", None),
        )
        keys = getattr(module, "k_proj", None)
        if styles["q_proj"] != _SHARDS_HEADS or not width or not groups:
            yield _Heads(module, total, total)  # keys are made for each query head
        elif isinstance(keys, nn.Linear):
            key_value = keys.out_features // width
            yield _Heads(module, key_value * groups, key_value)
        else:  # it uses another layer's keys
            query = module.q_proj.out_features // width
            yield _Heads(module, query, query // groups)


# ---- sharding ------------------------------------------------------------------------------------


def shard(
    model: Any, ranks: int, rank: int, device: torch.device, *, whole_below: int = WHOLE_BELOW
) -> Any:
    """Leave of `model` this rank's part, on `device`; its forward then takes part in collectives.

    The answer of the parts together is compared with that of the whole, so a plan that does not fit
    the model is found here and not in what it says later.

    Args:
        model: whole, on CPU, with the same weights on every rank.
        ranks: at least 2; the size of the default process group.
        rank: this process's.
        whole_below: bytes of a weight below which every rank keeps it whole if its output would be
            gathered again; 0 follows the plan to the letter.

    Returns:
        `model`.

    Raises:
        ConfigError: it cannot be divided so, or answers otherwise when it is.
        ValueError: the default process group is not initialised, or is another one.

    Mutates: every parameter that the plan divides, and the forward of its module.

    Cost: two forwards of 8 tokens, one of them of the whole model on CPU.
    """
    group = torch.distributed
    if not group.is_initialized() or (group.get_world_size(), group.get_rank()) != (ranks, rank):
        raise ValueError(f"torch.distributed is not initialised as rank {rank} of {ranks}")
    plan = _plan_of(model, ranks, whole_below)
    heads = _check(model, plan, ranks)
    whole = _answer(model)
    for one in heads:
        _repeat_keys(one, ranks)
    if device.type == "cpu" and ranks <= MOST_RANKS:
        plan = {name: ROWWISE if style == "rowwise" else style for name, style in plan.items()}
    _divide(model, init_device_mesh(device.type, (ranks,)), plan)
    model.to(device)
    _compare(model, whole, ranks)
    return model


def _repeat_keys(heads: _Heads, ranks: int) -> None:
    """Give every rank a key-value head where there are fewer heads than ranks.

    Rank r computes the query heads from r * query / ranks on, and all of them read the one
    key-value head r * key_value / ranks; so each head is repeated for the ranks that read it.

    Mutates: `k_proj` and `v_proj` of the module, and the number of query heads that share a key.
    """
    if heads.key_value >= ranks:
        return
    times = ranks // heads.key_value
    for name in ("k_proj", "v_proj"):
        projection = getattr(heads.module, name, None)
        if isinstance(projection, nn.Linear):
            for key, parameter in list(projection.named_parameters(recurse=False)):
                rows = parameter.detach()
                rows = rows.view(heads.key_value, -1, *rows.shape[1:])
                longer = rows.repeat_interleave(times, 0).flatten(0, 1)
                setattr(projection, key, nn.Parameter(longer, requires_grad=False))
            projection.out_features *= times
    heads.module.num_key_value_groups = heads.query // ranks  # type: ignore[assignment]


def _divide(model: Any, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Apply `plan`, tied weights included: transformers' own function skips their later names."""
    ties = _untie(model)
    apply_tensor_parallelism(model, mesh, plan)
    for (owner, key), (first, first_key) in ties:
        mine, shared = owner._parameters[key], first._parameters[first_key]
        if getattr(mine, "placements", None) == getattr(shared, "placements", None):
            owner._parameters[key] = shared


def _untie(model: Any) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """Give each name of a tied weight a parameter of its own over the same memory.

    Returns:
        (owner and key of the later name, of the first) by tie.
    """
    seen: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                module._parameters[key] = nn.Parameter(parameter.detach(), requires_grad=False)
                ties.append(((module, key), seen[id(parameter)]))
            else:
                seen[id(parameter)] = module, key
    return ties


def _answer(model: Any) -> Tensor:
    """Logits after a few fixed tokens, float32[vocabulary] on CPU."""
    tokens = fixed_tokens(int(model.config.get_text_config().vocab_size), _COMPARED_TOKENS)
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return logits[0, -1].float().cpu()


def _compare(model: Any, whole: Tensor, ranks: int) -> None:
    kind = model.config.model_type
    try:
        parts = _answer(model)
    except Exception as error:  # whatever a model's code may raise; told with its cause
        raise ConfigError(
            "--tp",
            f"{kind!r} fails when it is divided between {ranks} ranks by transformers' plan: "
            f"{type(error).__name__}: {error}",
            "Use --tp 1",
        ) from error
    difference = distance(whole, parts)
    limit = rounding_limit(str(model.dtype).removeprefix("torch."))
    if not difference <= limit:  # also when it is not a number
        raise ConfigError(
            "--tp",
            f"the answer of {kind!r} changes by {difference:.2g} standard deviations of its logits "
            f"(at most {limit} is rounding) when it is divided between {ranks} ranks by "
            "transformers' plan",
            "Use --tp 1",
        )
