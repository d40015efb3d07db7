"""INV-17 by counting: what a step costs depends on what changed, not on the size of the tree."""

from __future__ import annotations

import pytest

from banyan.tree import Node, Tier, encode_tokens
from banyan.tree.lazy_queue import Entry, LazyQueue
from banyan.tree.node import OrderKey, Part
from tests.tree.plant import Plant

LEAVES = 100_000
STEPS = 300


class Urgency(int):
    """An order key that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Urgency.compared += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        Urgency.compared += 1
        return int(self) <= int(other)

    __hash__ = int.__hash__


class CountedLru:
    """LRU that counts how often it is asked for a key."""

    asked = 0

    def key(self, node: Node) -> OrderKey:
        CountedLru.asked += 1
        return Urgency(node.stamp)


def one_page(i: int) -> list[int]:
    return [i, 0, 0, 0]


class Scene:
    """A tree of `leaves` leaves of one page, all used once more in odd order."""

    def __init__(self, leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plant = Plant(policy=CountedLru())
        self.nodes = [self.plant.insert(one_page(i)).node for i in range(leaves)]
        self.order = [self.nodes[i * 7_919 % leaves] for i in range(leaves)]
        for node in self.order:
            self.plant.tree.use(node)
        self.popped = 0
        real = LazyQueue.pop

        def pop(queue: LazyQueue) -> Entry | None:
            self.popped += 1
            return real(queue)

        monkeypatch.setattr(LazyQueue, "pop", pop)

    def step(self, i: int) -> None:
        """Evict one leaf, the one a full sort would take; insert another; use a third."""
        victim = self.order[2 * i]
        assert self.plant.evict(1) is not None
        assert not victim.has(0, Tier.DEVICE), "the order is that of a full sort"
        self.plant.tree.use(self.plant.insert(one_page(-i - 1)).node)
        self.plant.tree.use(self.order[2 * i + 1])

    def cost(self, steps: int) -> dict[str, float]:
        """Per step, once the first eviction has paid for the uses before it."""
        CountedLru.asked = Urgency.compared = self.popped = 0
        for i in range(1, steps + 1):
            self.step(i)
        return {
            "keys": CountedLru.asked / steps,
            "compared": Urgency.compared / steps,
            "popped": self.popped / steps,
        }


def test_c104_eviction_does_not_look_at_all_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for leaves in (LEAVES // 100, LEAVES):
        scene = Scene(leaves, monkeypatch)
        scene.step(0)
        assert scene.popped <= leaves + 1, "each use since is paid for once"
        costs.append(scene.cost(STEPS))
        monkeypatch.undo()
    small, large = costs
    for what in ("keys", "popped", "compared"):
        assert small[what] < 40, (small, large)
        # log2(100,000) is 1.7 times log2(1,000)
        assert large[what] < 2 * small[what], (small, large)


def test_a_queue_stays_as_small_as_the_tree() -> None:
    plant = Plant("full+window+state")
    hot = plant.insert(one_page(1), states=[4]).node
    for i in range(2, 20):
        plant.insert(one_page(i), states=[4])
    for _ in range(20):
        for n in range(5_000):
            starts = plant.tree.lock(hot)
            plant.tree.use(hot)
            plant.tree.unlock(hot, starts)
            if n % 100 == 0:
                plant.insert(one_page(50), states=[4])
                plant.evict(1)
    for index in plant.tree.index:
        assert all(len(queue) < 300 for queue in index.queues)
    plant.check()


def test_locking_below_a_locked_stem_does_not_walk_it() -> None:
    visited = 0

    class Counted(Part):
        __slots__ = ()

        def __setattr__(self, name: str, value: object) -> None:
            nonlocal visited
            visited += name == "locks"
            super().__setattr__(name, value)

    plant = Plant()
    tokens = list(range(4_000))
    for n in range(4, 4_004, 4):
        plant.insert(tokens[:n], start=n - 4)
    plant.insert([*tokens, 1, 1, 1, 1], start=4_000)
    plant.lock("first", tokens)
    for node in plant.nodes():
        node.parts[0][0].__class__ = Counted
    plant.lock("second", [*tokens, 1, 1, 1, 1])
    plant.unlock("second")
    assert 0 < visited <= 6
    plant.check()


def test_a_match_compares_an_edge_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of n nodes takes a look-up for each that has siblings, however many they are."""
    looked = 0

    class Counted(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            nonlocal looked
            looked += 1
            return super().get(key, default)

    plant = Plant()
    tokens = list(range(64))
    for n in range(8, 72, 8):
        plant.insert(tokens[:n], start=n - 8)
        for i in range(50):
            plant.insert([*tokens[:n], 1_000 + i, 0, 0, 0], start=n)
    for node in [*plant.tree.roots.values(), *plant.nodes()]:
        node.children = Counted(node.children)
    assert plant.tree.match(encode_tokens([*tokens, 5])).boundary == 64
    assert looked == 7, "the first of eight has none"
