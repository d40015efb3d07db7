"""The measuring process: all sides in one interpreter, the one that has SGLang.

    python -m benchmarks.peers.measure '{"configurations": [["full", 1]], ...}'

Started by `benchmarks/versus_sglang.py`. Standard output is one JSON object a line: first the
versions and how many rows will come, then a row as it is ready; or one with
`missing`, which says why there is no SGLang.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.peers import sglang_side
from benchmarks.peers.banyan_side import BanyanSide
from benchmarks.peers.plan import Plan, plan_from
from benchmarks.peers.ratios import Row, timing
from benchmarks.peers.side import Side
from benchmarks.peers.workloads import run


def measure(plan: Plan) -> Iterator[Row]:
    """Every row of `plan`; the trees of a configuration are made once."""
    for components, page in plan.configurations:
        sides: list[Side] = [BanyanSide(components, page)]
        sides += [sglang_side.SglangSide(core, components, page) for core in sglang_side.CORES]
        for workload in plan.workloads:
            samples = run(workload, sides, plan.effort)
            timings = {name: timing(times) for name, times in samples.items()}
            yield Row(workload.name, workload.kind, components, page, timings)


def main(argument: str) -> int:
    """Measure what the JSON `argument` plans; 1 where SGLang is absent."""
    plan = plan_from(argument)
    out, sys.stdout = sys.stdout, sys.stderr  # whatever SGLang prints does not come between

    def say(**fields: Any) -> None:
        print(json.dumps(fields), file=out, flush=True)

    try:
        found = sglang_side.start()
        gc.freeze()  # a collection before each turn need not look at what was imported
        say(versions=found | {"python": platform.python_version()}, rows=plan.rows)
        for row in measure(plan):
            say(row=asdict(row))
    except sglang_side.Missing as error:
        say(missing=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
