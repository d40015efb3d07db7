"""For every family: what is restored from host is read, all of it, and is the right thing.

A request resumes from host records that were changed while the device was empty. One flipped bit,
one buffer left out, or the state of a page earlier must change the logits of its first forward, so
no buffer could be forgotten unnoticed; with `verify` the flipped bit is caught before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from banyan.spec import CacheSpec, Point
from banyan.tiers.moves import StackMover
from tests.parity.recording import SUPPORT
from tests.parity.trial import BOUNDARY, PAGE, UNREAD, Place, Trial, flips, leave_out
from tests.support.families import FAMILIES, QUICK_FAMILIES, config_of, loaded_family
from tests.support.plain import reference_generate

Record = Callable[[str, object], None]


def families(point: bool = False) -> Iterator[Any]:
    """All families, or those with states; the quick ones run each time."""
    for family in FAMILIES:
        if point and not any(isinstance(c.reach, Point) for c in spec_of(family).components):
            continue
        yield pytest.param(family, marks=() if family in QUICK_FAMILIES else pytest.mark.slow)


def spec_of(family: str) -> CacheSpec:
    return CacheSpec.from_config(config_of(family), PAGE)


def buffers_of(family: str) -> set[str]:
    """Every buffer that the family's spec names, by layer."""
    return {f"{b.name} of layer {b.layer}" for c in spec_of(family).components for b in c.buffers}


def logits_move(trial: Trial, place: Place, change: Any, plain: torch.Tensor) -> bool:
    """Whether the request's first forward differs when `place` was changed on host."""
    with trial.changed(place, change):
        return not torch.equal(trial.resume().logits, plain)


@pytest.mark.parametrize("family", families())
def test_every_flipped_bit_and_every_missing_buffer_changes_the_logits(
    family: str, record_property: Record
) -> None:
    unread = UNREAD.get(family, frozenset())
    found: dict[str, Any] = {"kind": "mutations", "family": family, "unread": sorted(unread)}
    record_property(SUPPORT, found)
    exercised: set[str] = set()
    with Trial(family) as trial:
        plain = trial.resume()
        assert (plain.usage.host, plain.usage.device) == (BOUNDARY, 0)
        assert torch.isfinite(plain.logits).all()
        for place in trial.places:
            read = str(place) not in unread
            changes = flips(place, selective=read and trial.selects(place.entry.layer))
            flipped = any(logits_move(trial, place, change, plain.logits) for change in changes)
            assert flipped == read, f"one bit of {place}"
            missing = logits_move(trial, place, leave_out, plain.logits)
            assert missing == read, f"without {place}"
            exercised.add(str(place))
        assert torch.equal(trial.resume().logits, plain.logits), "all changes were undone"
    assert exercised == buffers_of(family)
    found["changed"] = len(exercised - unread)


@pytest.mark.parametrize("family", families(point=True))
def test_the_state_of_a_page_earlier_changes_the_logits(
    family: str, record_property: Record
) -> None:
    record_property(SUPPORT, {"kind": "earlier state", "family": family})
    with Trial(family) as trial:
        plain = trial.resume().logits
        points = [c for c, part in enumerate(spec_of(family).components) if part.name == "state"]
        for component in points:
            with trial.earlier_state(component):
                assert not torch.equal(trial.resume().logits, plain)
        assert points and torch.equal(trial.resume().logits, plain)


@pytest.mark.parametrize("family", families())
def test_verify_catches_the_flipped_bit(family: str, record_property: Record) -> None:
    """It counts, nothing is read from that record, and the answer is the plain one; one layer of
    each kind of buffer."""
    record_property(SUPPORT, {"kind": "verify", "family": family})
    with Trial(family, answer=6, verify="all") as trial:
        plain = reference_generate(loaded_family(family).model, trial.asked, 6)
        places = {place.buffer.name: place for place in trial.places}
        for count, place in enumerate(places.values(), 1):
            with trial.changed(place, next(flips(place, selective=False))):
                resumed = trial.resume()
            assert resumed.tokens == plain, place
            assert resumed.usage.computed == len(trial.asked), place
            stats = trial.engine.core.stats()
            assert stats["cache"]["copies"]["load_back"]["mismatched"] == count, place
            assert stats["engine"]["load_failures"] == count, place
        sound = trial.resume()
        assert sound.tokens == plain and sound.usage.host == BOUNDARY


@pytest.mark.parametrize("family", families())
def test_every_buffer_is_carried(family: str, record_property: Record) -> None:
    """The device has again what it had; a copy that forgets one buffer shows in that one alone."""
    record_property(SUPPORT, {"kind": "carried", "family": family})
    with Trial(family) as trial:
        before = trial.device_bytes()
        assert before.keys() == buffers_of(family)
        assert all((records != records.flat[0]).any() for records in before.values())

        def lost() -> set[str]:
            trial.resume()
            after = trial.device_bytes()
            return {name for name, records in before.items() if (after[name] != records).any()}

        for place in trial.places:
            with forgetting(trial, place):
                assert lost() == {str(place)}
        assert not lost()


@contextmanager
def forgetting(trial: Trial, place: Place) -> Iterator[None]:
    """Let load-backs bring zeros for one buffer."""
    load_back = StackMover.load_back

    def without(self: StackMover, job: Any, release: Any) -> Any:
        verdict = load_back(self, job, release)
        for block in job.blocks:
            if block.component == place.component:
                buffer = trial.stack.device[place.component].buffers[
                    place.entry.layer, place.entry.name
                ]
                buffer[torch.from_numpy(block.dst).long()] = 0
        return verdict

    with mock.patch.object(StackMover, "load_back", without):
        yield
