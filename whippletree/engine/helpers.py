"""Helper threads that one thread keeps for its products, given back when another thread is to compute.

GNU OpenMP, on which torch runs, keeps a team of helpers for every thread that ever computed. With more helpers than
cores in the process it lets all of them sleep between any two operations, and waking them 2000 times makes a step of
decoding take 95 instead of 55 ms (64 rows of a 135M model, two cores). Engine and trainer take turns: whoever gives the
turn away gives its helpers back, and gets new ones when it needs them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

HARD = 2  # omp_pause_hard: end the helpers, and not only their devices


def release_helpers() -> None:
    """End the idle helpers of the calling thread; nothing where torch computes without GNU OpenMP."""
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(HARD)


@cache
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = sorted({path for line in lines if "libgomp" in (path := line.split()[-1]) and Path(path).exists()})
    return tuple(runtime for path in paths if hasattr(runtime := ctypes.CDLL(path), "omp_pause_resource_all"))
