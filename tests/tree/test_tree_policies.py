"""Policies: the lazy queues give the victims that a full sort would give, on both tiers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from banyan.errors import ConfigError
from banyan.tree import POLICIES, Node, Policy, Tier, make_policy
from banyan.tree.node import OrderKey
from banyan.tree.policies import Slru
from tests.tree.plant import Plant


@dataclass(frozen=True)
class Mru:
    """Most recently used first: every use makes a leaf more urgent. Only for these tests."""

    def key(self, node: Node) -> OrderKey:
        return (-node.stamp,)


@dataclass(frozen=True)
class MostUsed:
    """Most often used first: what a leaf hands on to its parent makes that more urgent."""

    def key(self, node: Node) -> OrderKey:
        return (-node.hits, -node.priority, node.stamp)


ALL: dict[str, Callable[[], Policy]] = {**POLICIES, "mru": Mru, "most_used": MostUsed}


def prompt(r: random.Random) -> list[int]:
    """A prompt of 1 to 6 pages of 4 tokens, few of them distinct."""
    return [t for _ in range(r.randrange(1, 7)) for t in [r.randrange(3)] * 4]


def evict_like_a_full_sort(plant: Plant, tier: Tier) -> None:
    """One victim goes; it must be the first of all victims sorted anew."""
    order = plant.victims(0, tier)
    if not order:
        return
    first, others = order[0], order[1:]
    pages = len(first.edge) // plant.tree.page_bytes
    assert plant.evict(pages, tier=tier) is not None
    assert not first.has(0, tier), f"{first} should have gone first"
    assert all(node.has(0, tier) for node in others)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_c098_victims_are_those_of_a_full_sort(name: str, seed: int) -> None:
    r = random.Random(seed)
    plant = Plant(policy=ALL[name]())
    for _ in range(400):
        known = [n for n in plant.nodes() if n.parent is not None]
        match r.choices(("insert", "use", "mirror", "evict", "evict host"), (30, 30, 10, 25, 5))[0]:
            case "insert":
                plant.tree.use(plant.insert(prompt(r), priority=r.randrange(3)).node)
            case "use" if known:
                plant.tree.use(r.choice(known))
            case "mirror" if known:
                plant.mirror(spelled(r.choice(known)))
            case "evict":
                evict_like_a_full_sort(plant, Tier.DEVICE)
            case "evict host":
                evict_like_a_full_sort(plant, Tier.HOST)
        plant.check()
    while plant.victims():
        evict_like_a_full_sort(plant, Tier.DEVICE)
    while plant.victims(0, Tier.HOST):
        evict_like_a_full_sort(plant, Tier.HOST)
    assert not plant.nodes()


def spelled(node: Node) -> list[int]:
    """The tokens from the root to the end of `node`, as far as the device has them."""
    parts: list[int] = []
    while node.parent is not None:
        if node.has(0, Tier.DEVICE):
            parts = [*memoryview(node.edge).cast("i").tolist(), *parts]
        node = node.parent
    return parts


@pytest.mark.parametrize("seed", range(4))
def test_windows_and_states_go_by_their_own_last_use(seed: int) -> None:
    r = random.Random(seed)
    plant = Plant("full+window+state", window=5)
    for _ in range(300):
        known = [n for n in plant.nodes() if n.has(0, Tier.DEVICE)]
        match r.choices(("insert", "use", "evict"), (4, 4, 3))[0]:
            case "insert":
                tokens = prompt(r)
                plant.tree.use(plant.insert(tokens, states=[len(tokens)]).node)
            case "use" if known:
                plant.tree.use(r.choice(known))
            case "evict":
                component = r.choice((1, 2))
                order = plant.victims(component)
                if not order:
                    continue
                before = [(n, n.parts[0][component].used) for n in order]
                need = [0, 0, 0]
                need[component] = 1
                assert plant.evict(*need) is not None
                gone = {used for n, used in before if not n.has(component, Tier.DEVICE)}
                cut = {used for n, used in before if n.parent is not None and n.parent not in known}
                assert before[0][1] in gone | cut
        plant.check()


def leaves(policy: Policy, uses: dict[str, int]) -> tuple[Plant, dict[str, list[int]]]:
    """A plant of one-page leaves used so many times, the last one last."""
    plant = Plant(policy=policy)
    keys = {name: [ord(name)] * 4 for name in uses}
    for tokens in keys.values():
        plant.insert(tokens)
    for name, times in uses.items():
        for _ in range(times):
            plant.use(keys[name])
    return plant, keys


def evicted(plant: Plant, keys: dict[str, list[int]]) -> str:
    """Evict one page; whose was it?"""

    def whole() -> set[str]:
        return {n for n, tokens in keys.items() if plant.match(tokens).full_len == len(tokens)}

    before = whole()
    assert plant.evict(1) is not None
    (gone,) = before - whole()
    return gone


def order_of(plant: Plant, keys: dict[str, list[int]]) -> str:
    return "".join(evicted(plant, keys) for _ in keys)


def test_lru_goes_by_last_use() -> None:
    plant, keys = leaves(make_policy("lru"), {"a": 5, "b": 1, "c": 2})
    assert order_of(plant, keys) == "abc"


def test_lfu_goes_by_number_of_uses() -> None:
    plant, keys = leaves(make_policy("lfu"), {"a": 5, "b": 1, "c": 2})
    assert order_of(plant, keys) == "bca"


def test_slru_keeps_what_was_used_often_enough() -> None:
    plant, keys = leaves(make_policy("slru"), {"a": 2, "b": 1, "c": 3, "d": 1})
    assert order_of(plant, keys) == "bdac"


def test_slru_threshold_changes_the_victim() -> None:
    plant, keys = leaves(Slru(threshold=3), {"a": 2, "b": 1, "c": 3, "d": 1})
    assert order_of(plant, keys) == "abdc"


def test_fifo_ignores_use() -> None:
    plant, keys = leaves(make_policy("fifo"), {"a": 9, "b": 1, "c": 0})
    assert order_of(plant, keys) == "abc"


def test_priority_goes_before_recency() -> None:
    plant = Plant(policy=make_policy("priority"))
    keys = {"a": [1] * 4, "b": [2] * 4, "c": [3] * 4}
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        plant.tree.use(plant.insert(keys[name], priority=priority).node)
    plant.use(keys["b"])
    assert order_of(plant, keys) == "bca"


def test_a_prefix_has_the_highest_priority_of_those_that_share_it() -> None:
    plant = Plant(policy=make_policy("priority"))
    plant.insert([1] * 4 + [2] * 4, priority=3)
    plant.insert([1] * 4 + [3] * 4, priority=0)
    plant.insert([9] * 4, priority=1)
    keys = {"x": [1] * 4 + [3] * 4, "y": [9] * 4, "z": [1] * 4 + [2] * 4}
    assert "".join(evicted(plant, keys) for _ in range(3)) == "xyz"


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        make_policy("clock")
    assert refused.value.option == "--evict-policy"
    assert all(name in str(refused.value) for name in POLICIES)
