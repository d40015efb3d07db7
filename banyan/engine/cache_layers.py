"""A `transformers` cache whose layers read and write Banyan's device pools.

Owns the adapter between what attention and state modules call (`update`, `get_conv_state`, ...)
and pool tensors. What a layer is follows from the spec alone: it pages if a `Full` or `Window`
component has buffers of it, keeps states if a `Point` component has, or both; no model family is
named. Used by the runner, on the thread that runs the model: `begin`, forward, `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
)

from banyan.engine.compressed import GroupPlan, GroupStore, plan_groups
from banyan.engine.plans import PagePlan, SeqInput, StatePlan, plan_pages, plan_states
from banyan.engine.scan import hand_over
from banyan.errors import SpecError
from banyan.pools.device import DevicePool
from banyan.spec import CacheSpec, Component, Window
from banyan.tiers.ops import CopyTicket


class Pass:
    """What the layers share during one forward: the plans by component (of groups of tokens: by
    stride), and whom to wait for."""

    __slots__ = ("groups", "pages", "states", "tickets")

    def __init__(self) -> None:
        self.groups: dict[int, GroupPlan] = {}
        self.pages: dict[int, PagePlan] = {}
        self.states: dict[int, StatePlan] = {}
        self.tickets: list[CopyTicket] = []

    def wait(self, layer: int) -> None:
        """Return once no load-back still writes what `layer` reads.

        Raises:
            CopyError: a load-back failed.
        """
        for ticket in self.tickets:
            ticket.wait_layer(layer)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, in the pages of a `Full` or `Window` component; for sparse
    attention the indexer's keys beside them, in the same slots.

    Args:
        shared: the current forward.
        layer: the model layer.
        component: index of the component that owns the layer's `k` and `v`.
        pool: that component's pool.
    """

    def __init__(self, shared: Pass, layer: int, component: int, pool: DevicePool) -> None:
        self._shared, self._layer, self._component = shared, layer, component
        self._pages = {name: t for (at, name), t in pool.buffers.items() if at == layer}
        self._rows = {name: pages.flatten(0, 1) for name, pages in self._pages.items()}
        self.is_sliding = isinstance(pool.component.reach, Window)
        self.keys = self.values = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pools exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new entries and return all visible ones, oldest first.

        Args:
            key_states, value_states: dtype[batch, heads, new_len, head_dim].

        Returns:
            dtype[batch, heads, key_len, head_dim] each; may be views of the pool, to be read
            before the next forward.

        Raises:
            CopyError: the load-back that these pages wait for failed.

        Mutates: the pool rows of the new tokens.
        """
        plan = self._ready_plan()
        keys = self._store_and_take("k", key_states.transpose(1, 2), plan)
        values = self._store_and_take("v", value_states.transpose(1, 2), plan)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the indexer's keys of the new tokens and return all, oldest first.

        Args:
            indexer_key_states: dtype[batch, new_len, *shape].

        Returns:
            dtype[batch, key_len, *shape]; may be a view of the pool.

        Raises:
            CopyError: the load-back that these pages wait for failed.

        Mutates: the pool rows of the new tokens.
        """
        return self._store_and_take("indexer", indexer_key_states, self._ready_plan())

    def _ready_plan(self) -> PagePlan:
        """This forward's plan, once no load-back writes what the layer reads."""
        if self._shared.tickets:
            self._shared.wait(self._layer)
        return self._shared.pages[self._component]

    def _store_and_take(self, name: str, new: Tensor, plan: PagePlan) -> Tensor:
        """Write dtype[batch, new_len, *shape], return dtype[batch, key_len, *shape]."""
        rows, entries = self._rows[name], new[:, plan.skip :].flatten(0, 1)
        if isinstance(plan.write, slice):
            rows[plan.write] = entries
        else:
            rows.index_copy_(0, plan.write, entries)
        return plan.read.take(self._pages[name], rows)

    def get_seq_length(self) -> int:
        """Tokens before the new ones (of the longest sequence; the others are padded to it)."""
        return self._shared.pages[self._component].start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return, and the position of the first."""
        plan = self._shared.pages[self._component]
        return plan.key_len, plan.key_start

    def get_max_length(self) -> int:
        """-1, transformers' word for unbounded: leases bound it."""
        return -1


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The states of one layer, in the slots of a `Point` component.

    A module may change in place what it is given, or hand a new tensor back; either way the result
    ends in the `write` slot and the `read` slot keeps its bytes. For a batch of one the module gets
    the `write` slot itself, preset from `read`; for more, a stacked copy that `finish` scatters.
    """

    def __init__(self, shared: Pass, layer: int, component: int, pool: DevicePool) -> None:
        self._pass, self._index, self._states_of = shared, layer, component
        self._buffers = {name: t for (at, name), t in pool.buffers.items() if at == layer}
        self._held: dict[str, Tensor] = {}
        numbers = (name[len(name.rstrip(_DIGITS)) :] or "0" for name in self._buffers)
        self.number_of_states = 1 + max(map(int, numbers))
        self.record_past = False

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the pools exist."""

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """By state number, whether the forward has a state to start from."""
        known = self._pass.states[self._states_of].read is not None
        return dict.fromkeys(range(self.number_of_states), known)

    def current(self, name: str) -> Tensor | None:
        """The state to start from, dtype[batch, *shape]; None when there is none.

        Raises:
            CopyError: the load-back that these states wait for failed.

        Mutates: for a batch of one, the `write` slot.
        """
        if name not in self._held:
            plan = self._pass.states[self._states_of]
            if plan.read is None:
                return None
            self._held[name] = self._load(self._buffers[name], plan)
        return self._held[name]

    def _load(self, buffer: Tensor, plan: StatePlan) -> Tensor:
        self._pass.wait(self._index)
        if isinstance(plan.read, int) and isinstance(plan.write, int):
            state = buffer[plan.write : plan.write + 1]
            if plan.read != plan.write:
                state.copy_(buffer[plan.read : plan.read + 1])
            return state
        assert isinstance(plan.read, Tensor)
        state = buffer.index_select(0, plan.read)
        if plan.fresh is not None:
            state[plan.fresh] = 0
        return state

    def store(self, name: str, state: Tensor) -> Tensor:
        """Make `state`, dtype[batch, *shape], the one the forward ends with."""
        write = self._pass.states[self._states_of].write
        if not isinstance(write, int):
            self._held[name] = state
            return state
        target = self._buffers[name][write : write + 1]
        target.copy_(state)
        self._held[name] = target
        return target

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Append new inputs of a causal convolution, keep the last ones.

        Args:
            conv_states: dtype[batch, channels, new_len].

        Returns:
            dtype[batch, channels, n]: previous state (zeros to the kernel's width if there is
            none) and new inputs.
        """
        name = state_name("conv", state_idx)
        width = self._buffers[name].shape[-1]
        previous = self.current(name)
        if previous is not None:
            full = torch.cat([previous, conv_states], dim=-1)
        else:
            short = max(0, width - conv_states.shape[-1])
            full = torch.nn.functional.pad(conv_states, (short, 0)) if short else conv_states
        self.store(name, full[..., -width:])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the state after the new tokens, dtype[batch, *shape]."""
        return self.store(state_name("recurrent", state_idx), recurrent_states)

    def finish(self) -> None:
        """Write what is still only held, and forget it."""
        write = self._pass.states[self._states_of].write
        if isinstance(write, Tensor):
            for name, state in self._held.items():
                buffer = self._buffers[name]
                buffer.index_copy_(0, write, state.to(buffer.dtype))
        self._held.clear()

    def abandon(self) -> None:
        """Forget what a failed forward held."""
        self._held.clear()


