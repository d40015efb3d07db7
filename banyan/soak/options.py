"""What a soak is told: workload, engine, disturbances; and the sizes that follow from them.

Owns `SoakOptions`, its checks, and the arithmetic that makes the device small enough to need the
host tier and the host large enough to hold everything. Knows no engine and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from banyan.bench.work import MultiTurn, SharedPrefix, Workload
from banyan.engine.oracle_build import OracleOptions
from banyan.engine.oracle_presets import oracle_spec
from banyan.errors import ConfigError
from banyan.options import EvictPolicyName, WritePolicyName
from banyan.pools.plan import reach_pages
from banyan.pools.sizing import plan_sizes
from banyan.spec import CacheSpec, Component

WorkloadName = Literal["shared-prefix", "multi-turn"]

_SPARE = 1.1
"""Size of a host tier that holds everything, over the bytes of it all."""


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `banyan soak` can be told.

    Args:
        tp: ranks.
        groups: groups of prompts that begin alike; of multi-turn, clients.
        shared, question: tokens of a prompt; of multi-turn, of the first message and later ones.
        device_bytes: of all device pools of one rank; None: so many that a host tier of
            `host_ratio` times as much just holds everything.
        ahead: requests submitted beyond those that run: the rest wait outside the engine.
        aborts: share of requests aborted at a random moment.
        flush_every, check_every: steps, or 0 for never.
        faults: share of copies that fail.
        detach: switch the host tier off for the middle third of every round.
        growth_limit: of memory after the first round, as a share.
    """

    tp: int = 1
    preset: str = "full+state"
    workload: WorkloadName = "shared-prefix"
    groups: int = 8
    prompts_per_group: int = 8
    shared: int = 1024
    question: int = 128
    output: int = 32
    rounds: int = 3
    shuffle: bool = True
    page_size: int = 64
    device_bytes: int | None = None
    host_ratio: float = 2.0
    write_policy: WritePolicyName = "write_through"
    evict_policy: EvictPolicyName = "lru"
    verify: Literal["off", "all"] = "off"
    chunk: int = 2048
    max_running: int = 128
    ahead: int = 64
    aborts: float = 0.0
    flush_every: int = 0
    check_every: int = 0
    faults: float = 0.0
    detach: bool = False
    prefill_us_per_token: float = 0.0
    decode_ms: float = 0.0
    growth_limit: float = 0.02
    seed: int = 0

    @property
    def emulated(self) -> bool:
        """Whether forward passes take the time of an accelerator that is not there."""
        return self.prefill_us_per_token > 0 or self.decode_ms > 0

    def make_workload(self) -> Workload:
        """What is asked.

        Raises:
            ConfigError: a number below what makes sense.
        """
        if self.workload == "multi-turn":
            return MultiTurn(
                clients=self.groups,
                rounds=self.rounds,
                first=self.shared,
                message=self.question,
                output=self.output,
                shuffle=self.shuffle,
                seed=self.seed,
            )
        return SharedPrefix(
            groups=self.groups,
            prompts_per_group=self.prompts_per_group,
            shared=self.shared,
            question=self.question,
            output=self.output,
            rounds=self.rounds,
            shuffle=self.shuffle,
            seed=self.seed,
        )

    def engine_options(self) -> OracleOptions:
        """What the engine of every rank is told.

        Raises:
            ConfigError: the first bad option.
        """
        _check(self)
        spec = oracle_spec(self.preset, self.page_size)
        data = _data_of(self)
        device, host = _tier_bytes(self, spec, data)
        return OracleOptions(
            preset=self.preset,
            page_size=self.page_size,
            device_bytes=device,
            host_bytes=host,
            spacing=data.spacing,
            chunk=self.chunk,
            max_running=self.max_running,
            open_requests=self.max_running + self.ahead,
            longest=data.longest,
            write_policy=self.write_policy,
            evict_policy=self.evict_policy,
            verify=self.verify == "all",
            load_back_threshold=self.page_size,
            faults=self.faults,
            prefill_s_per_token=self.prefill_us_per_token * 1e-6,
            decode_s=self.decode_ms * 1e-3,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class Data:
    """What a workload leaves in a cache that forgets nothing.

    Args:
        pages: of `Full` data.
        checkpoints: boundaries with windows and states.
        longest: tokens of the longest request, prompt and answer.
        spacing: tokens per checkpoint.
    """

    pages: int
    checkpoints: int
    longest: int
    spacing: int

    def bytes_of(self, spec: CacheSpec, ranks: int) -> int:
        """Bytes that hold it on host, all ranks together; what is replicated counts once."""
        total = 0
        for part in spec.components:
            pages = reach_pages(part.reach, spec.page_size)
            slots = self.pages if part is spec.components[0] else self.checkpoints * max(1, pages)
            total += slots * _slot_bytes(part, spec.page_size, ranks)
        return total


def _data_of(options: SoakOptions) -> Data:
    """Every run of tokens that is cached by itself begins and ends inside a page: one more each."""
    page = options.page_size
    if options.workload == "multi-turn":
        longest = options.shared + (options.rounds - 1) * (options.question + options.output)
        longest += options.output
        pages = options.groups * (longest // page + 1)
        checkpoints = 3 * options.groups
    else:
        prompts = options.groups * options.prompts_per_group
        longest = options.shared + options.question + options.output
        own = (options.question + options.output) // page + 1
        pages = options.groups * (options.shared // page + 1) + prompts * own
        checkpoints = options.groups + 2 * prompts
    return Data(pages, checkpoints, longest, max(page, pages * page // checkpoints))


def _tier_bytes(options: SoakOptions, spec: CacheSpec, data: Data) -> tuple[int, int]:
    """Device bytes of one rank, and host bytes of all."""
    ranks = options.tp
    per_rank = data.bytes_of(spec, 1) * _SPARE
    if options.device_bytes is not None:
        device = options.device_bytes
    else:
        device = _grown(options, spec, data, math.ceil(per_rank / options.host_ratio))
    share = data.bytes_of(spec, ranks) / data.bytes_of(spec, 1)
    return device, math.ceil(device * options.host_ratio * share)


def _grown(options: SoakOptions, spec: CacheSpec, data: Data, nbytes: int) -> int:
    """Device bytes with which the longest request fits: `nbytes`, or more where data is scarce."""
    for _ in range(64):
        try:
            plan = plan_sizes(
                spec,
                device_bytes=nbytes,
                host_bytes=0,
                max_running=options.max_running,
                chunk=options.chunk,
                state_interval=data.spacing,
            )
        except ConfigError:  # too small for one chunk even
            nbytes += nbytes // 4
            continue
        if plan.device[0].slots * spec.page_size >= data.longest + spec.page_size:
            break
        nbytes += nbytes // 4
    return nbytes


def _slot_bytes(part: Component, page_size: int, ranks: int) -> int:
    if ranks == 1:
        return part.record_bytes(page_size)
    own = part.only(replicated=False).record_bytes(page_size)
    return ranks * own + part.only(replicated=True).record_bytes(page_size)


def _check(options: SoakOptions) -> None:
    """Refuse what no other check would name by its option."""
    least = {"tp": 1, "ahead": 1, "flush_every": 0, "check_every": 0, "chunk": 1, "max_running": 1}
    for name, bound in least.items():
        value = getattr(options, name)
        if value < bound:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, f"{value} is below {bound}", f"Use {bound} or more")
    for name in ("aborts", "faults"):
        value = getattr(options, name)
        if not 0 <= value < 1:
            raise ConfigError(f"--{name}", f"{value} is no share", "Use 0 <= share < 1")
    if not 0 < options.host_ratio < math.inf:
        raise ConfigError("--host-ratio", f"{options.host_ratio} is not positive", "Use 2")
    page, chunk = options.page_size, options.chunk
    if chunk > page and chunk % page:
        fix = f"Write --chunk {chunk // page * page}"
        raise ConfigError("--chunk", f"{chunk} is not a multiple of --page-size {page}", fix)
