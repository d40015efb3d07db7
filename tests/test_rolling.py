"""Which snapshots of conversations stay: `banyan.rolling` on a small real cache.

Pages of 4 tokens. What is the first to go is seen by evicting one slot after the other.
"""

from __future__ import annotations

import pytest

from banyan.engine.messages import GenerateRequest, Sampling
from banyan.tree import Mark, Tier, encode_tokens
from tests.cases.scene import DEVICE, HOST, OK, A, B, C, Stream, index_of
from tests.support.reference import survey
from tests.support.rig import Rig
from tests.support.toy_engine import ToyEngine

STATES = "full+state"
Place = tuple[int, int]
"""(stream that the last token is of, position at which the data ends)."""


def talk(rig: Rig, tokens: list[int], prompt: int, answer: int) -> int:
    """One turn: snapshots at the end of its prompt and of its answer; where it resumed."""
    lease = rig.acquire(tokens[: prompt + 1])
    for stop, mark in ((prompt, Mark.PROMPT), (answer, Mark.TURN)):
        if stop > lease.length:
            assert rig.compute(lease, tokens, stop) is OK
            rig.cache.commit(lease, encode_tokens(tokens), mark)
    rig.cache.release(lease)
    rig.settle()
    rig.check()
    return lease.boundary


def publish(rig: Rig, tokens: list[int], *marks: tuple[int, Mark]) -> None:
    """One request with checkpoints at the given positions."""
    lease = rig.acquire(tokens)
    for stop, mark in marks:
        assert rig.compute(lease, tokens, stop) is OK
        rig.cache.commit(lease, encode_tokens(tokens), mark)
    rig.cache.release(lease)
    rig.settle()
    rig.check()