class CompressedLayer(PagedLayer, GroupStore):
    """A window of tokens whose keys are also their values, and compressed entries of all before."""

    def __init__(
        self, shared: Pass, layer: int, full: tuple[int, DevicePool], window: tuple[int, DevicePool]
    ) -> None:
        PagedLayer.__init__(self, shared, layer, *window)
        GroupStore.__init__(self, shared, layer, full, window)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """As `PagedLayer.update`, for keys alone."""
        plan = self._ready_plan()
        keys = self._store_and_take("k", key_states.transpose(1, 2), plan).transpose(1, 2)
        return keys, keys


class HybridLayer(PagedLayer, StateLayer):
    """A layer with both attention and states; each half keeps its own component."""

    def __init__(
        self, shared: Pass, layer: int, paged: tuple[int, DevicePool], state: tuple[int, DevicePool]
    ) -> None:
        PagedLayer.__init__(self, shared, layer, *paged)
        StateLayer.__init__(self, shared, layer, *state)


class BanyanCache(Cache):  # type: ignore[misc]
    """The cache object that a model's forward is given; one per runner, bound to its pools.

    Args:
        spec: the model's components.
        pools: device pools by component index.
        num_layers: layers of the model; those without buffers cache nothing.

    Attributes:
        hands_over: recurrent states are also given to the model's scans (`banyan.engine.scan`).

    Raises:
        SpecError: a layer has buffers that no layer class here reads.
    """

    def __init__(self, spec: CacheSpec, pools: Sequence[DevicePool], num_layers: int) -> None:
        self._spec, self._shared = spec, Pass()
        self.hands_over = False
        self._device = pools[0].device
        self._used = [i for i, c in enumerate(spec.components) if c.buffers]
        self._strides = sorted({b.stride for b in spec.components[0].buffers} - {1})
        layers = [_make_layer(spec, pools, self._shared, i) for i in range(num_layers)]
        self._state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        Cache.__init__(self, layers=layers)

    def begin(self, seqs: Sequence[SeqInput]) -> None:
        """Point all layers at this forward's slots.

        Raises:
            LeaseError: a table does not cover what the layers will read and write.
        """
        shared, spec = self._shared, self._spec
        for layer in self._state_layers:
            layer.abandon()
        if self.hands_over:
            hand_over(None)
        shared.tickets = [seq.ticket for seq in seqs if seq.ticket is not None]
        for i in self._used:
            reach = spec.components[i].reach
            if reach.page_shaped:
                shared.pages[i] = plan_pages(seqs, i, reach, spec.page_size, self._device)
            else:
                shared.states[i] = plan_states(seqs, i, self._device)
        for stride in self._strides:
            shared.groups[stride] = self._plan_groups(seqs, stride)

    @property
    def one_at_a_time(self) -> bool:
        """Whether a forward can take one sequence only."""
        return bool(self._strides)

    def _plan_groups(self, seqs: Sequence[SeqInput], stride: int) -> GroupPlan:
        """Plan a stride's layers: their entries are in the first component, their tokens in the one
        window component that these layers have."""
        parts = self._spec.components
        layer = next(b.layer for b in parts[0].buffers if b.stride == stride)
        (window,) = (i for i in self._spec.layer_components(layer) if i)
        return plan_groups(seqs[0], 0, window, self._spec.page_size, stride, self._device)

    def finish(self) -> None:
        """Write the states that modules changed in place; call once the forward has returned."""
        for layer in self._state_layers:
            layer.finish()
        if self.hands_over:
            hand_over(None)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A convolution state of the layer, dtype[batch, channels, kernel], or None at token 0."""
        state: Tensor | None = self.layers[layer_idx].current(state_name("conv", state_idx))
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent state of the layer, dtype[batch, *shape], or None at token 0."""
        state: Tensor | None = self.layers[layer_idx].current(state_name("recurrent", state_idx))
        if self.hands_over:
            hand_over(state)
        return state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """`get_recurrent_state`, as models with a cache class of their own call it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """`update_recurrent_state` as those models call it."""
        self.layers[layer_idx].update_recurrent_state(linear_cache)


def make_cache(
    spec: CacheSpec, pools: Sequence[DevicePool], num_layers: int, own: type | None
) -> BanyanCache:
    """The cache for a model; of its own cache class as well, where it insists on one.

    Raises:
        SpecError: a layer has buffers that no layer class here reads.
    """
    kind: Callable[..., BanyanCache] = BanyanCache
    if own is not None:
        kind = type(f"Banyan{own.__name__}", (BanyanCache, own), {"__len__": Cache.__len__})
    return kind(spec, pools, num_layers)


def state_name(kind: str, number: int) -> str:
    """The buffer of state `number` of a layer: `conv`, `recurrent`, and `conv1`, ... for others."""
    return f"{kind}{number or ''}"


_DIGITS = "0123456789"
_PAGED_BUFFERS = ({"k", "v"}, {"k", "v", "indexer"})
_STATE_BUFFERS = {"conv", "recurrent"}


def _is_compressed(component: Component, layer: int) -> bool:
    """Whether the layer's buffers here are those of compressed attention: entries of whole groups,
    or the projections that make them."""
    own = [b for b in component.buffers if b.layer == layer]
    return any(b.stride > 1 or b.name.endswith("_gate") for b in own)


def _make_layer(spec: CacheSpec, pools: Sequence[DevicePool], shared: Pass, layer: int) -> Any:
    """The cache layer for what the spec's components keep of `layer`."""
    paged: list[tuple[int, DevicePool]] = []
    state: list[tuple[int, DevicePool]] = []
    for i in spec.layer_components(layer):
        component = spec.components[i]
        names = {b.name for b in component.buffers if b.layer == layer}
        page_shaped = component.reach.page_shaped
        if page_shaped:
            known = names in _PAGED_BUFFERS or _is_compressed(component, layer)
        else:
            known = {name.rstrip(_DIGITS) for name in names} <= _STATE_BUFFERS
        kind = paged if page_shaped else state
        if not known or (kind and not _is_compressed(spec.components[0], layer)):
            raise SpecError(
                f"layer {layer}: no cache layer reads buffers {sorted(names)} of component "
                f"{component.name!r}; a layer has at most k, v and indexer in one page-shaped "
                "component, conv and recurrent states in one point component"
            )
        kind.append((i, pools[i]))
    if len(paged) == 2:
        return CompressedLayer(shared, layer, paged[0], paged[1])
    if paged and state:
        return HybridLayer(shared, layer, paged[0], state[0])
    if paged:
        return PagedLayer(shared, layer, *paged[0])
    if state:
        return StateLayer(shared, layer, *state[0])
    return DummyLayer()
