"""Sizing: the budget bounds the sum, the split follows the mix, and refusals name what works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from banyan.errors import ConfigError
from banyan.pools.assembler import assemble
from banyan.pools.plan import reach_pages
from banyan.pools.sizing import BYTELESS_TOKENS, plan_sizes
from banyan.spec import Buffer, CacheSpec, Component, Full, Point, Window
from tests.support.node import node_stacks, sharing_ranks
from tests.support.stacks import byteless_spec, hybrid_spec

DTYPES = st.sampled_from(["float32", "bfloat16", "uint8"])


def plan(spec: CacheSpec, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "device_bytes": 4 << 20,
        "host_bytes": 8 << 20,
        "max_running": 2,
        "chunk": 32,
        "state_interval": None,
    }
    return plan_sizes(spec, **(options | changes))


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    """Random specs: any of the three reaches, one or two windows, a Full with or without bytes."""

    def buffers(layers: range) -> tuple[Buffer, ...]:
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
        dtype = draw(DTYPES)
        return tuple(
            Buffer("k", layer, shape, dtype, replicated=draw(st.booleans())) for layer in layers
        )

    parts = [Component("full", Full(), buffers(range(draw(st.integers(0, 3)))))]
    for index in range(draw(st.integers(0, 2))):
        size = draw(st.integers(2, 300))
        layers = range(10 * (index + 1), 10 * (index + 1) + draw(st.integers(1, 2)))
        parts.append(Component(f"window{index}", Window(size), buffers(layers)))
    if draw(st.booleans()):
        parts.append(Component("state", Point(), buffers(range(50, 50 + draw(st.integers(1, 3))))))
    return CacheSpec(tuple(parts), draw(st.sampled_from([1, 3, 16, 64])))


OPTIONS = st.fixed_dictionaries(
    {
        "device_bytes": st.integers(0, 3 << 20),
        "host_bytes": st.integers(0, 3 << 20),
        "max_running": st.integers(1, 40),
        "chunk": st.integers(1, 600),
        "state_interval": st.none() | st.integers(1, 5000),
    }
)


def slots_needed(spec: CacheSpec, chunk: int) -> list[int]:
    """Slots of one request of one chunk and its reach, counted apart from the product's code."""
    page = spec.page_size
    pages = -(-chunk // page) + 1
    windows = [-(-(c.reach.size - 1) // page) for c in spec.components if hasattr(c.reach, "size")]
    longest = max(windows, default=0)
    needed = []
    for part in spec.components:
        if isinstance(part.reach, Point):
            needed.append(3)
        elif isinstance(part.reach, Window):
            needed.append(-(-(part.reach.size - 1) // page) + pages)
        else:
            needed.append(longest + pages)
    return needed


@settings(max_examples=150, deadline=None)
@given(specs(), OPTIONS)
def test_the_sum_never_exceeds_the_budget(spec: CacheSpec, options: dict[str, Any]) -> None:
    """C128, INV-22: over all pools of a tier; what is left over is less than the smallest record;
    and one request of one chunk always fits."""
    try:
        sizes = plan_sizes(spec, **options)
    except ConfigError:
        return
    assert sizes.device_bytes <= options["device_bytes"]
    assert sizes.host_bytes <= options["host_bytes"]
    records = [s.record_bytes for s in sizes.device if s.record_bytes]
    for spent, budget in ((sizes.device_bytes, "device_bytes"), (sizes.host_bytes, "host_bytes")):
        if records and options[budget]:
            assert options[budget] - spent < min(records)
    needed = slots_needed(spec, options["chunk"])
    assert all(s.slots >= n for s, n in zip(sizes.device, needed, strict=True))


@settings(max_examples=25, deadline=None)
@given(specs(), OPTIONS)
def test_assemble_takes_exactly_the_plan(spec: CacheSpec, options: dict[str, Any]) -> None:
    """C128: the tensors' own bytes are the plan's."""
    try:
        sizes = plan_sizes(spec, **options)
    except ConfigError:
        return
    stack = assemble(spec, sizes)
    assert [p.nbytes for p in stack.device] == [s.total_bytes for s in sizes.device]
    assert [p.nbytes for p in stack.host] == [s.total_bytes for s in sizes.host]
    assert [a.capacity for a in stack.device_slots] == [s.slots for s in sizes.device]
    assert stack.device_bytes <= options["device_bytes"]
    assert stack.host_bytes <= options["host_bytes"]


@settings(max_examples=60, deadline=None)
@given(specs(), OPTIONS)
def test_a_refusal_names_the_smallest_budget_that_works(
    spec: CacheSpec, options: dict[str, Any]
) -> None:
    """C137: with the option's name; one byte less is still refused."""
    assume(any(c.buffers for c in spec.components))
    options = options | {"device_bytes": 1, "host_bytes": 1}
    for option, name in (("--device-bytes", "device_bytes"), ("--host-bytes", "host_bytes")):
        try:
            plan_sizes(spec, **options)
            continue  # a host boundary of one byte fits already
        except ConfigError as refused:
            assert refused.option == option
            found = re.search(r"at least ([\d,]+)", refused.fix)
            assert found
        smallest = int(found.group(1).replace(",", ""))
        with pytest.raises(ConfigError, match=option):
            plan_sizes(
                spec,
                **(
                    options | {name: smallest - 1, "host_bytes": 0}
                    if name == "device_bytes"
                    else options | {name: smallest - 1}
                ),
            )
        options = options | {name: smallest}
    plan_sizes(spec, **options)


@settings(max_examples=80, deadline=None)
@given(specs(), OPTIONS, st.data())
def test_a_split_is_obeyed_and_bounded(
    spec: CacheSpec, options: dict[str, Any], data: st.DataObject
) -> None:
    sized = [c.name for c in spec.components if c.buffers]
    assume(sized)
    split = {
        name: data.draw(st.floats(0.01, 1 / len(sized)), label=name)
        for name in data.draw(st.sets(st.sampled_from(sized)), label="named")
    }
    budget = options["device_bytes"]
    try:
        sizes = plan_sizes(spec, **options, device_split=split)
    except ConfigError as refused:
        assert refused.option in ("--device-bytes", "--device-split", "--host-bytes")
        found = re.search(r"at least ([\d,]+)", refused.fix)
        if refused.option == "--device-bytes":
            assert found
            enough = int(found.group(1).replace(",", ""))
            plan_sizes(
                spec, **(options | {"device_bytes": enough, "host_bytes": 0}), device_split=split
            )
        return
    assert sizes.device_bytes <= budget
    for size in sizes.device:
        if size.component in split:
            assert size.total_bytes <= split[size.component] * budget
            assert size.total_bytes > split[size.component] * budget - size.record_bytes - 1


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"device_bytes": -1}, "--device-bytes"),
        ({"host_bytes": -5}, "--host-bytes"),
        ({"max_running": 0}, "--max-running"),
        ({"chunk": 0}, "--chunk"),
        ({"state_interval": 0}, "--state-interval"),
        ({"ranks": 0}, "--tp"),
        ({"device_split": {"ful": 0.5}}, "--device-split"),
        ({"device_split": {"full": 0.0}}, "--device-split"),
        ({"device_split": {"full": 1.5}}, "--device-split"),
        ({"device_split": {"full": 0.7, "window": 0.7}}, "--device-split"),
        ({"device_split": {"full": 0.5, "window": 0.5}}, "--device-split"),
        ({"host_split": {"full": 0.5}, "host_bytes": 0}, "--host-split"),
        ({"device_split": {"full": 1e-6}}, "--device-bytes"),
    ],
)
def test_bad_options_are_refused_by_name(changes: dict[str, Any], option: str) -> None:
    """C137, INV-22."""
    with pytest.raises(ConfigError) as refused:
        plan(hybrid_spec(), **changes)
    assert refused.value.option == option
    assert refused.value.fix


def test_shares_that_sum_to_one_but_for_rounding_are_taken() -> None:
    split = {"full": 0.7, "window": 0.2, "state": 0.1}
    assert sum(split.values()) != 1
    sizes = plan(hybrid_spec(), device_split=split)
    assert 0.99 * (4 << 20) < sizes.device_bytes <= 4 << 20


def test_a_component_without_bytes_never_limits() -> None:
    sizes = plan(byteless_spec())
    full, state = sizes.device
    assert full.total_bytes == 0
    assert full.slots * 4 >= BYTELESS_TOKENS
    assert sizes.device_limit == sizes.host_limit == "state"
    assert full.slots * 4 >= (state.slots - 2 * 3) * 512


def test_the_split_follows_the_mix() -> None:
    """Tokens between checkpoints decide how many states there are per token."""
    often = plan(hybrid_spec(), state_interval=16)
    rarely = plan(hybrid_spec(), state_interval=2048)
    assert often.host[2].slots > 20 * rarely.host[2].slots
    for sizes, interval in ((often, 16), (rarely, 2048)):
        tokens, states = sizes.host[0].slots * 4, sizes.host[2].slots
        assert tokens / states == pytest.approx(interval, rel=0.15)


def test_running_requests_come_first() -> None:
    few, many = plan(hybrid_spec(), max_running=1), plan(hybrid_spec(), max_running=30)
    assert many.device[2].slots - few.device[2].slots > 80
    assert many.host == few.host


def test_too_many_running_for_the_budget_is_no_refusal() -> None:
    sizes = plan(hybrid_spec(), device_bytes=60_000, max_running=1000)
    assert sizes.device_bytes <= 60_000
    assert sizes.device[2].slots >= 3


def test_the_limiting_pool_is_the_one_starved() -> None:
    for name in ("full", "window", "state"):
        sizes = plan(hybrid_spec(), device_split={name: 0.002}, host_split={name: 0.001})
        assert (sizes.device_limit, sizes.host_limit) == (name, name)


def test_the_table_says_what_fits() -> None:
    spec = hybrid_spec()
    sizes = plan(spec)
    rows = sizes.table_rows()
    assert [(r.tier, r.component) for r in rows] == [
        (tier, c.name) for tier in ("device", "host") for c in spec.components
    ]
    full, window, state = rows[:3]
    assert (full.tokens, full.windows, full.states) == (full.slots * 4, None, None)
    assert (window.tokens, window.windows) == (window.slots * 4, window.slots // 2)
    assert (state.tokens, state.states) == (None, state.slots)
    for tier, spent in (("device", sizes.device_bytes), ("host", sizes.host_bytes)):
        own = [r for r in rows if r.tier == tier]
        assert sum(r.bytes for r in own) == spent
        assert sum(r.share for r in own) == pytest.approx(1)
        assert sum(r.limiting for r in own) == 1


def test_no_host_bytes_means_no_host_tier() -> None:
    sizes = plan(hybrid_spec(), host_bytes=0)
    assert sizes.host == ()
    assert sizes.host_limit is None
    assert {r.tier for r in sizes.table_rows()} == {"device"}


def test_reach_pages_counts_the_pages_before_the_boundary() -> None:
    assert [reach_pages(Window(w), 4) for w in (2, 5, 6, 9, 10)] == [1, 1, 2, 2, 3]
    assert reach_pages(Full(), 4) == reach_pages(Point(), 4) == 0


def divided(spec: CacheSpec, ranks: int, replicated: set[str]) -> CacheSpec:
    """What each of `ranks` keeps of a spec: equal buffers where named, else a shard of the first
    dimension."""

    def of_rank(buffer: Buffer) -> Buffer:
        if buffer.name in replicated:
            return replace(buffer, replicated=True)
        return replace(buffer, shape=(buffer.shape[0] // ranks, *buffer.shape[1:]))

    parts = (replace(c, buffers=tuple(map(of_rank, c.buffers))) for c in spec.components)
    return CacheSpec(tuple(parts), spec.page_size)


def three_reaches() -> CacheSpec:
    kv = tuple(Buffer(n, layer, (16, 4)) for layer in (0, 3) for n in ("k", "v"))
    index = tuple(Buffer("index", layer, (24,), "uint8") for layer in (0, 3))
    window = tuple(Buffer(n, 1, (8, 5), "bfloat16") for n in ("k", "v"))
    state = (Buffer("conv", 2, (16, 3)), Buffer("recurrent", 2, (8, 40)))
    return CacheSpec(
        (
            Component("full", Full(), (*kv, *index)),
            Component("window", Window(40), window),
            Component("state", Point(), state),
        ),
        8,
    )


REPLICATED: list[set[str]] = [set(), {"index"}, {"conv", "recurrent"}, {"index", "recurrent"}]


@pytest.mark.parametrize(
    "replicated", REPLICATED, ids=lambda names: "+".join(sorted(names)) or "none"
)
@pytest.mark.parametrize("budget", [150_000, 1 << 20, (1 << 22) + 7])
def test_the_bytes_of_all_ranks_are_within_the_budget_of_the_node(
    replicated: set[str], budget: int
) -> None:
    """C128, INV-22: eight ranks' pools, and their shared memory, as allocated."""
    ranks = 8
    spec = divided(three_reaches(), ranks, replicated)
    sizes = plan(spec, host_bytes=budget, ranks=ranks)
    with sharing_ranks(ranks) as shares:
        stacks = node_stacks(spec, sizes, shares)
        private = [x.host.nbytes for s in stacks for own in s.lanes for x in own if not x.shared]
        spent = sum(private) + shares[0].nbytes
    assert spent == sizes.host_bytes
    assert 0.98 * budget < spent <= budget
    assert sum(s.host_bytes for s in stacks) <= spent
    for stack in stacks:
        assert stack.device_bytes == sizes.device_bytes <= 4 << 20


def test_what_is_replicated_is_counted_once() -> None:
    """A slot costs each rank's own bytes, and the bytes equal on all once."""
    spec = divided(three_reaches(), 8, {"index", "conv", "recurrent"})
    full, window, state = plan(spec, ranks=8).host
    own = 8 * 2 * 2 * (2 * 4 * 4)  # tokens, layers, K and V, two heads of 4 float32
    assert full.slot_bytes == 8 * own + 8 * 2 * 24
    assert window.slot_bytes == 8 * window.record_bytes
    assert state.slot_bytes == state.record_bytes
    assert plan(spec, ranks=1).host[2].slot_bytes == state.record_bytes


@settings(max_examples=80, deadline=None)
@given(specs(), OPTIONS, st.integers(2, 16))
def test_the_sum_over_ranks_never_exceeds_the_budget(
    spec: CacheSpec, options: dict[str, Any], ranks: int
) -> None:
    """INV-22, for any spec and any buffers replicated."""
    try:
        sizes = plan_sizes(spec, **options, ranks=ranks)
    except ConfigError:
        return
    page, spent = spec.page_size, 0
    for part, size in zip(spec.components, sizes.host, strict=False):
        equal = part.only(replicated=True).record_bytes(page)
        spent += size.slots * (ranks * (part.record_bytes(page) - equal) + equal)
    assert spent <= sizes.host_bytes <= options["host_bytes"]
    assert sizes.device == plan_sizes(spec, **options).device
