"""SGLang's unified radix tree behind the interface that is measured, on a machine without a GPU.

Owns the stand-ins for what a server would give it: allocators that count instead of listing what is
free, so that the tree is measured and not the copying of free lists; a configuration; and, where
they are absent, packages that it imports only to decorate GPU kernels. Imports SGLang when `start`
is called. Written for 0.5.23, whose wheel has the Rust core.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from array import array
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from benchmarks.peers.banyan_side import WINDOW

CORES = ("rust", "python")
POOL_TOKENS = 1 << 20
STATES = 1 << 15

KINDS = {"full": ("FULL",), "full+window": ("FULL", "SWA"), "full+state": ("FULL", "MAMBA")}

_KERNEL_PACKAGES = ("triton", "torchvision")


class Missing(Exception):
    """SGLang, or something that it needs, cannot be imported by this Python."""


def start() -> dict[str, str]:
    """Import SGLang and give it a configuration; its version and torch's.

    Raises:
        Missing: saying what could not be imported.
    """
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", category=UserWarning)
    if importlib.util.find_spec("sglang") is None:
        raise Missing("No module named 'sglang'")
    try:
        import torch

        _stand_in(_KERNEL_PACKAGES)
        from sglang.srt import runtime_context
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: F401
        from sglang.srt.server_args import ServerArgs
        from sglang.version import __version__
    except ImportError as error:
        raise Missing(str(error)) from error
    torch.set_num_threads(1)
    args = ServerArgs(model_path="none", device="cpu")
    args._mamba_cache_chunk_size = 64  # it would be read from the model otherwise
    runtime_context.publish(args, role="scheduler")
    return {"sglang": __version__, "torch": torch.__version__}


def _stand_in(names: Sequence[str]) -> None:
    """Answer imports of the packages in `names` that are not installed."""
    if importlib.util.find_spec("transformers"):
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()  # it remembers that there is none
    absent = {name for name in names if importlib.util.find_spec(name) is None}
    sys.meta_path.append(_StandIn(absent))


class _Blank(ModuleType):
    """A module that has a class for every capitalised name, and a mock for every other."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class _StandIn(MetaPathFinder, Loader):
    """Finds the packages `names` and all their modules, in which every name is there."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Blank(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Slots:
    """Gives out slot numbers in order and counts what comes back.

    Stands where SGLang has an allocator of `Full` slots, of window slots or of states.
    """

    device = "cpu"
    debug_mode = False

    def __init__(self, size: int, page_size: int = 1) -> None:
        self.size = self.size_full = size
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        self._next, self._free = self.page_size, self.size

    def take(self, count: int) -> Any:
        """int64[count] of consecutive slots."""
        import torch

        assert count <= self._free and self._next + count <= self.size + self.page_size, count
        self._next, self._free = self._next + count, self._free - count
        return torch.arange(self._next - count, self._next, dtype=torch.int64)

    def available_size(self) -> int:
        return self._free

    def free(self, slots: Any) -> None:
        self._free += slots.numel()

    def free_segment(self, slots: Any, *, start_pos: int) -> None:
        self._free += slots.numel()

    def free_page_ids(self, pages: Any) -> None:
        self._free += pages.numel() * self.page_size


def _window_allocator(page_size: int) -> Any:
    """SGLang's own keeper of the map from `Full` slots to window slots, over counters."""
    import torch
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    pool = MagicMock(spec=BaseSWAKVPool, swa_req_ring_size=None)
    both = SWATokenToKVPoolAllocator(
        POOL_TOKENS, POOL_TOKENS, page_size, torch.bfloat16, "cpu", pool, need_sort=False
    )
    both.full_attn_allocator = Slots(POOL_TOKENS, page_size)
    both.swa_attn_allocator = Slots(POOL_TOKENS, page_size)
    mapping = both.full_to_swa_index_mapping
    pool.full_to_swa_index_mapping = mapping
    both.translate_loc_from_full_to_swa = lambda slots: mapping[slots]
    return both


