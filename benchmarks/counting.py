"""How much the interpreter does for a call: a number that is the same in every run.

Counts what Python executes, not how long it takes, so that a machine's other work, its clock and
its caches do not matter. What is done inside one instruction or one C function is not seen: a
slower `memcmp` is no other count. Hardware counters, which would see it, are often forbidden.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

_OWN_CALLS = 3
"""Calls of C functions that `count` itself makes under the profiler: it sets and unsets hooks."""


@dataclass(frozen=True)
class Count:
    """What one call took.

    Args:
        instructions: Python instructions, in whatever module.
        c_calls: calls of functions and methods that are written in C.
    """

    instructions: int
    c_calls: int


class _Counter:
    """The two hooks, and what they have seen."""

    def __init__(self) -> None:
        self.instructions = self.c_calls = 0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        """A new frame: its instructions are of interest, its lines are not."""
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.instruction

    def instruction(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        """Something of a traced frame; its return and its exceptions are no instructions."""
        if event == "opcode":
            self.instructions += 1
        return self.instruction

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Something of the profiler's; calls of C functions among it."""
        if event == "c_call":
            self.c_calls += 1


def count(call: Callable[[], object]) -> Count:
    """What `call` makes the interpreter do on this thread.

    Nothing is collected meanwhile, so that no finalizer runs. The hooks that were set before, such
    as a debugger's, are set again afterwards.

    Cost: some hundred times that of the call.
    """
    counter = _Counter()
    traced, profiled, collecting = sys.gettrace(), sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setprofile(counter.profile)
    sys.settrace(counter.trace)
    try:
        call()
    finally:
        sys.settrace(traced)
        sys.setprofile(profiled)
        if collecting:
            gc.enable()
    return Count(counter.instructions, counter.c_calls - _OWN_CALLS)
