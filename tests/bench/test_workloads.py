"""The workloads draw the same prompts from the same seed, and what their options promise."""

from __future__ import annotations

import itertools
import random

import pytest

from banyan.bench.drive import Pace
from banyan.bench.work import MultiTurn, Prompt, SharedPrefix, TextTokens, Vocabulary, Workload
from banyan.errors import ConfigError

VOCABULARY = Vocabulary(512, frozenset({0, 1, 2}))
SMALL = SharedPrefix(groups=3, prompts_per_group=4, shared=32, question=8, output=2, rounds=3)


def rounds_of(
    workload: Workload, answers: dict[int, list[int]] | None = None
) -> list[list[Prompt]]:
    play = workload.play(VOCABULARY)
    rounds = [next(play)]
    while True:
        try:
            rounds.append(play.send(answers or {}))
        except StopIteration:
            return rounds


def by_index(prompts: list[Prompt]) -> dict[int, list[int]]:
    return {p.index: p.tokens for p in prompts}


def test_vocabulary_leaves_out_the_special_tokens() -> None:
    drawn = VOCABULARY.draw(random.Random(3), 20_000)
    assert len(drawn) == 20_000
    assert set(drawn) == set(range(3, 512))


def test_text_tokens_are_runs_of_the_text_and_wrap_around() -> None:
    text = TextTokens(tuple(range(10)))
    run = text.draw(random.Random(1), 25)
    assert len(run) == 25
    assert all((a + 1) % 10 == b for a, b in itertools.pairwise(run))


def test_shared_prefix_shares_within_a_group_and_nowhere_else() -> None:
    first = rounds_of(SMALL)[0]
    assert len(first) == SMALL.requests == 12
    prefixes = {(p.group, tuple(p.tokens[:32])) for p in first}
    assert len(prefixes) == 3
    questions = {tuple(p.tokens[32:]) for p in first}
    assert len(questions) == 12
    assert {len(p.tokens) for p in first} == {40}
    assert SMALL.group_tokens == 32 + 4 * 10


def test_shared_prefix_asks_the_same_prompts_in_another_order() -> None:
    one, two, three = rounds_of(SMALL)
    assert by_index(one) == by_index(two) == by_index(three)
    orders = {tuple(p.index for p in r) for r in (one, two, three)}
    assert len(orders) == 3


def test_shared_prefix_without_shuffle_goes_group_by_group() -> None:
    plain = SharedPrefix(
        groups=3, prompts_per_group=2, shared=4, question=4, rounds=2, shuffle=False
    )
    for prompts in rounds_of(plain):
        assert [p.index for p in prompts] == list(range(6))
        assert [p.group for p in prompts] == [0, 0, 1, 1, 2, 2]


def test_fresh_questions_keep_the_prefixes_and_change_the_rest() -> None:
    fresh = SharedPrefix(groups=2, prompts_per_group=2, shared=16, question=8, fresh_questions=True)
    one, two, _ = rounds_of(fresh)
    for index, tokens in by_index(one).items():
        again = by_index(two)[index]
        assert again[:16] == tokens[:16]
        assert again[16:] != tokens[16:]


def test_the_seed_decides_everything() -> None:
    assert rounds_of(SMALL) == rounds_of(SMALL)
    other = SharedPrefix(
        groups=3, prompts_per_group=4, shared=32, question=8, output=2, rounds=3, seed=1
    )
    assert by_index(rounds_of(SMALL)[0]) != by_index(rounds_of(other)[0])


def test_multi_turn_repeats_the_conversation_with_the_answers() -> None:
    talk = MultiTurn(clients=3, rounds=3, first=10, message=5, output=2)
    answers = {client: [900 + client, 901 + client] for client in range(3)}
    one, two, three = (by_index(r) for r in rounds_of(talk, answers))
    for client in range(3):
        assert len(one[client]) == 10
        assert two[client][:12] == one[client] + answers[client]
        assert three[client][: len(two[client])] == two[client]
        assert len(three[client]) == 10 + 2 * (2 + 5)


def test_multi_turn_drops_a_client_whose_request_failed() -> None:
    talk = MultiTurn(clients=3, rounds=2, first=4, message=2, output=1)
    play = talk.play(VOCABULARY)
    next(play)
    assert sorted(by_index(play.send({0: [7], 2: [8]}))) == [0, 2]


def test_arrivals_follow_the_rate() -> None:
    due = Pace(request_rate=50.0, seed=4).arrivals(2000, turn=0)
    assert due == sorted(due) and due[0] == 0.0
    assert due[-1] == pytest.approx(2000 / 50, rel=0.1)
    assert due == Pace(request_rate=50.0, seed=4).arrivals(2000, turn=0)
    assert due != Pace(request_rate=50.0, seed=4).arrivals(2000, turn=1)
    assert Pace(request_rate=0).arrivals(3, 0) == [0.0] * 3
    assert Pace(request_rate=float("inf")).arrivals(3, 0) == [0.0] * 3


@pytest.mark.parametrize(
    ("build", "option"),
    [
        (lambda: SharedPrefix(prompts_per_group=0), "--prompts-per-group"),
        (lambda: SharedPrefix(shared=-1), "--shared"),
        (lambda: MultiTurn(message=0), "--message"),
        (lambda: Pace(request_rate=-1), "--request-rate"),
        (lambda: Pace(concurrency=-1), "--concurrency"),
        (lambda: TextTokens((1,)), "--text"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(build: object, option: str) -> None:
    assert callable(build)
    with pytest.raises(ConfigError) as refused:
        build()
    assert refused.value.option == option
