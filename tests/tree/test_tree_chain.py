"""Chains: what is shared by nodes in a row, and that nothing but speed depends on it."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from banyan.tree import Node, Tier, encode_tokens
from banyan.tree.chain import Chain, kept, slots_to
from banyan.tree.keys import TOKEN_BYTES
from banyan.tree.node import Slots
from tests.tree.plant import Plant

PAGE = 4


def seq(n: int, stream: int = 0) -> list[int]:
    return [stream * 1_000_000 + i for i in range(n)]


def talk(turns: int, kind: str = "full", length: int = 8) -> Plant:
    """A conversation of `turns` nodes of `length` tokens."""
    plant = Plant(kind)
    for turn in range(turns):
        plant.insert(seq((turn + 1) * length), start=turn * length)
    plant.check()
    return plant


def in_order(plant: Plant) -> list[Node]:
    return sorted(plant.nodes(), key=lambda node: node.end)


def chains(plant: Plant) -> list[tuple[int, int]]:
    """Where each chain begins and ends, in tokens."""
    found = {id(n.chain): n.chain for n in plant.nodes() if n.chain is not None}
    return sorted((chain.nodes[0].start, chain.nodes[-1].end) for chain in found.values())


def test_turns_of_a_conversation_are_one_chain() -> None:
    plant = talk(5)
    nodes = in_order(plant)
    assert chains(plant) == [(0, 40)] and len(nodes) == 5
    assert [node.edge for node in nodes] == [
        encode_tokens(seq(40)[at : at + 8]) for at in range(0, 40, 8)
    ]


def test_what_windows_and_states_cut_is_one_chain_and_a_view_of_the_key() -> None:
    plant = Plant("full+window")
    key = encode_tokens(seq(4_096))
    plant.insert(seq(2_048))
    plant.insert([*seq(1_024), *seq(8, 2)])
    plant.insert(seq(4_096), start=2_048, window_from=3_000)
    plant.check()
    assert chains(plant)[-1] == (1_024, 4_096)
    plant = Plant("full+window")
    plant.insert(seq(4_094), window_from=3_000)
    plant.check()
    assert len(plant.nodes()) == 3 and chains(plant) == [(0, 4_092)]
    chain = plant.nodes()[0].chain
    assert chain is not None and isinstance(chain.text, memoryview)
    assert bytes(chain.text) == key[: 4_092 * TOKEN_BYTES]


@pytest.mark.parametrize("at", [8, 16, 24, 32])
@pytest.mark.parametrize("asked", [False, True])
def test_a_branch_cuts_a_chain_where_it_begins(at: int, asked: bool) -> None:
    plant = talk(5)
    before = {n.end: n.edge for n in plant.nodes()}
    if asked:
        assert len(slots_to(in_order(plant)[-1], 40)) == 10
    plant.insert([*seq(at), *seq(8, 2)], start=at)
    plant.check()
    assert all(n.edge == before[n.end] for n in plant.nodes() if n.edge in before.values())
    wanted = [(0, at), (at, 40)]
    assert chains(plant) == [(a, b) for a, b in wanted if b - a > 8]
    plant.insert([*seq(at), *seq(8, 3)], start=at)
    plant.check()
    assert len(chains(plant)) == len([1 for a, b in wanted if b - a > 8])
    for end in (at, 40):
        assert plant.match(seq(end)).boundary == end


def test_a_branch_in_the_middle_of_a_node_cuts_a_chain_there() -> None:
    plant = talk(5)
    plant.insert([*seq(20), *seq(8, 2)])
    plant.check()
    assert chains(plant) == [(0, 20), (20, 40)]
    assert plant.match([*seq(20), *seq(8, 2)]).boundary == 28


def test_growth_below_a_branch_makes_chains_of_their_own() -> None:
    plant = talk(3)
    for stream in (2, 3):
        for turn in range(3):
            tokens = [*seq(16), *seq(8 * (turn + 1), stream)]
            plant.insert(tokens, start=16 + 8 * turn)
            plant.check()
    assert chains(plant) == [(0, 16), (16, 40), (16, 40)]


def test_eviction_takes_a_chain_apart_from_its_end() -> None:
    plant = talk(5)
    for left in range(9, -1, -1):
        assert plant.evict(1) is not None
        plant.check()
        assert plant.match(seq(40)).boundary == 4 * left
        assert sum(end - start for start, end in chains(plant)) in (0, 4 * left)
    assert not plant.nodes()


def test_an_emptied_chain_grows_again() -> None:
    plant = talk(5)
    plant.evict(3)
    plant.check()
    plant.insert([*seq(28), *seq(12, 2)], start=28)
    plant.check()
    assert plant.match([*seq(28), *seq(12, 2)]).boundary == 40
    assert plant.match(seq(40)).boundary == 28


def test_a_key_that_ends_with_a_chain_passes_no_node_that_it_may_not_use() -> None:
    """Its last token is computed again, so a last node of one page is not on its path."""
    plant = talk(2)
    plant.insert(seq(20), start=16)
    match = plant.tree.match(encode_tokens(seq(20)))
    assert (match.boundary, match.full_len) == (16, 16)
    assert [n.end for n in match.path] == [8, 16] and match.branch == 16
    assert [n.end for n in plant.tree.match(encode_tokens(seq(16))).path] == [8, 16]


@pytest.mark.parametrize("apart", [*range(0, 70_000, 9_973), 65_535, 65_536, 69_999, None])
def test_a_long_chain_is_compared_in_blocks(apart: int | None) -> None:
    tokens = seq(70_000)
    plant = Plant()
    for stop in range(10_000, 80_000, 10_000):
        plant.insert(tokens[:stop], start=stop - 10_000)
    assert chains(plant) == [(0, 70_000)]
    asked = tokens.copy()
    if apart is not None:
        asked[apart] = -5
    whole = (70_000 if apart is None else apart) // PAGE * PAGE
    match = plant.match(asked)
    assert match.boundary == whole
    assert [n.end for n in match.path] == list(range(10_000, whole + 9_999, 10_000))


@pytest.mark.parametrize("length", range(41))
def test_a_prompt_that_parts_within_a_chain_matches_what_it_shares(length: int) -> None:
    plant = talk(5)
    whole = length // PAGE * PAGE
    for tokens in (seq(length), [*seq(length), *seq(30, 7)]):
        match = plant.match(tokens)
        assert (match.boundary, match.full_len) == (whole, whole)
        assert [n.end for n in match.path] == [*range(8, whole, 8), -(-whole // 8) * 8][
            : -(-whole // 8)
        ]


def test_slots_are_joined_once_and_again_only_when_they_change() -> None:
    plant = talk(4)
    last = in_order(plant)[-1]
    first = slots_to(last, 32)
    assert first.tolist() == list(range(8))
    assert slots_to(last, 32) is first
    plant.insert(seq(40), start=32)
    assert slots_to(in_order(plant)[-1], 40).tolist() == list(range(10))
    assert first.tolist() == list(range(8)), "what was given stays as it was"


def test_slots_up_to_a_place_within_a_chain() -> None:
    plant = talk(4)
    for node in in_order(plant):
        for boundary in range(node.start + PAGE, node.end + 1, PAGE):
            assert slots_to(node, boundary).tolist() == list(range(boundary // PAGE))


def test_slots_after_data_has_left_the_device_and_come_back_elsewhere() -> None:
    plant = talk(4)
    plant.mirror(seq(32))
    nodes = in_order(plant)
    old = slots_to(nodes[-1], 32)
    plant.evict(4)
    plant.check()
    assert slots_to(nodes[1], 16).tolist() == [0, 1, 2, 3]
    for node in in_order(plant):
        if not node.has(0, Tier.DEVICE):
            pages = (node.end - node.start) // PAGE
            plant.tree.attach(node, 0, Tier.DEVICE, plant.fresh(0, pages) + 100)
            plant.check()
    assert slots_to(nodes[-1], 32).tolist() == [0, 1, 2, 3, 108, 109, 110, 111]
    assert old.tolist() == list(range(8))


def test_slots_of_a_path_of_chains_and_single_nodes() -> None:
    plant = talk(3)
    plant.insert([*seq(16), *seq(4, 2)], start=16)
    plant.insert([*seq(16), *seq(4, 2), *seq(4, 3)], start=20)
    plant.insert([*seq(16), *seq(4, 2), *seq(8, 4)], start=20)
    path = [*seq(16), *seq(4, 2), *seq(8, 4)]
    node = plant.node(path)
    assert slots_to(node, 28).tolist() == [0, 1, 2, 3, 6, 8, 9]
    assert slots_to(node, 24).tolist() == [0, 1, 2, 3, 6, 8]


def test_a_split_member_stays_in_its_chain() -> None:
    plant = talk(3)
    whole = slots_to(in_order(plant)[-1], 24)
    upper = plant.tree.split(in_order(plant)[1], 12)
    plant.check()
    assert upper.chain is in_order(plant)[0].chain and chains(plant) == [(0, 24)]
    assert slots_to(in_order(plant)[-1], 24) is whole


def test_demoted_halves_join_again_within_a_chain() -> None:
    plant = talk(3)
    plant.mirror(seq(24))
    for _ in range(6):
        plant.evict(1)
        plant.check()
    assert len(plant.nodes()) == 1, "cut page by page, joined again"
    assert plant.nodes()[0].edge == encode_tokens(seq(24))


def test_a_demoted_node_joins_a_chain_or_single_node_below() -> None:
    """Above a cut that was made by a branch which has gone since."""
    for turns_below in (1, 2):
        plant = talk(2 + turns_below)
        plant.insert([*seq(16), *seq(4, 2)], start=16)
        assert len(chains(plant)) == turns_below
        plant.use(seq(16 + 8 * turns_below))
        plant.evict(1)
        plant.check()
        plant.mirror(seq(16 + 8 * turns_below))
        while plant.tree.device.evictable[0]:
            plant.evict(1)
            plant.check()
        (node,) = plant.nodes()
        assert node.edge == encode_tokens(seq(16 + 8 * turns_below))


def test_views_keep_at_most_twice_their_bytes() -> None:
    key = bytes(range(250)) * 80
    views = 0
    for start, stop in ((0, 20_000), (10_000, 20_000), (4_000, 16_000), (10_001, 20_000), (0, 50)):
        part = kept(key, start, stop)
        views += isinstance(part, memoryview)
        whole = len(part.obj) if isinstance(part, memoryview) else len(part)  # type: ignore[arg-type]
        assert bytes(part) == key[start:stop] and whole <= 2 * (stop - start)
    assert views == 2
    assert kept(key, 0, 20_000) is key
    part = kept(kept(key, 0, 19_000), 0, 6_000)
    assert isinstance(part, bytes), "a view of a view counts the bytes below both"
    assert isinstance(kept(bytearray(key), 0, 20_000), bytes), "what may change is copied"
    assert isinstance(kept(bytes(100), 1, 100), bytes), "what is short is copied"


def room(known: Slots) -> int:
    """Slots that the buffer of an array has, or the one that it is a view of."""
    while isinstance(known.base, np.ndarray):
        known = known.base
    return len(known)


def test_known_slots_keep_at_most_twice_their_bytes() -> None:
    plant = talk(200)
    nodes = in_order(plant)
    whole = slots_to(nodes[-1], 1_600)
    chain = nodes[0].chain
    assert chain is not None and chain.known is whole
    for left in range(399, 100, -1):
        plant.evict(1)
        assert chain.known is not None and len(chain.known) == left
        assert room(chain.known) <= 2 * left
    plant.insert([*seq(80), *seq(8, 2)], start=80)
    plant.check()
    parts = {id(n.chain): n.chain.known for n in plant.nodes() if n.chain is not None}
    kept_ = [known for known in parts.values() if known is not None]
    assert sorted(len(known) for known in kept_) == [20, 81]
    assert all(room(known) <= 2 * len(known) for known in kept_)
    assert whole.tolist() == list(range(400))


def test_pages_demoted_above_a_chain_join_its_first_node_only() -> None:
    """States keep the turns below apart; the pages that come down one by one become one node."""
    plant = Plant("full+state")
    for turn in range(1, 6):
        states = [turn * 16] if turn > 1 else []
        plant.insert(seq(turn * 16), start=(turn - 1) * 16, states=states)
    plant.insert([*seq(16), *seq(4, 2)], start=16)
    plant.use(seq(80))
    plant.evict(1)
    assert chains(plant) == [(16, 80)]
    plant.mirror(seq(80))
    while plant.tree.device.evictable[0]:
        plant.evict(1)
        plant.check()
    assert plant.match(seq(80)).full_len == 80
    assert len(plant.nodes()) <= 6


def test_a_turn_costs_the_same_on_a_long_conversation() -> None:
    """Bytes of text that are copied, counted by the buffers that change."""
    plant = talk(200)
    chain = in_order(plant)[0].chain
    assert chain is not None
    moved = 0
    for turn in range(200, 400):
        before = sys.getsizeof(chain.text)
        plant.insert(seq((turn + 1) * 8), start=turn * 8)
        moved += before if sys.getsizeof(chain.text) != before else 0
    assert len(chain.nodes) == 400 and in_order(plant)[0].chain is chain
    assert moved <= 20 * len(chain.text), "the buffer grows by a share of itself at a time"


def test_cutting_a_chain_copies_the_shorter_part_and_renames_the_fewer_members() -> None:
    for at in (16, 1_584):
        plant = talk(200)
        chain = in_order(plant)[0].chain
        assert chain is not None
        nodes, text = chain.nodes, chain.text
        plant.insert([*seq(at), *seq(8, 2)], start=at)
        plant.check()
        assert chain.nodes is nodes and len(nodes) == 198
        assert chain.text is text and len(text) == 1_584 * TOKEN_BYTES


@pytest.mark.parametrize("kind", ["full", "full+window", "full+window+state"])
@pytest.mark.parametrize("seed", range(6))
def test_chains_change_nothing_but_speed(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same random work on a tree that chains and on one that never does; with odd seeds also
    short texts are views."""
    if seed % 2:
        monkeypatch.setattr("banyan.tree.chain._WORTH_A_VIEW", 4)

    def report(plain: bool) -> list[object]:
        with pytest.MonkeyPatch.context() as patch:
            if plain:
                patch.setattr(Chain, "_fit", dissolve)
                patch.setattr(Chain, "extend", extend_and_dissolve)
                patch.setattr(Chain, "__init__", never)
            return work(kind, seed)

    assert report(plain=False) == report(plain=True)