def places(rig: Rig, tier: Tier = DEVICE, name: str = "state") -> set[Place]:
    """Where data of a component lies."""
    component = index_of(rig, name)
    return {
        (int.from_bytes(key[-4:], "little") // 100_000, len(key) // 4)
        for _, key in survey(rig.cache.tree)[tier][component]
    }


def victims(rig: Rig, count: int, tier: Tier = DEVICE, name: str = "state") -> list[Place]:
    """The next `count` slots of a component to go, evicted one by one."""
    gone: list[Place] = []
    for _ in range(count):
        before = places(rig, tier, name)
        need = [0] * len(rig.spec.components)
        need[index_of(rig, name)] = 1
        freed = rig.cache.tree.evict(tier, need)
        assert freed is not None
        rig.cache.controller.give_back(freed)
        rig.check()
        gone += sorted(before - places(rig, tier, name))
    assert len(gone) == count
    return gone


def chat_rig(states: int = 12, **options: object) -> Rig:
    """A cache with pages enough, and few states; device only unless `host` is given."""
    return Rig(STATES, device=[400, states], **{"host": [], **options})  # type: ignore[arg-type]


# ---- superseded ----------------------------------------------------------------------------------


def test_superseded_snapshots_stay_while_there_is_room_and_are_the_first_to_go() -> None:
    rig = chat_rig()
    talk(rig, B[0:16], 8, 16)
    found = [talk(rig, A[0:end], end - 8, end) for end in (16, 32, 48)]
    assert found == [0, 16, 32]
    assert places(rig) == {(2, 8), (2, 16)} | {(1, end) for end in (8, 16, 24, 32, 40, 48)}
    gone = victims(rig, 8)
    assert set(gone[:6]) == {(2, 8)} | {(1, end) for end in (8, 16, 24, 32, 40)}
    assert gone[6:] == [(2, 16), (1, 48)], "the last ones by last use"


def test_a_snapshot_that_was_superseded_serves_a_turn_said_otherwise() -> None:
    rig = chat_rig()
    for end in (16, 32):
        talk(rig, A[0:end], end - 8, end)
    assert talk(rig, [*A[0:16], *C[16:32]], 24, 32) == 16


@pytest.mark.parametrize("mark", [Mark.PROMPT, Mark.TURN])
def test_what_is_kept_for_others_is_never_superseded(mark: Mark) -> None:
    rig = chat_rig()
    publish(rig, A[0:17], (4, Mark.KEEP), (8, mark), (12, Mark.KEEP), (16, mark))
    talk(rig, A[0:32], 24, 32)
    gone = victims(rig, 6)
    assert set(gone[:3]) == {(1, 8), (1, 16), (1, 24)}
    assert set(gone[3:]) == {(1, 4), (1, 12), (1, 32)}


def test_a_snapshot_that_becomes_a_branch_point_is_kept_from_then_on() -> None:
    rig = chat_rig()
    talk(rig, A[0:16], 8, 16)
    assert victims(rig, 1) == [(1, 8)]
    publish(rig, [*A[0:8], *B[8:12]], (8, Mark.KEEP), (12, Mark.PROMPT))
    talk(rig, A[0:32], 24, 32)
    assert set(victims(rig, 5)[2:]) == {(1, 8), (2, 12), (1, 32)}


def test_a_snapshot_that_another_request_needs_too_is_kept_while_its_own_goes_on() -> None:
    """The other one found nothing when it began, and has a checkpoint of its own at 8."""
    rig = chat_rig()
    tokens = {rig.acquire(prompt): prompt for prompt in (A[0:17], [*A[0:8], *B[8:13]])}
    own, other = tokens
    for lease, stop, mark in ((own, 8, Mark.PROMPT), (other, 8, Mark.KEEP), (own, 16, Mark.TURN)):
        assert rig.compute(lease, tokens[lease], stop) is OK
        rig.cache.commit(lease, encode_tokens(tokens[lease]), mark)
    for lease in tokens:
        rig.cache.release(lease)
    rig.check()
    assert rig.cache.tree.device.evictable[1] == 2
    talk(rig, C[0:16], 8, 16)
    assert set(victims(rig, 4)[1:]) == {(1, 8), (1, 16), (3, 16)}


def test_branch_hint_and_interval_outlive_the_snapshots_of_their_conversation() -> None:
    """By the scheduler's own plan: system prompt to 20, interval 16, a second prompt leaves the
    first at 36."""
    e = ToyEngine(STATES, device=[400, 30], chunk=64, state_interval=16)

    def say(prompt: list[int], name: str) -> list[int]:
        e.roster.submit(
            GenerateRequest(
                request_id=name,
                prompt=prompt,
                sampling=Sampling(max_tokens=9),
                cache_hints=(20,),
            )
        )
        e.run()
        return prompt + e.tokens(name)

    tokens = list(range(1, 58))
    history = say(tokens, "first")
    say([*tokens[:36], *range(100, 140)], "other")
    for turn in range(3):
        history = say([*history, *range(140, 152)], f"turn {turn}")

    def held() -> set[int]:
        return {end for end in range(4, len(history), 4) if e.hit(history[:end]) == end}

    kept, tip = {16, 20, 32, 36, 48}, (len(history) - 1) // 4 * 4
    intervals = set(range(16, tip, 16))
    assert held() > kept | {tip} and held() - kept - intervals - {tip}, held()
    while kept <= (before := held()):
        freed = e.cache.tree.evict(DEVICE, [0, 1])
        assert freed is not None
        e.cache.controller.give_back(freed)
    assert before - intervals == {20, 36, tip}, "all that was superseded has gone first"


def test_a_snapshot_resumed_twice_is_not_superseded() -> None:
    rig = chat_rig()
    talk(rig, A[0:16], 8, 16)
    for _ in range(2):
        lease = rig.acquire(A[0:18])
        assert lease.boundary == 16 and rig.compute(lease, A[0:18], 18) is OK
        rig.cache.release(lease)
    talk(rig, A[0:32], 24, 32)
    assert set(victims(rig, 4)[2:]) == {(1, 16), (1, 32)}


def test_one_resumed_by_its_own_conversation_alone_is() -> None:
    rig = chat_rig()
    talk(rig, A[0:16], 8, 16)
    talk(rig, A[0:32], 24, 32)
    assert victims(rig, 4)[3:] == [(1, 32)]


def test_a_snapshot_that_goes_on_in_two_ways_is_not_superseded() -> None:
    """The second way was computed beside the first, so it was never resumed there."""
    rig = chat_rig()
    tokens = [*A[0:16], *C[16:24]]
    beside = rig.acquire(tokens)
    talk(rig, A[0:16], 8, 16)
    assert rig.compute(beside, tokens, 24) is OK
    rig.cache.commit(beside, encode_tokens(tokens), Mark.TURN)
    rig.cache.release(beside)
    talk(rig, A[0:32], 24, 32)
    assert set(victims(rig, 5)[2:]) == {(1, 16), (3, 24), (1, 32)}


def test_what_a_prefill_passed_goes_first_and_supersedes_nothing() -> None:
    rig = chat_rig()
    talk(rig, A[0:16], 8, 16)
    publish(rig, A[0:33], (24, Mark.PASSED))
    gone = victims(rig, 3)
    assert set(gone[:2]) == {(1, 8), (1, 24)} and gone[2] == (1, 16)


# ---- windows -------------------------------------------------------------------------------------


def test_windows_are_superseded_like_states_but_for_what_the_new_one_needs() -> None:
    """Window of 8 tokens: a boundary needs the two pages before it."""
    rig = Rig("full+window", device=[400, 40], host=[])
    talk(rig, A[0:16], 8, 16)
    talk(rig, A[0:20], 16, 20)
    assert places(rig, name="window") == {(1, end) for end in (4, 8, 12, 16, 20)}
    assert set(victims(rig, 3, name="window")) == {(1, 4), (1, 8), (1, 12)}
    assert rig.hit(A[0:20]) == (20, 20)


def test_a_kept_checkpoint_loses_no_page_to_a_superseded_one() -> None:
    """A system prompt's end at 16, a first turn that ends at 20: page [12, 16) is of both."""
    rig = Rig("full+window", device=[400, 40], host=[])
    publish(rig, A[0:21], (16, Mark.KEEP), (20, Mark.TURN))
    talk(rig, A[0:32], 28, 32)
    assert victims(rig, 2, name="window") == [(1, 4), (1, 8)], "what no checkpoint needs"
    victims(rig, 2, name="window")
    assert rig.hit(A[0:32]) == (32, 32)
    assert rig.hit(A[0:16]) == (16, 16)


# ---- prompts' ends -------------------------------------------------------------------------------


def chat_shortened(rig: Rig, conversations: int, rounds: int) -> list[list[int]]:
    """Conversations whose answers come back two tokens short; what each turn found, by round, as
    tokens behind the end of the last prompt."""
    history: list[list[int]] = [[] for _ in range(conversations)]
    ends = [0] * conversations
    behind = []
    for round_ in range(rounds):
        found = []
        for i, shown in enumerate(history):
            tokens = shown + Stream(10 + i)[100 * round_ : 100 * round_ + 30]
            prompt = (len(shown) + 10) // 4 * 4
            found.append(ends[i] - talk(rig, tokens, prompt, prompt + 8))
            history[i], ends[i] = tokens[: prompt + 6], prompt
        behind.append(found)
    return behind


def test_c100_where_answers_come_back_otherwise_the_prompts_ends_are_what_stays() -> None:
    """C100: three conversations on six states. At first the ends of the answers are kept, of no
    use; once that is seen, each turn finds the end of its last prompt."""
    rig = chat_rig(states=6)
    behind = chat_shortened(rig, 3, 16)
    assert rig.cache.rolling.turns < 0.5, f"{rig.cache.rolling.turns:.2f}"
    assert behind[-6:] == [[0, 0, 0]] * 6, f"tokens short of the prompt's end: {behind}"
    hot = places(rig) - set(victims(rig, len(places(rig)) - 3))
    assert hot == {(10 + i, 8 + 15 * 16) for i in range(3)}, "the ends of the last prompts"


def test_where_answers_come_back_as_they_were_the_answers_ends_are() -> None:
    rig = chat_rig(states=6)
    for end in range(16, 16 * 20, 16):
        for i in range(3):
            found = talk(rig, Stream(10 + i)[0:end], end - 8, end)
            assert found == end - 16
    assert rig.cache.rolling.turns > 0.99
    hot = places(rig) - set(victims(rig, len(places(rig)) - 3))
    assert hot == {(10 + i, 16 * 19) for i in range(3)}


# ---- crowded -------------------------------------------------------------------------------------


class Cycle:
    """Conversations that take turns; `served` counts, by round, those that found their last one.

    Args:
        dropped: take away every state after each turn.
    """

    def __init__(self, rig: Rig, dropped: bool = False) -> None:
        self.rig, self._dropped = rig, dropped
        self._ends: dict[int, int] = {}
        self.crowded: list[bool] = []
        self.distances: list[float] = []

    def rounds(self, conversations: range, count: int) -> list[int]:
        served = []
        for _ in range(count):
            found = 0
            for i in conversations:
                last = self._ends.get(i, 0)
                end = self._ends[i] = last + 12
                boundary = talk(self.rig, Stream(10 + i)[0:end], end - 4, end)
                found += boundary == last > 0
                rolling = self.rig.cache.rolling
                self.crowded.append(rolling.crowded)
                self.distances.append(rolling.distance)
                if self._dropped:
                    victims(self.rig, len(places(self.rig)))
            served.append(found)
        return served


def big_rig(states: int) -> Rig:
    return Rig(STATES, device=[6000, states], host=[])


def test_with_room_for_all_it_is_never_crowded() -> None:
    cycle = Cycle(big_rig(20))
    assert cycle.rounds(range(8), 8) == [0, *[8] * 7]
    assert not any(cycle.crowded)


def test_more_conversations_than_room_are_crowded_and_some_are_served_always() -> None:
    """24 conversations on 10 states: by last use alone not one would ever be served."""
    cycle = Cycle(big_rig(10))
    served = cycle.rounds(range(24), 12)
    assert cycle.crowded[-1] and not cycle.crowded[23]
    assert all(n >= 5 for n in served[-4:]), f"served by round: {served}"


def test_whether_it_is_crowded_is_told_by_distances_and_not_by_what_was_kept() -> None:
    kept, lost = Cycle(big_rig(10)), Cycle(big_rig(10), dropped=True)
    assert sum(kept.rounds(range(24), 5)) > 0 == sum(lost.rounds(range(24), 5))
    assert kept.crowded == lost.crowded and any(kept.crowded)
    assert kept.distances == lost.distances
    few = Cycle(big_rig(10), dropped=True)
    few.rounds(range(5), 10)
    assert not any(few.crowded)


def test_it_is_crowded_no_longer_when_fewer_come() -> None:
    cycle = Cycle(big_rig(10))
    cycle.rounds(range(24), 6)
    assert cycle.crowded[-1]
    served = cycle.rounds(range(4), 16)
    assert not cycle.crowded[-1]
    assert served[-1] == 4, f"served by round: {served}"


def test_newcomers_take_the_places_of_those_who_never_come_back() -> None:
    cycle = Cycle(big_rig(10))
    before = cycle.rounds(range(24), 6)
    after = cycle.rounds(range(50, 74), 9)
    assert cycle.crowded[-1]
    assert before[-1] >= 5 and sum(after[:2]) <= 2, "the places are taken at first"
    assert after[-1] >= 4, f"served by round: {after}"


# ---- host ----------------------------------------------------------------------------------------


def leave_device(rig: Rig) -> None:
    """Everything goes to host, saved first where it is not there yet."""
    pools, index = rig.stack.device_slots, rig.cache.tree.device
    while any(index.evictable):
        counts = [p.free_count + n for p, n in zip(pools, index.evictable, strict=True)]
        got = rig.cache.controller.reserve(DEVICE, counts)
        if isinstance(got, list):
            rig.cache.controller.free(DEVICE, got)
        rig.settle()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_superseded_snapshots_are_the_first_to_go_on_host_too(write_policy: str) -> None:
    rig = chat_rig(host=[800, 40], write_policy=write_policy)
    talk(rig, B[0:16], 8, 16)
    talk(rig, A[0:16], 8, 16)
    leave_device(rig)
    talk(rig, A[0:32], 24, 32)
    leave_device(rig)
    held = places(rig, HOST)
    assert {(2, 16), (1, 16), (1, 32)} <= held and not places(rig)
    gone = victims(rig, len(held), HOST)
    assert gone[-2:] == [(2, 16), (1, 32)], f"in this order: {gone}"


def test_a_snapshot_superseded_while_it_is_saved_is_cold_on_host() -> None:
    rig = chat_rig(host=[800, 40])
    lease = rig.acquire(A[0:17])
    tokens = A[0:24]
    for stop in (8, 16, 24):
        assert rig.compute(lease, tokens, stop) is OK
        rig.cache.commit(lease, encode_tokens(tokens), Mark.TURN)
    assert rig.cache.controller.operations, "all three are still being saved"
    rig.cache.release(lease)
    rig.settle()
    assert victims(rig, 3, HOST) == [(1, 8), (1, 16), (1, 24)]
