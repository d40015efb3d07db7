"""The history that ranks compare: its digest, its end, and where two of them part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from banyan.tiers import journal as history
from banyan.tiers.journal import Entry, Journal, Mutation, first_difference

ROOT = Path(__file__).parent.parent.parent


def journal_of(*lengths: int) -> Journal:
    """A history of releases."""
    journal = Journal()
    for length in lengths:
        journal.note(Mutation.RELEASE, length, -1)
    return journal


def test_equal_histories_have_equal_digests_and_others_do_not() -> None:
    assert journal_of(1, 2, 3).digest == journal_of(1, 2, 3).digest
    others = [(1, 2), (1, 2, 3, 4), (2, 1, 3), (1, 2, 4), ()]
    digests = {journal_of(*lengths).digest for lengths in others}
    assert len(digests) == len(others) and journal_of(1, 2, 3).digest not in digests
    first, second = Journal(), Journal()
    first.note(Mutation.ACQUIRE, 1)
    second.note(Mutation.RELEASE, 1)
    assert first.digest != second.digest


def test_an_entry_reads_well() -> None:
    assert str(journal_of(5).tail()[0]) == "#0 release(5, -1)"


def test_a_long_history_keeps_its_end_and_the_digest_of_all() -> None:
    extra = 37
    lengths = range(history.KEPT + extra)
    journal = journal_of(*lengths)
    tail = journal.tail()
    assert journal.count == history.KEPT + extra and len(tail) == history.KEPT
    assert tail[0] == Entry(extra, Mutation.RELEASE, (extra, -1))
    assert tail[-1] == Entry(history.KEPT + extra - 1, Mutation.RELEASE, (lengths[-1], -1))
    other = journal_of(99, *lengths[1:])
    assert other.tail() == tail and other.digest != journal.digest


def test_histories_are_compared_where_all_have_them() -> None:
    long, short = journal_of(*range(history.KEPT + 5)), journal_of(0, 1, 2)
    assert first_difference([]) is None and first_difference([[], []]) is None
    assert first_difference([journal_of(1, 2).tail(), journal_of(1, 2).tail()]) is None
    place, found = first_difference([journal_of(1, 2).tail(), journal_of(1, 7).tail()])  # type: ignore[misc]
    assert place == 1 and found[1] == Entry(1, Mutation.RELEASE, (7, -1))
    place, found = first_difference([journal_of(1, 2).tail(), journal_of(1).tail()])  # type: ignore[misc]
    assert place == 1 and found[1] is None
    place, found = first_difference([long.tail(), short.tail()])  # type: ignore[misc]
    assert place == 5 and found == [long.tail()[0], None], "the first that both could have"


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    """Of a whole run of several ranks, in processes of their own."""
    code = (
        "from tests.ranks.engine import Parts\n"
        "from tests.ranks.simulation import Simulation, scenario_of\n"
        "for seed in (1, 4):\n"
        "    run = Simulation(scenario_of(seed), Parts())\n"
        "    run.run()\n"
        "    journal = run.ranks[0].context.journal\n"
        "    print(journal.count, journal.digest)"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )
        for seed in ("1", "2")
    ]
    told = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert told[0] == told[1]
    assert all(int(line.split()[0]) > 20 for line in told[0].splitlines())
    assert len(told[0].splitlines()) == 2
