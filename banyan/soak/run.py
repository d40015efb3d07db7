"""Runs a soak from start to exit status: core, rounds, balance, report.

Owns the order of these, and what becomes of a soak that cannot go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from banyan.bench.report import machine, versions
from banyan.engine.oracle_build import OracleOptions, build_oracle_core, build_oracle_rank
from banyan.engine.rank_process import lead
from banyan.errors import ConfigError, InvariantError, RankError
from banyan.soak.balance import balance
from banyan.soak.drive import Core, Driver
from banyan.soak.options import SoakOptions
from banyan.soak.report import show
from banyan.soak.results import Line, SoakReport, changes

Start = Callable[[OracleOptions, int], Core]
"""Makes the core of an engine with so many ranks."""


def start_core(options: OracleOptions, ranks: int) -> Core:
    """The core of an oracle engine; of several ranks, the others are processes of their own."""
    if ranks == 1:
        return build_oracle_core(options)
    build = f"{build_oracle_rank.__module__}:{build_oracle_rank.__name__}"
    return lead(build, msgspec.json.encode(options), ranks)


def run_soak(
    options: SoakOptions,
    console: Console,
    json: Path | None = None,
    *,
    start: Start = start_core,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Play, balance, print; returns the exit status: 1 on any difference.

    Raises:
        ConfigError: options that no engine can be made of.
    """
    engine_options = options.engine_options()
    core = start(engine_options, options.tp)
    try:
        report = _soak(core, options, console, clock, sleep)
    finally:
        core.close()
    show(console, report)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        console.print(f"Report: {json}")
    return report.status


def _soak(
    core: Core,
    options: SoakOptions,
    console: Console,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> SoakReport:
    _check_core(core, options)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    lines: list[Line] = []
    requests = options.make_workload().requests
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=options.rounds * requests)

        def on_end(turn: int) -> None:
            where = f"round {turn + 1} of {options.rounds}"
            progress.update(task, advance=1, description=where)

        driver = Driver(core, options, clock=clock, sleep=sleep, on_end=on_end)
        try:
            driver.play()
            lines = balance(core, driver, options)
        except (InvariantError, RankError) as error:
            driver.differences.add(str(error))
    off = [f"{line.what}: {line.found}" for line in lines if not line.fine]
    return SoakReport(
        options={**msgspec.to_builtins(options), "emulated": options.emulated},
        info=_plain(core.info),
        rounds=driver.rounds,
        balance=lines,
        changes=changes(driver.rounds),
        different=len(off) + driver.differences.count,
        differences=off + driver.differences.named,
        versions=versions(),
        machine=machine(),
    )


def _check_core(core: Core, options: SoakOptions) -> None:
    longest = options.engine_options().longest
    if core.info["max_model_len"] < longest:
        raise ConfigError(
            "--device-bytes",
            f"the pools hold {core.info['max_model_len']:,} tokens, a request has {longest:,}",
            "Give more, or leave the option out",
        )


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """Facts that can be written as JSON."""
    return {name: value for name, value in info.items() if name != "component_rows"}
