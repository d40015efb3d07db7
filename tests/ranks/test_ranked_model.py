"""A model on several ranks: it fails on all or on none, and rank 0 chooses the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from banyan.engine.messages import Sampling
from banyan.engine.plans import SeqInput
from banyan.engine.rank_context import RankContext
from banyan.engine.ranked_model import RankedModel
from banyan.errors import CopyError, RankLostError
from banyan.ranks import Agreement, Fabric, Words
from banyan.tiers.journal import Journal
from banyan.tiers.ops import CopyJob, CopyKind, OpId
from tests.ranks.manual import RECORD_BYTES, Copies, Ticket, on_ranks
from tests.support.toy_model import ToyChoice, ToySampler


class Model:
    """A model whose forward and sampling do what a rank's test says."""

    def __init__(self, fails: Exception | None, reads: bool = True) -> None:
        self._fails, self._reads = fails, reads

    def forward(self, seqs: Sequence[SeqInput]) -> list[int]:
        """See `Model`."""
        for seq in seqs:
            if seq.ticket is not None and self._reads:
                seq.ticket.wait_layer(0)
        if self._fails is not None:
            raise self._fails
        return [len(seq.tokens) for seq in seqs]

    def sample(self, logits: list[int], samplers: Sequence[ToySampler]) -> list[ToyChoice]:
        """See `Model`."""
        if self._fails is not None:
            raise self._fails
        return [ToyChoice(token, None) for token in logits]

    def new_sampler(self, sampling: Sampling) -> ToySampler:
        """See `Model`."""
        return ToySampler(sampling)

    def new_text(self, sampling: Sampling, prompt: Sequence[int]) -> Any:
        """See `Model`."""
        return ["text", sampling, prompt]


def forwards(
    ranks: int,
    *,
    model_fails: dict[int, Exception] | None = None,
    copy_fails: set[int] | None = None,
    exact: bool = False,
    gated: bool = True,
) -> tuple[list[Any], set[int]]:
    """What a forward gives on each rank, and how often ranks have talked for it."""
    talks: set[int] = set()

    def call(fabric: Fabric) -> Any:
        context = RankContext(fabric)
        inner = Copies()
        copies = context.copies(inner, RECORD_BYTES)
        ticket = copies.submit(CopyJob(OpId(1), CopyKind.LOAD_BACK, ()))
        inner.tickets[OpId(1)].fails = fabric.rank in (copy_fails or ())
        ranked = context.model(Model((model_fails or {}).get(fabric.rank)), exact)
        seq = SeqInput([1, 2, 3], 0, [], ticket if gated else None)
        try:
            return ranked.forward([seq])
        finally:
            talks.add(context.agreement.talks)

    return on_ranks(ranks, call), talks


def test_a_forward_that_all_ranks_finish_is_each_one_s_own() -> None:
    for exact, gated, talks in ((False, True, 2), (False, False, 2), (True, True, 2)):
        assert forwards(3, exact=exact, gated=gated) == ([[3]] * 3, {talks})
    assert forwards(3, exact=True, gated=False) == ([[3]] * 3, {0}), "nothing can fail: no talk"


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_that_fails_on_one_rank_fails_the_forward_on_all(exact: bool) -> None:
    errors, talks = forwards(3, copy_fails={1}, exact=exact)
    assert [type(error) for error in errors] == [CopyError] * 3 and talks == {2}


def test_a_model_that_fails_on_one_rank_fails_on_all() -> None:
    own = ValueError("on this rank")
    errors, talks = forwards(3, model_fails={2: own})
    assert errors[2] is own and talks == {2}
    assert [str(error) for error in errors[:2]] == ["the model failed on another rank"] * 2


def test_a_copy_error_of_the_model_itself_is_one() -> None:
    errors, _ = forwards(2, model_fails={1: CopyError("not loaded")})
    assert [type(error) for error in errors] == [CopyError] * 2


def test_a_model_that_fails_over_bytes_that_did_not_come_is_not_to_blame() -> None:
    errors, _ = forwards(3, copy_fails={1}, model_fails={1: ValueError("nonsense")})
    assert [type(error) for error in errors] == [CopyError] * 3


def test_a_model_that_fails_elsewhere_at_the_same_time_is() -> None:
    errors, _ = forwards(3, copy_fails={1}, model_fails={0: ValueError("of its own")})
    assert [type(error) for error in errors] == [ValueError, RuntimeError, RuntimeError]


@pytest.mark.parametrize("exact", [False, True])
def test_a_rank_that_is_lost_under_a_forward_is_no_failure_of_the_model(exact: bool) -> None:
    """A collective of the model's own may be where it is noticed; nobody is told of it then."""
    agreement = Agreement(Silent(), Journal())
    ticket = Ticket()
    ranked = RankedModel(Model(RankLostError("gone")), agreement, exact)
    with pytest.raises(RankLostError, match="gone"):
        ranked.forward([SeqInput([1], 0, [], ticket)])
    assert agreement.talks == 0
    ranked = RankedModel(Model(None), agreement, exact)
    with pytest.raises(RankLostError, match="silent"):
        ranked.forward([SeqInput([1], 0, [], ticket)])


class Silent:
    """A fabric on which nobody answers."""

    rank, size = 1, 2

    def collect(self, words: Words) -> list[Words] | None:
        """See `Fabric`."""
        raise RankLostError("silent")

    def broadcast(self, message: bytes | None) -> bytes:
        """See `Fabric`."""
        raise RankLostError("silent")

    def gather(self, part: bytes) -> list[bytes]:
        """See `Fabric`."""
        raise RankLostError("silent")

    def wait_for_all(self, what: str) -> None:
        """See `Fabric`."""
        raise RankLostError("silent")


def samples(fails: dict[int, Exception], exact: bool) -> list[Any]:
    """The tokens that each rank gets for two rows, which differ by rank."""

    def call(fabric: Fabric) -> Any:
        ranked = RankContext(fabric).model(Model(fails.get(fabric.rank)), exact)
        samplers = [ranked.new_sampler(Sampling()) for _ in range(2)]
        choices = ranked.sample([10 + fabric.rank, 20 + fabric.rank], samplers)
        return [choice.token for choice in choices]

    return on_ranks(3, call)


def test_rank_0_chooses_the_tokens_of_all() -> None:
    assert samples({}, exact=False) == [[10, 20]] * 3
    own_failure_unused: dict[int, Exception] = {2: ValueError("is not asked")}
    assert samples(own_failure_unused, exact=False) == [[10, 20]] * 3


def test_exact_tokens_are_each_rank_s_own() -> None:
    assert samples({}, exact=True) == [[10, 20], [11, 21], [12, 22]]


def test_sampling_that_fails_on_rank_0_fails_on_all() -> None:
    own = ValueError("no numbers")
    errors = samples({0: own}, exact=False)
    assert errors[0] is own
    assert [str(error) for error in errors[1:]] == ["sampling failed on rank 0"] * 2


def test_texts_and_samplers_are_the_model_s() -> None:
    ranked = RankContext(Silent()).model(Model(None))
    assert ranked.new_text(Sampling(), [4]) == ["text", Sampling(), [4]]
    assert isinstance(ranked.new_sampler(Sampling(seed=3)), ToySampler)
