"""What the engine counts: monotone totals, exported as they are (INV-21).

Owns the numbers only. Rates and histograms are for whoever reads them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
SOURCES = ("computed", "device", "host")


@dataclass(slots=True)
class Counters:
    """Totals since start.

    Args:
        finished: requests by finish reason.
        refused: requests refused at submission, by error code.
        prompt_tokens: by source, of the prompts that reached their first token.
        prefill_tokens: tokens run through the model by prefill, recomputation included.
        generated_tokens: tokens chosen.
        retractions: running requests put back because slots ran out.
        load_failures: load-backs that failed under a running request.
        forward_failures: forwards that raised.
        sharing_waits: requests that waited for another one's prefill of their prefix.
        stalled: times a running request sat out a step because transfers held the slots it needed.
    """

    steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    refused: dict[str, int] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    prefill_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    load_failures: int = 0
    forward_failures: int = 0
    sharing_waits: int = 0
    stalled: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, a copy."""
        return asdict(self)