class SglangSide:
    """One tree under test.

    Args:
        core: one of `CORES`; both are called through SGLang's Python interface.
        components: a key of `KINDS`.
    """

    def __init__(self, core: str, components: str, page_size: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        class Requests(HybridReqToTokenPool):  # type: ignore[misc]
            """Only what the tree asks of the table of running requests: its states."""

            def __init__(self, states: Slots) -> None:
                self.mamba_allocator = states

        self.name = f"sglang-{core}"
        self.page_size = page_size
        self._key, self._match_params = RadixKey, MatchPrefixParams
        self._insert_params, self._evict_params = InsertParams, EvictParams
        self._windows = components == "full+window"
        self._states = Slots(STATES) if components == "full+state" else None
        self._slots: Any = (
            _window_allocator(page_size) if self._windows else Slots(POOL_TOKENS, page_size)
        )
        self._cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=Requests(self._states) if self._states else SimpleNamespace(),
                token_to_kv_pool_allocator=self._slots,
                page_size=page_size,
                tree_components=tuple(ComponentType[kind] for kind in KINDS[components]),
                sliding_window_size=WINDOW if self._windows else None,
                enable_mamba_extra_buffer=self._states is not None and page_size > 1,
                tree_core_backend=core,
            )
        )
        built = type(self._cache.tree_core).__name__
        if built.startswith("Rust") != (core == "rust"):
            raise Missing(f"SGLang has no {core} core here: it built {built}")
        self._held: list[tuple[Any, Any]] = []

    # ---- not timed -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Start over with an empty tree."""
        self._held.clear()
        self._cache.reset()
        self._slots.clear()
        if self._states is not None:
            self._states.clear()

    def query(self, tokens: array[int]) -> array[int]:
        """A key of its own, no object that the tree may have kept."""
        return tokens[:]

    def insertion(self, tokens: array[int], cached: int) -> Any:
        """What a request offers that has computed `tokens` beyond the first `cached`."""
        import torch

        slots = self._fresh(len(tokens) - cached)
        if cached:
            hit = self._found(tokens[:cached])
            assert hit.device_prefix_len == cached, (hit, cached)
            slots = torch.cat((self._cache.path_device_indices(hit.last_device_node), slots))
        state = self._states.take(1) if self._states is not None else None
        return tokens[:], slots, state, cached

    def _fresh(self, count: int) -> Any:
        if not self._windows:
            return self._slots.take(count)
        full = self._slots.full_attn_allocator.take(count)
        self._slots.set_full_to_swa_mapping(full, self._slots.swa_attn_allocator.take(count))
        return full

    def node_of(self, query: array[int]) -> Any:
        """The node that ends where `query` can be resumed."""
        return self._found(query).last_device_node

    def path_nodes(self, query: array[int]) -> int:
        """How many nodes `query` passes."""
        return len(self._cache.tree_core.collect_path_info([self.node_of(query)])[0])

    def lock(self, node: Any) -> None:
        """Lock `node` until `release`."""
        self._held.append((node, self._cache.inc_lock_ref(node)))

    def release(self) -> None:
        """Undo every `lock`."""
        while self._held:
            node, receipt = self._held.pop()
            self._cache.dec_lock_ref(node, receipt.to_dec_params())

    def check(self) -> None:
        """SGLang's own check of its tree."""
        self._cache.tree_core.sanity_check([], [])

    def _found(self, query: array[int]) -> Any:
        return self._cache.match_prefix(self._match_params(key=self._key(query)))

    # ---- timed -----------------------------------------------------------------------------------

    def make_key(self, tokens: list[int]) -> array[int]:
        """A request's key from its tokens as they come from a tokenizer."""
        return array("q", tokens)

    def match(self, query: array[int]) -> int:
        """Tokens that need not be computed."""
        hit = self._cache.match_prefix(self._match_params(key=self._key(query)))
        return int(hit.device_prefix_len)

    def match_slots(self, query: array[int]) -> Any:
        """A match, and the slots of what it found: int64[tokens]."""
        hit = self._cache.match_prefix(self._match_params(key=self._key(query)))
        return self._cache.path_device_indices(hit.last_device_node)

    def hold(self, query: array[int]) -> int:
        """What a request costs that starts and ends: match, lock, unlock."""
        cache = self._cache
        hit = cache.match_prefix(self._match_params(key=self._key(query)))
        node = hit.last_device_node
        cache.dec_lock_ref(node, cache.inc_lock_ref(node).to_dec_params())
        return int(hit.device_prefix_len)

    def insert(self, prepared: Any) -> int:
        """Publish; returns how many tokens the tree had."""
        tokens, slots, state, cached = prepared
        params = self._insert_params(
            key=self._key(tokens),
            value=slots,
            mamba_value=state,
            prev_prefix_len=cached,
            inserted_len=cached,
        )
        return int(self._cache.insert(params).prefix_len)

    def evict(self, tokens: int) -> int:
        """Free that many tokens; returns how many were freed."""
        return int(self._cache.evict(self._evict_params(num_tokens=tokens)).num_tokens_evicted)

    def lock_unlock(self, node: Any) -> None:
        """Protect what a reader of the node's end needs, and let go of it."""
        cache = self._cache
        cache.dec_lock_ref(node, cache.inc_lock_ref(node).to_dec_params())
