"""Matching: the largest boundary that every component covers, and nothing changed by asking."""

from __future__ import annotations

import random

import pytest

from banyan.spec import CacheSpec, Component, Full, Window
from banyan.tree import Tier, encode_tokens
from banyan.tree.match import coverage_of
from banyan.tree.node import Part
from tests.support.reference import Reference, survey
from tests.tree.plant import KINDS, Plant


def seq(n: int, stream: int = 1) -> list[int]:
    """n tokens of a stream, no two alike."""
    return [stream * 1_000_000 + i for i in range(n)]


def answers(plant: Plant, tokens: list[int]) -> tuple[int, int, int]:
    """(device boundary, boundary, full length) for exactly these tokens."""
    match = plant.tree.match(encode_tokens(tokens))
    return match.device_boundary, match.boundary, match.full_len


# ---- lengths -------------------------------------------------------------------------------------


def test_an_empty_tree_and_an_empty_key_match_nothing() -> None:
    plant = Plant()
    assert answers(plant, []) == (0, 0, 0)
    assert answers(plant, seq(9)) == (0, 0, 0)
    plant.insert(seq(8))
    assert answers(plant, []) == (0, 0, 0)


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_a_match_is_at_most_all_but_the_last_token_in_whole_pages(page: int) -> None:
    plant = Plant(page_size=page)
    tokens = seq(5 * page)
    plant.insert(tokens)
    for n in range(1, len(tokens) + 1):
        assert answers(plant, tokens[:n]) == ((n - 1) // page * page,) * 3
    assert answers(plant, [*tokens, 0]) == (5 * page,) * 3


@pytest.mark.parametrize("at", [0, 3, 4, 63, 64, 4_095, 65_535, 131_071])
def test_a_long_edge_matches_up_to_the_page_that_differs(at: int) -> None:
    plant = Plant()
    tokens = seq(131_072)
    plant.insert(tokens)
    tokens[at] = 0
    assert answers(plant, [*tokens, 0]) == (at // 4 * 4,) * 3


def test_the_branch_point_is_how_far_full_data_goes_on() -> None:
    plant = Plant("full+state")
    plant.insert(seq(32), states=[16])
    assert answers(plant, [*seq(25), 0, 0]) == (16, 16, 24)


def test_a_path_of_many_nodes_matches_to_its_end() -> None:
    plant = Plant()
    for n in range(4, 260, 4):
        plant.insert(seq(n), start=n - 4)
    assert len(plant.nodes()) == 64
    assert answers(plant, [*seq(256), 0]) == (256,) * 3
    assert answers(plant, [*seq(130), 0]) == (128,) * 3


# ---- the intersection of reaches -----------------------------------------------------------------


def test_the_hit_is_in_the_intersection_not_the_minimum_of_maxima() -> None:
    """Full {1..10}, window {4, 8}, state {5}: the answer is 0, not 5."""
    plant = Plant("full+window+state", page_size=1, window=2)
    plant.insert(seq(4), window_from=3)
    plant.insert(seq(8), start=4, window_from=7)
    plant.insert(seq(10), start=8, window_from=10)
    plant.insert(seq(5), start=4, window_from=5, states=[5])
    assert answers(plant, [*seq(10), 0]) == (0, 0, 10)


def test_each_component_bounds_the_hit() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(32), states=[16, 32])
    assert answers(plant, [*seq(32), 0]) == (32, 32, 32)
    assert answers(plant, seq(32)) == (16, 16, 28)
    assert answers(plant, seq(16)) == (0, 0, 12)


@pytest.mark.parametrize(
    ("window", "pages"), [(2, 1), (4, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)]
)
def test_a_window_needs_the_pages_before_the_next_token(window: int, pages: int) -> None:
    spec = CacheSpec((Component("full", Full()), Component("window", Window(window))), 4)
    assert coverage_of(spec).windows == ((1, 4 * pages),)
    for have in range(5):
        plant = Plant("full+window", window=window)
        plant.insert(seq(32), window_from=32 - 4 * have)
        assert answers(plant, [*seq(32), 0])[0] == (32 if have >= pages else 0), have


def test_near_the_root_a_window_needs_only_what_there_is() -> None:
    plant = Plant("full+window", window=100)
    plant.insert(seq(12))
    assert answers(plant, [*seq(12), 0]) == (12,) * 3
    assert answers(plant, seq(6)) == (4,) * 3


def test_a_hole_in_the_window_falls_back_to_below_the_hole() -> None:
    plant = Plant("full+window")
    for n in range(4, 36, 4):
        plant.insert(seq(n), start=n - 4)
    hole = plant.node(seq(28))
    plant.tree.device.remove(hole, 1)
    assert answers(plant, [*seq(32), 0]) == (24, 24, 32)
    plant.tree.device.remove(plant.node(seq(20)), 1)
    assert answers(plant, [*seq(32), 0]) == (16, 16, 32)


# ---- tiers ---------------------------------------------------------------------------------------


def test_host_data_counts_for_the_boundary_and_not_for_the_device() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(16), states=[8, 16])
    plant.mirror(seq(16))
    assert plant.evict(2) is not None
    assert answers(plant, [*seq(16), 0]) == (8, 16, 16)
    assert plant.evict(2) is not None
    assert answers(plant, [*seq(16), 0]) == (0, 16, 16)


