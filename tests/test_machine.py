"""What a command sets on the machine it runs on."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from gated_srp.machine import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
np.ones(8 << 20)                                               # 64 MB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux is told to keep memory, no other")
def test_memory_that_is_freed_stays_with_the_process_when_a_command_asks_for_it():
    def pages(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert pages("kept") < 100 < pages("returned")
