"""Threads of a process that reads volumes get memory that is used again (tier: processes)."""

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import resource, sys, threading
import numpy as np
import hyperslab as hs

grid = hs.Grid()  # keeps freed memory
if len(sys.argv) > 1:
    data = hs.open(sys.argv[1], grid, batch_size=1, split="all")
def take():
    for turn in range(6):
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
        np.ones(96 << 20, np.uint8)
faults = []
thread = threading.Thread(target=take)
thread.start()
thread.join()
print(faults[-1] - faults[3])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_a_thread_takes_what_was_freed_once_data_are_open(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 4, 4, 4), np.float32))
    np.save(tmp_path / "a.target.npy", np.zeros(1, np.float32))

    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults() > 50, "pages of 2 MiB, at least"
    assert faults(str(tmp_path)) < 10
