"""`check` can fail: each kind of damage to a tree is found and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from banyan.tree import Node, Tier, encode_tokens
from banyan.tree.chain import Chain
from banyan.tree.node import Claim
from tests.tree.plant import Plant


def seq(n: int) -> list[int]:
    return list(range(n))


class Op:
    """An operation that knows of no claims."""

    claims: list[Claim] = []  # noqa: RUF012


def planted() -> tuple[Plant, list[Node]]:
    """Three nodes in a row, on both tiers, the first 16 tokens locked."""
    plant = Plant("full+window+state")
    for n in (8, 16, 24):
        plant.insert(seq(n), start=n - 8, states=[n])
    plant.mirror(seq(24))
    plant.lock("reader", seq(16))
    plant.check()
    return plant, sorted(plant.nodes(), key=lambda n: n.end)


def edge_not_whole_pages(plant: Plant, nodes: list[Node]) -> None:
    nodes[2].own, nodes[2].chain = nodes[2].edge[:-4], None


def positions_disagree(plant: Plant, nodes: list[Node]) -> None:
    nodes[2].end += 4


def filed_under_another_page(plant: Plant, nodes: list[Node]) -> None:
    children = nodes[1].children
    children[b"another first page"] = children.pop(nodes[2].edge[:16])


def first_page_of_another(plant: Plant, nodes: list[Node]) -> None:
    children = nodes[1].children
    nodes[2].first = nodes[0].first
    children[nodes[0].first] = children.pop(nodes[2].edge[:16])


def only_child_forgotten(plant: Plant, nodes: list[Node]) -> None:
    nodes[0].lone = None


def only_child_of_several(plant: Plant, nodes: list[Node]) -> None:
    plant.insert([*range(8), 1, 1, 1, 1], start=8)
    parent = next(n for n in plant.nodes() if len(n.children) > 1)
    parent.lone = next(iter(parent.children.values()))


def slots_at_hand_outdated(plant: Plant, nodes: list[Node]) -> None:
    assert nodes[1].full is not None
    nodes[1].full = nodes[1].full.copy()


def presence_outdated(plant: Plant, nodes: list[Node]) -> None:
    nodes[1].present = 0b011


def left_by_its_chain(plant: Plant, nodes: list[Node]) -> None:
    chain = nodes[0].chain
    assert chain is not None
    chain.nodes.remove(nodes[1])


def with_a_text_of_its_own_beside_the_chain(plant: Plant, nodes: list[Node]) -> None:
    nodes[1].own = nodes[1].edge


def chained_beyond_a_branch(plant: Plant, nodes: list[Node]) -> None:
    plant.insert([*range(8), 1, 1, 1, 1], start=8)
    Chain(nodes, encode_tokens(seq(24)))


def chain_with_too_much_text(plant: Plant, nodes: list[Node]) -> None:
    chain = nodes[0].chain
    assert chain is not None
    chain.text += b"more"  # type: ignore[operator]


def chain_knows_other_slots(plant: Plant, nodes: list[Node]) -> None:
    chain = nodes[0].chain
    assert chain is not None
    chain.known = chain.slots() + 1


def chain_knows_too_many_slots(plant: Plant, nodes: list[Node]) -> None:
    chain = nodes[0].chain
    assert chain is not None
    chain.known = np.append(chain.slots(), np.int32(7))


def foreign_claim(plant: Plant, nodes: list[Node]) -> None:
    slots = np.array([0], np.int32)
    nodes[2].claims = [Claim(Op(), nodes[2], 0, Tier.DEVICE, slots, slots)]


def nothing_on_any_tier(plant: Plant, nodes: list[Node]) -> None:
    for tier in Tier:
        nodes[2].parts[tier][0].slots = None


def hole_on_device(plant: Plant, nodes: list[Node]) -> None:
    nodes[0].parts[Tier.DEVICE][0].slots = None


def hole_on_host(plant: Plant, nodes: list[Node]) -> None:
    nodes[1].parts[Tier.HOST][0].slots = None


def kids_miscounted(plant: Plant, nodes: list[Node]) -> None:
    nodes[0].parts[Tier.HOST][0].kids += 1


def tombstone_locked(plant: Plant, nodes: list[Node]) -> None:
    nodes[2].parts[Tier.DEVICE][1].slots = None
    nodes[2].parts[Tier.DEVICE][1].locks = 1


def too_few_slots(plant: Plant, nodes: list[Node]) -> None:
    part = nodes[2].parts[Tier.DEVICE][0]
    assert part.slots is not None
    part.slots = part.slots[:1]


def window_without_full(plant: Plant, nodes: list[Node]) -> None:
    nodes[2].parts[Tier.DEVICE][0].slots = None
    nodes[1].parts[Tier.DEVICE][0].kids -= 1


def totals_off(plant: Plant, nodes: list[Node]) -> None:
    plant.tree.host.held[1] -= 1


def victim_not_queued(plant: Plant, nodes: list[Node]) -> None:
    nodes[2].parts[Tier.DEVICE][0].queued = None


def queued_too_late(plant: Plant, nodes: list[Node]) -> None:
    nodes[2].parts[Tier.HOST][2].queued = 10**6


def held_and_gone(plant: Plant, nodes: list[Node]) -> None:
    nodes[1].parts[Tier.DEVICE][2].slots = None


def lock_too_many(plant: Plant, nodes: list[Node]) -> None:
    nodes[1].parts[Tier.DEVICE][0].locks += 1


def lock_too_few(plant: Plant, nodes: list[Node]) -> None:
    plant.tree.device.unlock(nodes[1], 1)


def lock_never_released(plant: Plant, nodes: list[Node]) -> None:
    del plant.held["reader"]


DAMAGE: list[tuple[Callable[[Plant, list[Node]], None], str]] = [
    (edge_not_whole_pages, "T1"),
    (positions_disagree, "INV-14"),
    (filed_under_another_page, "T1"),
    (first_page_of_another, "T1"),
    (only_child_forgotten, "only child"),
    (only_child_of_several, "only child"),
    (slots_at_hand_outdated, "slots at hand"),
    (presence_outdated, "of what the device has"),
    (left_by_its_chain, "T6"),
    (with_a_text_of_its_own_beside_the_chain, "T6"),
    (chained_beyond_a_branch, "T6"),
    (chain_with_too_much_text, "T6"),
    (chain_knows_other_slots, "T6"),
    (chain_knows_too_many_slots, "T6"),
    (foreign_claim, "INV-09"),
    (nothing_on_any_tier, "T3"),
    (hole_on_device, "T2/INV-08"),
    (hole_on_host, "T2/INV-08"),
    (kids_miscounted, "kids"),
    (tombstone_locked, "INV-06"),
    (too_few_slots, "1 full slots for 2"),
    (window_without_full, "T4"),
    (totals_off, "INV-01"),
    (victim_not_queued, "queued as None"),
    (queued_too_late, "queued as 1000000"),
    (held_and_gone, "INV-04"),
    (lock_too_many, "INV-03"),
    (lock_too_few, "INV-03"),
    (lock_never_released, "INV-03"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damage_is_found_and_named(damage: Callable[[Plant, list[Node]], None], named: str) -> None:
    plant, nodes = planted()
    damage(plant, nodes)
    assert any(named in finding for finding in plant.findings()), plant.findings()
