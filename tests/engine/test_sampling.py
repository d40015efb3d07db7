"""Which tokens are chosen, how often, and what is reported about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from banyan.engine.messages import Sampling
from banyan.engine.sampling import SamplingState, sample

GREEDY = SamplingState(0.0, 0, 1.0, None, torch.Generator())


def _state(seed: int = 0, **changes: float | int | None) -> SamplingState:
    made = SamplingState(1.0, 0, 1.0, None, torch.Generator().manual_seed(seed))
    return replace(made, **changes)


def _logits(rows: int, vocabulary: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 2


def _drawn(logits: torch.Tensor, state: SamplingState, n: int) -> Counter[int]:
    return Counter(sample(logits[None], [state])[0].token for _ in range(n))


def test_greedy_is_the_argmax() -> None:
    logits = _logits(5, 1000)
    assert [s.token for s in sample(logits, [GREEDY] * 5)] == logits.argmax(-1).tolist()


def test_rows_of_a_batch_are_independent() -> None:
    """A seeded row draws the same tokens alone as among others, greedy or not."""
    logits = _logits(3, 50)
    alone = _state(5)
    expected = [sample(logits[1:2], [alone])[0].token for _ in range(20)]
    first, among = _state(1), _state(5)
    got = [sample(logits, [first, among, GREEDY]) for _ in range(20)]
    assert [row[1].token for row in got] == expected
    assert len(set(expected)) > 1
    assert {row[2].token for row in got} == {int(logits[2].argmax())}


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    counts = _drawn(logits, _state(), 4000)
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.log(torch.tensor([0.8, 0.2]))
    cold, hot = (_drawn(logits, _state(temperature=t), 2000)[0] / 2000 for t in (0.5, 2.0))
    assert cold == pytest.approx(16 / 17, abs=0.03)
    assert hot == pytest.approx(2 / 3, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = _logits(1, 500)[0] * 100
    assert set(_drawn(logits, _state(temperature=temperature), 10)) == {int(logits.argmax())}


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = _logits(1, 200)[0]
    counts = _drawn(logits, _state(top_k=3, temperature=2.0), 500)
    assert set(counts) == set(logits.topk(3).indices.tolist())
    assert set(_drawn(logits, _state(top_k=1), 20)) == {int(logits.argmax())}
    assert len(_drawn(logits, _state(top_k=10_000, temperature=5.0), 500)) > 50


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.75, 0.9])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, top_k: int) -> None:
    probabilities = torch.tensor([0.3, 0.05, 0.4, 0.15, 0.1])
    order = [2, 0, 3, 4, 1][: top_k or 5]
    total = float(sum(probabilities[order]))
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += float(probabilities[token]) / total
        if reached >= top_p:
            break
    counts = _drawn(probabilities.log(), _state(top_p=top_p, top_k=top_k), 800)
    assert set(counts) == set(kept)


def test_top_p_over_a_flat_vocabulary_sorts_all_of_it() -> None:
    """A nucleus larger than the first guess of candidates."""
    logits = torch.linspace(0.001, 0, 2000)
    seen = set(_drawn(logits, _state(top_p=0.5), 3000))
    assert max(seen) < 1010 and len(seen) > 600
    assert max(_drawn(logits, _state(top_p=1.0), 300)) > 1900


def test_a_seed_repeats_and_another_differs() -> None:
    logits, source = _logits(1, 300), torch.Generator().manual_seed(0)

    def run(seed: int | None) -> list[int]:
        state = SamplingState.of(Sampling(temperature=1.0, seed=seed), source)
        return [sample(logits, [state])[0].token for _ in range(12)]

    assert run(11) == run(11)
    assert run(11) != run(12)
    assert run(None) != run(None), "without a seed, each request is given another"


def test_settings_are_taken_from_the_request() -> None:
    asked = Sampling(temperature=0.7, top_k=5, top_p=0.8, logprobs=2, seed=1)
    state = SamplingState.of(asked, torch.Generator())
    assert (state.temperature, state.top_k, state.top_p, state.logprobs) == (0.7, 5, 0.8, 2)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = _logits(2, 40)
    expected = logits.log_softmax(-1)
    state = _state(temperature=3.0, top_k=2, logprobs=4)
    greedy = replace(GREEDY, logprobs=0)
    first, second = (s.logprob for s in sample(logits, [state, greedy]))
    assert first is not None and second is not None
    assert first.logprob == pytest.approx(float(expected[0, first.token]))
    values, tokens = expected[0].topk(4)
    assert [token for token, _ in first.top] == tokens.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist())
    assert second.logprob == pytest.approx(float(expected[1].max())) and second.top == []
    assert sample(logits[:1], [GREEDY])[0].logprob is None
