"""Helper threads: gone after they were given back, and back when there is something to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, torch
from whippletree.engine.helpers import release_helpers

def threads(): return len(os.listdir("/proc/self/task"))

def compute(): return float(torch.ones(1 << 20).mul(2).sum())

before = threads()
compute(); busy = threads()
release_helpers(); free = threads()
again = compute()
print(busy - before, free - before, threads() - before, again)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
def test_helpers_end_when_given_back_and_come_again_with_the_next_product():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # a team of two: the thread itself and one helper
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "0", "1", str(2.0 * 2**20)]