def never(chain: Chain, nodes: list[Node], text: object) -> None:
    """A chain that leaves its nodes alone: each gets its own part of the text."""
    at = 0
    view = bytes(text)  # type: ignore[call-overload]
    for node in nodes:
        length = (node.end - node.start) * TOKEN_BYTES
        node.own, node.chain = view[at : at + length], None
        at += length


def extend_and_dissolve(chain: Chain, nodes: list[Node], text: object) -> None:
    never(chain, nodes, text)


def dissolve(chain: Chain) -> None:
    raise AssertionError("a tree without chains fits none")


def work(kind: str, seed: int) -> list[object]:
    """What a tree answers over 300 random steps."""
    r = random.Random(seed)
    plant = Plant(kind)
    said: list[object] = []
    prompts: list[list[int]] = [[]]
    for _ in range(300):
        match r.randrange(6):
            case 0 | 1:
                stem = r.choice(prompts)[: r.randrange(0, 64, PAGE)]
                tokens = [*stem, *(r.randrange(3) for _ in range(PAGE * r.randrange(1, 5)))]
                prompts.append(tokens)
                done = plant.insert(tokens)
                plant.tree.use(done.node)
                said += [done.node.end, [(c, s.tolist()) for c, s in done.duplicates]]
            case 2:
                tokens = r.choice(prompts)
                match_ = plant.match(tokens)
                if r.randrange(2):
                    match_ = plant.tree.match(encode_tokens(tokens))
                said += [match_.boundary, match_.device_boundary, [n.end for n in match_.path]]
                if match_.device_boundary:
                    node = plant.tree.node_at(match_, match_.device_boundary)
                    said.append(slots_to(node, match_.device_boundary).tolist())
            case 3:
                freed = plant.evict(*(r.randrange(1 + n // 3) for n in plant.tree.device.evictable))
                said.append(
                    freed and [freed.take(Tier.DEVICE, c).tolist() for c in range(plant.width)]
                )
            case 4:
                tokens = r.choice(prompts)
                full = plant.match(tokens).device_full
                if full and not plant.match(tokens).path[-1].claims:
                    plant.mirror(tokens[:full])
            case 5:
                if "reader" in plant.held:
                    plant.unlock("reader")
                else:
                    tokens = r.choice(prompts)
                    plant.lock("reader", tokens[: plant.match(tokens).device_boundary])
        plant.check()
    return said


def test_the_known_slots_are_arrays_nobody_writes_to() -> None:
    plant = talk(3)
    slots = slots_to(in_order(plant)[-1], 24)
    with pytest.raises(ValueError, match="read-only"):
        slots[0] = np.int32(9)
