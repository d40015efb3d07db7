"""How much is found, on workloads with known figures: conversations, shared prefixes, hints.

Where only the rate matters the model is `NullModel`, and the cache and scheduler are the product's;
the toy model and the presets check the bytes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from banyan.engine.messages import GenerateRequest, Output, Sampling, Usage
from banyan.engine.models import LoadedModel, load_model
from tests.parity.harness import Engine
from tests.support.toy_engine import A, B, ToyEngine
from tests.support.toy_model import VOCAB, answer
from tests.support.workloads import (
    Chats,
    Question,
    Server,
    arrivals,
    cached_tokens,
    hit_rate,
    serve,
    shared_prefixes,
)

# ---- conversations -------------------------------------------------------------------------------

CLIENTS, ROUNDS = 128, 12
TIPS = 43
"""A third of the conversations' ends."""
SYSTEM, MESSAGE, ANSWER = 96, 48, 33
WINDOW_PAGES = 4
SECOND_POOL = {"full+state": TIPS, "full+window": TIPS * WINDOW_PAGES}
"""Slots of the component that is short; full attention has room for everything."""


@cache
def chat_rate(
    order: str, kind: str, in_flight: int, whole_path: bool, hints: tuple[int, ...] | None = ()
) -> float:
    """Token hit rate of the conversations. Of the message ends, those at `hints` are given."""
    longest = SYSTEM + ROUNDS * (MESSAGE + ANSWER)
    server = Server(
        kind,
        [(CLIENTS + 4) * longest // 16, SECOND_POOL[kind]],
        page_size=16,
        window=16 * WINDOW_PAGES,
        whole_path=whole_path,
        chunk=512,
        max_running=4,
    )
    chats = Chats(CLIENTS, SYSTEM, MESSAGE, ANSWER, hints)
    turns = arrivals(order, CLIENTS, ROUNDS)
    receipts = serve(server, turns, chats.question, chats.answered, in_flight)
    server.cache.check()
    return hit_rate(receipts)


def assert_better(least: float, order: str, kind: str = "full+state", in_flight: int = 1) -> None:
    """The rate is at least `least` above that of refreshing whole paths."""
    ours, theirs = (chat_rate(order, kind, in_flight, whole) for whole in (False, True))
    assert ours - theirs >= least, f"{ours:.3f} against {theirs:.3f}: {ours - theirs:+.3f}"


@pytest.mark.parametrize("order", ["random", "shuffled", "cyclic"])
def test_conversations_that_do_not_all_fit_are_served_better_than_by_last_use(order: str) -> None:
    assert_better(0.15, order)


@pytest.mark.parametrize(
    "order",
    [
        "random",
        pytest.param("shuffled", marks=pytest.mark.slow),
        pytest.param("cyclic", marks=pytest.mark.slow),
    ],
)
def test_they_are_served_better_too_with_four_at_a_time(order: str) -> None:
    assert_better(0.13, order, in_flight=4)


@pytest.mark.parametrize(
    "order",
    [
        "random",
        pytest.param("shuffled", marks=pytest.mark.slow),
        pytest.param("cyclic", marks=pytest.mark.slow),
    ],
)
def test_windows_in_place_of_states_are_served_better_too(order: str) -> None:
    assert_better(0.1, order, kind="full+window")


@pytest.mark.parametrize(
    "hints",
    [
        pytest.param((0, -1), id="system-and-last-message"),
        pytest.param(
            None,
            id="every-message",
        ),
    ],
)
def test_hints_cost_conversations_nothing(hints: tuple[int, ...] | None) -> None:
    hinted, plain = (chat_rate("random", "full+state", 1, False, h) for h in (hints, ()))
    assert hinted >= plain - 0.02, f"{hinted:.3f} with hints, {plain:.3f} without"


# ---- shared prefixes -----------------------------------------------------------------------------

PAGE = 64
PRINTABLE = range(32, 127)


def assert_third_visitors_served(
    receipts: Sequence[Usage], groups: int, shared: int, least: float = 0.95
) -> None:
    """From the third visitor of each group on, `least` of what pages of 64 can give is found."""
    best = shared // PAGE * PAGE
    by_visitor = [receipts[at : at + groups] for at in range(0, len(receipts), groups)]
    rates = [cached_tokens(round_) / (best * groups) for round_ in by_visitor]
    late = cached_tokens(receipts[2 * groups :]) / (best * (len(receipts) - 2 * groups))
    shown = " ".join(f"{rate:.2f}" for rate in rates)
    assert late >= least, f"{late:.3f} of the best possible; by visitor {shown}"
    assert max(rates) <= 1, f"more found than is shared: {shown}"


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(("shared", "chunk"), [(300, 512), (700, 512), (1000, 512), (1000, 256)])
@pytest.mark.parametrize("states", [400, 24])
def test_a_prefix_that_ends_inside_a_chunk_is_found_from_the_third_visitor_on(
    shared: int, chunk: int, states: int, in_flight: int
) -> None:
    """8 groups of 8 visitors, interleaved. The second visitor shows where the prefix ends."""
    assert shared % PAGE and shared // PAGE * PAGE % chunk
    prompts = shared_prefixes(8, 8, shared, own=90, tokens=range(VOCAB))
    server = Server("full+state", [1600, states], page_size=PAGE, chunk=chunk, max_running=4)
    asks = range(len(prompts))
    receipts = serve(server, asks, lambda i: Question(prompts[i], 4), in_flight=in_flight)
    server.cache.check()
    assert_third_visitors_served(receipts, 8, shared)


@cache
def loaded(name: str) -> LoadedModel:
    """A preset, shared by all tests here."""
    torch.set_num_threads(1)
    return load_model(name)


@pytest.mark.parametrize("name", ["tiny-linear", "tiny-hybrid"])
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(
    ("groups", "each", "shared"), [(3, 4, 300), pytest.param(8, 8, 1000, marks=pytest.mark.slow)]
)
def test_a_real_model_finds_it_too(
    name: str, in_flight: int, groups: int, each: int, shared: int
) -> None:
    prompts = shared_prefixes(groups, each, shared, own=40, tokens=PRINTABLE)
    with Engine(loaded(name), page_size=PAGE, chunk=512, max_running=4) as engine:
        asks = range(len(prompts))
        receipts = serve(engine.core, asks, lambda i: Question(prompts[i], 4), in_flight=in_flight)
    assert_third_visitors_served(receipts, groups, shared)


# ---- checkpoints of one prompt, and hints --------------------------------------------------------


def ask(
    e: ToyEngine, prompt: list[int], max_tokens: int = 1, hints: tuple[int, ...] = ()
) -> Output:
    """Run one request with hints to its end; its last output. The answer must be right."""
    name = f"hinted{e.scheduler.counters.steps}"
    e.roster.submit(
        GenerateRequest(
            request_id=name,
            prompt=prompt,
            sampling=Sampling(max_tokens=max_tokens),
            cache_hints=hints,
        )
    )
    e.run()
    assert e.tokens(name) == answer(prompt, max_tokens)
    return e.last(name)


def resumable(e: ToyEngine, prompt: list[int]) -> list[int]:
    """The boundaries of a prompt at which it could be resumed."""
    ends = range(e.cache.page_size, len(prompt) + 1, e.cache.page_size)
    return [end for end in ends if e.hit(prompt[:end]) == end]


def others(count: int, length: int = 21) -> list[list[int]]:
    """Prompts with nothing in common."""
    return [[200 + i, *range(length - 1)] for i in range(count)]


def test_checkpoints_of_one_prompt_do_not_evict_each_other_first() -> None:
    """Ten slots, eight older prompts with a checkpoint each: those of the new one's three that find
    no free slot take the oldest prompts'."""
    e = ToyEngine("full+state", device=[200, 10], chunk=128)
    older = others(8)
    for prompt in older:
        ask(e, prompt)
    assert [resumable(e, prompt) for prompt in older] == [[20]] * 8
    prompt = A[:89]
    ask(e, prompt, hints=(20, 45))
    assert resumable(e, prompt) == [20, 44, 88]
    left = [i for i, prompt in enumerate(older) if resumable(e, prompt)]
    assert left in (list(range(1, 8)), list(range(2, 8))), f"kept of the older prompts: {left}"


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
@pytest.mark.parametrize("interval", [None, 8])
def test_a_prompt_takes_no_more_states_than_its_budget(budget: int, interval: int | None) -> None:
    e = ToyEngine(
        "full+state",
        device=[200, 20],
        chunk=128,
        checkpoints=budget,
        state_interval=interval,
    )
    older = others(16, length=9)
    for prompt in older:
        ask(e, prompt)
    prompt = A[:89]
    ask(e, prompt, hints=(12, 24, 36, 48))
    kept = resumable(e, prompt)
    assert len(kept) == budget and kept[-1] == 88, f"states at {kept} on a budget of {budget}"
    left = sum(bool(resumable(e, prompt)) for prompt in older)
    assert left >= min(16, 20 - budget - 1), f"{left} of 16 older prompts left"


KINDS = {"full+state": [200, 12], "full+window": [200, 24], "full+window+state": [200, 24, 12]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hinted", [True, False])
def test_a_hint_serves_the_second_conversation_and_a_branch_the_third(
    kind: str, hinted: bool
) -> None:
    """A system prompt of 42 tokens and first messages that differ at once. What a prompt's prefill
    passed is taken by others in between."""
    e = ToyEngine(kind, device=KINDS[kind], chunk=128)
    hints = (42,) if hinted else ()
    found = []
    for visitor in range(4):
        message = B[20 * visitor : 20 * visitor + 40]
        usage = ask(e, [*A[:42], *message], 5, hints).usage
        assert usage is not None
        found.append(usage.device)
        ask(e, [230 + visitor, *range(49)], 3)
    assert found == ([0, 40, 40, 40] if hinted else [0, 0, 40, 40])
