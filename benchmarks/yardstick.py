"""How fast Python is on this machine at this moment: what times of bookkeeping are divided by.

A time of one run says little in another: the processor differs, or other work slows it down. The
yardstick is a fixed piece of Python that does what the tree does (look up, compare, count), timed
right beside what is measured, so that the ratio of the two is about the same on any machine.
"""

from __future__ import annotations

import statistics
import time

_STEPS = 64
_PAGE = bytes(range(256))
_KEY = _PAGE * _STEPS
_CHAIN = [{bytes(_PAGE): index} for index in range(_STEPS)]


def _walk() -> int:
    """One pass over a chain of dicts, with a look-up and a comparison at each."""
    at = found = 0
    for table in _CHAIN:
        page = _KEY[at : at + len(_PAGE)]
        if table.get(page) is not None and _KEY.startswith(page, at):
            found += 1
        at += len(_PAGE)
    return found


def yardstick_us(samples: int = 100) -> float:
    """Median microseconds of the fixed piece of work. Cost: about 1 ms."""
    times = []
    for _ in range(samples):
        start = time.perf_counter_ns()
        _walk()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)
