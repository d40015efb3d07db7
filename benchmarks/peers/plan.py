"""What a run measures, as the two processes tell each other."""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.peers.side import CONFIGURATIONS
from benchmarks.peers.workloads import QUICK, Effort, Workload, workloads

KINDS = tuple(dict.fromkeys(workload.kind for workload in workloads(Effort())))
"""Kinds of workload, as they come."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        configurations: of `side.CONFIGURATIONS`.
        kinds: workloads of these kinds only; all when empty.
        quick: fewer samples, smaller trees.
    """

    configurations: tuple[tuple[str, int], ...] = CONFIGURATIONS
    kinds: tuple[str, ...] = ()
    quick: bool = False

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else Effort()

    @property
    def workloads(self) -> list[Workload]:
        return [w for w in workloads(self.effort) if not self.kinds or w.kind in self.kinds]

    @property
    def rows(self) -> int:
        return len(self.configurations) * len(self.workloads)


def plan_from(text: str) -> Plan:
    """The inverse of `json.dumps(asdict(plan))`."""
    fields = json.loads(text)
    fields["configurations"] = tuple((name, page) for name, page in fields["configurations"])
    fields["kinds"] = tuple(fields["kinds"])
    return Plan(**fields)
