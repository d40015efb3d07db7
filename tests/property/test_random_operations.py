"""Random operations against the reference cache, for every mix of reaches (INV-01 to INV-19)."""

from __future__ import annotations

import pytest
import torch

from tests.property.episodes import episode
from tests.support.rig import KINDS

EPISODE = 500
TWO_WINDOWS = "full+window+narrow+state"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def views_of_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are short here: let nodes keep views of them all the same."""
    monkeypatch.setattr("banyan.tree.chain._WORTH_A_VIEW", 4)


def run(kind: str, first_seed: int, operations: int) -> dict[str, int]:
    """Episodes that make up `operations`; returns the tokens reused by tier."""
    hits = {"device": 0, "host": 0}
    for seed in range(first_seed, first_seed + operations // EPISODE):
        for tier, tokens in episode(kind, seed, EPISODE).hits.items():
            hits[tier] += tokens
    return hits


@pytest.mark.parametrize("kind", [*KINDS, TWO_WINDOWS])
def test_two_thousand_operations(kind: str) -> None:
    hits = run(kind, first_seed=100, operations=2_000)
    assert hits["device"] > 100 and hits["host"] > 10, f"hardly anything was reused: {hits}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, TWO_WINDOWS])
def test_ten_thousand_operations(kind: str) -> None:
    hits = run(kind, first_seed=1_000, operations=10_000)
    assert hits["device"] > 500 and hits["host"] > 100, f"hardly anything was reused: {hits}"
