"""`banyan soak` passes where nothing is wrong; where something is, it says what, and status 1."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from banyan.cli import main
from banyan.engine.messages import Output
from banyan.engine.oracle_build import OracleCore, OracleOptions, build_oracle_core
from banyan.engine.oracle_presets import PRESETS
from banyan.engine.ports import Model
from banyan.soak.options import SoakOptions
from banyan.soak.results import SoakReport
from banyan.soak.run import Start, run_soak
from banyan.tiers.ops import CopyBlock, CopyDone, CopyEngine, CopyJob, CopyKind, CopyTicket, OpId
from banyan.tree import encode_tokens

SMALL = [
    *("--groups", "6", "--prompts-per-group", "4", "--shared", "200", "--question", "60"),
    *("--output", "12", "--rounds", "3", "--page-size", "16", "--chunk", "64"),
    *("--max-running", "6", "--host-ratio", "5", "--growth-limit", "0.2"),
]
TROUBLE = [
    *("--aborts", "0.2", "--flush-every", "60", "--faults", "0.2", "--check-every", "3"),
    *("--verify", "all"),
]


def soak(*words: str) -> int:
    """Run the command; its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["soak", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def report_of(path: Path) -> SoakReport:
    return msgspec.json.decode(path.read_bytes(), type=SoakReport)


# ---- nothing is wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_soak_without_disturbance_loads_from_host_and_balances(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    words = ("--preset", preset, "--verify", "all", "--check-every", "5", "--json", str(path))
    assert soak(*SMALL, *words) == 0
    shown, report = capsys.readouterr().out, report_of(path)
    assert "No difference." in shown and "slots home after a flush" in shown
    assert not report.different and all(line.fine for line in report.balance)
    assert [row.requests for row in report.rounds] == [24, 24, 24]
    for row in report.rounds:
        assert row.computed + row.device + row.host == 24 * 260
        assert row.checked_bytes > 1_000_000 and row.mismatched == 0
    assert all(row.host > 0 and row.load_backs > 0 for row in report.rounds[1:])
    assert report.rounds[0].verified > 100 < sum(row.verified for row in report.rounds[1:])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_disturbed_soak_balances(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert soak(*SMALL, *TROUBLE, "--preset", preset, "--json", str(path)) == 0
    report = report_of(path)
    assert sum(row.aborted for row in report.rounds) > 3
    assert sum(row.failed for row in report.rounds) > 3
    assert {line.what: line.found for line in report.balance}["invariants"] == "hold"


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_other_write_policies_and_a_host_tier_that_comes_and_goes(
    policy: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    words = ("--write-policy", policy, "--detach", "--check-every", "2", "--json", str(path))
    assert soak(*SMALL, *words, "--preset", "full+window+state") == 0
    assert sum(row.backups for row in report_of(path).rounds) > 0


def test_a_detached_host_tier_gets_no_backups() -> None:
    core = build_oracle_core(small().engine_options())
    try:
        tokens = list(range(100))
        core.detach_host()
        assert _backups_of(core, tokens) == 0
        core.attach_host()
        assert _backups_of(core, tokens[::-1]) > 0
        host = core.stats()["cache"]["tiers"]["host"]
        assert any(pool["evictable"] for pool in host.values())
        core.detach_host()
        host = core.stats()["cache"]["tiers"]["host"]
        assert not any(pool["evictable"] for pool in host.values())
        core.check()
    finally:
        core.close()


def _backups_of(core: OracleCore, tokens: list[int]) -> int:
    """Backups that one prompt starts."""
    cache = core.cache
    before = cache.stats()["copies"]["backup"]["jobs"]
    lease = cache.acquire(cache.match(encode_tokens(tokens)))
    cache.allocate(lease, len(tokens))
    cache.advance(lease, 96)
    cache.commit(lease, encode_tokens(tokens))
    cache.release(lease)
    while cache.controller.operations:
        cache.poll()
    jobs: int = cache.stats()["copies"]["backup"]["jobs"]
    return jobs - before


def test_conversations(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = ("--workload", "multi-turn", "--preset", "full+state", "--json", str(path))
    assert soak(*SMALL, *words, "--verify", "all", "--aborts", "0.1") == 0
    report = report_of(path)
    assert report.rounds[0].requests == 6 >= report.rounds[2].requests > 0
    assert report.rounds[2].device + report.rounds[2].host > 0


def test_an_emulated_soak_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    words = ("--prefill-us-per-token", "20", "--decode-ms", "0.2", "--json", str(path))
    assert soak(*SMALL, *words) == 0
    shown, report = capsys.readouterr().out, report_of(path)
    assert "forward passes emulated" in shown
    assert "-27.0 %" in shown and "-14.6 %" in shown
    row = report.rounds[0]
    assert row.duration_s > row.computed * 20e-6
    assert [change.round for change in report.changes] == [2, 3]
    first, second = report.rounds[:2]
    assert first.ttft_p50_s is not None and second.ttft_p50_s is not None
    expected = 100 * (second.ttft_p50_s / first.ttft_p50_s - 1)
    assert report.changes[0].ttft_percent == pytest.approx(expected)


def test_bad_options_are_refused_with_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--preset", "full+stat"], "Did you mean 'full+state'?"),
        (["--faults", "2"], "--faults: 2.0 is no share"),
        (["--chunk", "100", "--page-size", "64"], "Write --chunk 64"),
        (["--rounds", "0"], "--rounds: 0 is below 1"),
        (["--device-bytes", "24KiB"], "--device-bytes:"),
        (["--tp", "0"], "--tp: 0 is below 1"),
    ):
        assert soak(*words) == 2
        assert text in " ".join(capsys.readouterr().err.split())


# ---- something is wrong --------------------------------------------------------------------------


class Meddling:
    """A copy engine that does something else than it was told: base of the planted defects."""

    def __init__(self, inner: CopyEngine, core: list[OracleCore]) -> None:
        self.inner, self.core = inner, core
        self.jobs: dict[OpId, CopyJob] = {}
        self.meddled = 0

    def submit(self, job: CopyJob) -> CopyTicket:
        self.jobs[job.op_id] = job
        return self.inner.submit(self.changed(job))

    def changed(self, job: CopyJob) -> CopyJob:
        """What is done instead."""
        return job

    def poll(self) -> list[CopyDone]:
        done = self.inner.poll()
        for one in done:
            self.after(self.jobs.pop(one.op_id), one)
        return done

    def after(self, job: CopyJob, done: CopyDone) -> None:
        """What is done besides."""

    def cancel(self, op_id: OpId) -> bool:
        return self.inner.cancel(op_id)

    def close(self) -> None:
        self.inner.close()


class DropsABlock(Meddling):
    """The last page of every third job stays where it was."""

    kind = CopyKind.LOAD_BACK

    def changed(self, job: CopyJob) -> CopyJob:
        block = job.blocks[0]
        if job.kind is not self.kind or job.op_id % 3 or len(block.src) < 2:
            return job
        self.meddled += 1
        shorter = CopyBlock(block.component, block.src[:-1], block.dst[:-1])
        return replace(job, blocks=(shorter, *job.blocks[1:]))


class DropsASavedBlock(DropsABlock):
    """The same on the way to host."""

    kind = CopyKind.BACKUP


class FlipsAHostByte(Meddling):
    """One byte of a host record is not what was copied there."""

    def after(self, job: CopyJob, done: CopyDone) -> None:
        if job.kind is CopyKind.BACKUP and done.ok and job.op_id % 3 == 0:
            self.meddled += 1
            block = job.blocks[0]
            pool = self.core[0].cache.stack.host[block.component]
            pool.data.numpy()[int(block.dst[-1]), 3] ^= 0x10


def small(**changed: Any) -> SoakOptions:
    given: dict[str, Any] = {
        "groups": 6,
        "prompts_per_group": 4,
        "shared": 200,
        "question": 60,
        "output": 12,
        "page_size": 16,
        "chunk": 64,
        "max_running": 6,
        "host_ratio": 5.0,
        "growth_limit": 0.2,
    }
    return SoakOptions(**{**given, **changed})


def shown_by(options: SoakOptions, start: Start) -> tuple[int, str]:
    """Exit status and output of a soak."""
    out = io.StringIO()
    status = run_soak(options, Console(file=out, width=200), start=start)
    return status, out.getvalue()


def meddled_by(kind: type[Meddling], options: SoakOptions) -> tuple[int, str, Meddling]:
    made: list[Meddling] = []
    core: list[OracleCore] = []

    def wrap(engine: CopyEngine) -> CopyEngine:
        made.append(kind(engine, core))
        return made[0]

    def start(engine_options: OracleOptions, ranks: int) -> OracleCore:
        core.append(build_oracle_core(engine_options, wrap_engine=wrap))
        return core[0]

    status, shown = shown_by(options, start)
    return status, shown, made[0]


def test_a_copy_engine_that_does_as_told_passes() -> None:
    status, shown, _ = meddled_by(Meddling, small())
    assert status == 0, shown


@pytest.mark.parametrize("preset", ["full", "full+window+state"])
@pytest.mark.parametrize("kind", [DropsABlock, DropsASavedBlock, FlipsAHostByte])
def test_bytes_that_did_not_arrive_end_the_soak_with_status_1(
    kind: type[Meddling], preset: str
) -> None:
    status, shown, engine = meddled_by(kind, small(preset=preset))
    assert engine.meddled > 0
    assert status == 1, shown
    assert "difference: wrong bytes read by a forward pass" in shown
    assert "layer 0, buffer k: wrong bytes for position" in shown


def test_verify_finds_a_flipped_host_byte_before_anybody_reads_it() -> None:
    status, shown, engine = meddled_by(FlipsAHostByte, small(preset="full", verify="all"))
    assert engine.meddled > 0
    assert status == 1, shown
    assert "difference: SHA-256 equal on both sides of a copy" in shown
    assert "difference: wrong bytes" not in shown


Defect = Callable[[OracleCore], None]


def start_with(defect: Defect) -> Start:
    """A core with something planted in it."""

    def start(options: OracleOptions, ranks: int) -> OracleCore:
        core = build_oracle_core(options)
        defect(core)
        return core

    return start


def _keeps_a_lease(core: OracleCore) -> None:
    cache = core.cache
    lease = cache.acquire(cache.match(encode_tokens(list(range(40)))))
    cache.allocate(lease, 40)


def _keeps_a_lock(core: OracleCore) -> None:
    plain = core.step

    def step() -> list[Output]:
        outputs = plain()
        root = core.cache.tree.root(b"")
        if root.children and not getattr(core, "locked", False):
            core.cache.tree.lock(next(iter(root.children.values())))
            core.locked = True  # type: ignore[attr-defined]
        return outputs

    core.step = step  # type: ignore[method-assign]


def _loses_a_slot(core: OracleCore) -> None:
    core.cache.stack.host_slots[0].allocate(1)


def _says_something_else(core: OracleCore) -> None:
    model: Model = core.oracle
    plain = model.sample
    calls = [0]

    def sample(logits: Any, samplers: Any) -> Any:
        calls[0] += 1
        choices = list(plain(logits, samplers))
        if calls[0] == 30:
            choices[0] = choices[0]._replace(token=choices[0].token ^ 1)  # type: ignore[attr-defined]
        return choices

    model.sample = sample  # type: ignore[method-assign]


def _grows(core: OracleCore) -> None:
    plain, kept = core.step, []

    def step() -> list[Output]:
        kept.append(b"x" * (1 << 20))
        return plain()

    core.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("defect", "text"),
    [
        (_keeps_a_lease, "leases"),
        (_keeps_a_lock, "locked slots: "),
        (_loses_a_slot, "free and cached slots add up: host/full"),
        (_loses_a_slot, "slots home after a flush: rank 0: 1 of"),
        (_says_something_else, "of the answer is"),
        (_grows, "memory after round 1"),
    ],
)
def test_whatever_does_not_come_home_is_named(defect: Defect, text: str) -> None:
    options = small(growth_limit=0.02 if defect is _grows else 0.2)
    status, shown = shown_by(options, start_with(defect))
    assert status == 1, shown
    found = [line for line in shown.splitlines() if line.startswith("difference:")]
    assert any(text in line for line in found), shown


def test_an_invariant_that_breaks_during_the_soak_ends_it() -> None:
    options = small(check_every=4)
    status, shown = shown_by(options, start_with(_loses_a_slot))
    assert status == 1
    assert "difference: 1 finding(s)" in shown and "leaked" in shown
    assert "Balance" not in shown