def test_a_boundary_may_take_each_component_from_another_tier() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(16), states=[16])
    plant.mirror(seq(16))
    node = plant.node(seq(16))
    plant.tree.device.remove(node, 2)
    assert answers(plant, [*seq(16), 0]) == (0, 16, 16)
    plant.tree.host.remove(node, 2)
    assert answers(plant, [*seq(16), 0]) == (0, 0, 16)


def test_full_data_on_device_over_data_on_host_only_ends_the_device_boundary() -> None:
    plant = Plant()
    plant.insert(seq(24))
    plant.mirror(seq(24))
    plant.evict(3)
    plant.insert([*seq(12), *seq(8, 2)], start=12)
    assert answers(plant, [*seq(24), 0]) == (12, 24, 24)
    assert answers(plant, [*seq(12), *seq(8, 2), 0]) == (20, 20, 20)


# ---- against brute force -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_matches_equal_brute_force_on_random_trees(kind: str, seed: int) -> None:
    r = random.Random(seed)
    page = r.choice((1, 2, 4))
    plant = Plant(kind, page_size=page, window=r.choice((2, 5, 9)))
    reference = Reference(plant.spec)
    streams = [[r.randrange(2) for _ in range(16 * page)] for _ in range(2)]
    for _ in range(60):
        at = r.randrange(len(streams[0]))
        tokens = [*r.choice(streams)[:at], *(r.randrange(2) for _ in range(r.randrange(3 * page)))]
        stop = len(tokens) // page * page
        states = [stop] if plant.point and stop and r.random() < 0.5 else []
        low = r.randrange(stop + 1) // page * page
        plant.insert(tokens, window_from=low, states=states)
        if r.random() < 0.4 and stop:
            plant.mirror(tokens[:stop])
        if r.random() < 0.4:
            need = [r.randrange(1 + n) for n in plant.tree.device.evictable]
            assert plant.evict(*need) is not None
        reference.held = survey(plant.tree)
        for _ in range(6):
            key = [*r.choice(streams)[: r.randrange(1 + 16 * page)], *(0,) * r.randrange(3)]
            want = reference.answer(encode_tokens(key), b"")
            assert answers(plant, key) == want[:3], key
            match = plant.tree.match(encode_tokens(key))
            assert match.device_full == want[3], key
        plant.check()


# ---- reading only --------------------------------------------------------------------------------


def photograph(plant: Plant) -> list[object]:
    """Everything a match could have changed."""
    tree = plant.tree
    nodes: list[object] = [
        (id(n), n.edge, n.start, n.end, n.stamp, n.hits, len(n.children),
         *((p.locks, p.used, p.queued, p.kids) for parts in n.parts for p in parts))
        for n in plant.nodes()
    ]  # fmt: skip
    return [nodes, tree.epoch, tree.tick, sorted(tree.roots), tree.device.evictable[:]]


def test_a_match_changes_nothing() -> None:
    plant = Plant("full+window+state")
    plant.insert(seq(32), states=[16, 32])
    plant.insert([*seq(18), *seq(9, 2)], states=[24])
    before = photograph(plant)
    for n in range(40):
        plant.tree.match(encode_tokens(seq(n)))
        plant.tree.match(encode_tokens([*seq(n), 0]), b"elsewhere")
    assert photograph(plant) == before


def test_a_match_made_before_a_split_still_finds_its_boundary() -> None:
    plant = Plant()
    plant.insert(seq(32))
    match = plant.match(seq(24))
    plant.insert([*seq(12), *seq(8, 2)])
    node = plant.tree.node_at(match, 24)
    assert (node.start, node.end) == (12, 24)
    plant.check()


def test_the_cost_depends_on_the_distance_to_the_answer_not_on_the_path() -> None:
    """Of a path of 512 nodes only those near the end are looked at for coverage."""
    plant = Plant("full+state")
    looked = 0
    for n in range(4, 2_052, 4):
        plant.insert(seq(n), start=n - 4, states=[n])

    class Counted(Part):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            nonlocal looked
            looked += name == "slots"
            return super().__getattribute__(name)

    for node in plant.nodes():
        for part in node.parts[0]:
            part.__class__ = Counted
    plant.tree.device.remove(plant.node(seq(2_048)), 1)
    looked = 0
    assert answers(plant, [*seq(2_048), 0])[0] == 2_044
    assert 0 < looked <= 16


def test_loading_says_that_a_load_back_of_the_path_runs() -> None:
    from banyan.tree.node import Claim

    class Op:
        claims: list[Claim]
        abandoned = False

    plant = Plant()
    plant.insert(seq(16))
    plant.mirror(seq(16))
    plant.evict(2)
    node = plant.node(seq(16))
    slots = plant.fresh(0, 2)
    claim = Claim(Op(), node, 0, Tier.HOST, slots, slots)
    node.claims = [claim]
    assert plant.match(seq(16)).loading
    assert not plant.match(seq(8)).loading
    claim.pinned = Tier.DEVICE
    assert not plant.match(seq(16)).loading
