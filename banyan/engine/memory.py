"""What this process holds in memory, and giving back what it does not use.

Knows Linux, and says 0 elsewhere. Callable from any thread.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def resident_bytes() -> int:
    """Memory of this process without pages of files, which the system takes and gives as it likes;
    memory shared with other processes counts in part, so that the sum over ranks is right."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))


def give_back() -> None:
    """Return free memory to the system, where the C library can: else a heap full of holes looks
    like a leak. Cost: a full garbage collection."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
