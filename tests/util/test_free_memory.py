"""Threads of a process that reads volumes get memory that is used again (tier: processes)."""

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is another one"
)

PROGRAM = """
import os, resource, sys, threading
import numpy as np
import hyperslab as hs

hs.Grid()  # keeps freed memory
hs.open

def take():
    for turn in range(6):
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
        np.ones(96 << 20, np.uint8)

for opens in (False, True):
    child = os.fork()
    if child == 0:
        if opens:
            data = hs.open(sys.argv[1], hs.Grid(), batch_size=1, split="all")
        faults = []
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        print(faults[-1] - faults[3], flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_thread_takes_what_was_freed_once_data_are_open(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 4, 4, 4), np.float32))
    np.save(tmp_path / "a.target.npy", np.zeros(1, np.float32))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before > 50, "pages of 2 MiB, at least"
    assert after < 10


HOLES = """
import re
import numpy as np
from hyperslab.util.free_memory import FreedMemory, keep_freed_memory

def resident():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmRSS:\\s+(\\d+)", status).group(1)) << 10

keep_freed_memory()
freed = FreedMemory()
before = resident()
large = np.ones(600 << 20, np.uint8)
del large
print(resident() - before)
for mebibytes in (1, 4):
    held = [np.ones(mebibytes << 20, np.uint8) for _ in range(200)]
    last = np.ones(1 << 20, np.uint8)  # behind the holes
    del held
    freed.give_back()
    print(resident() - before)
"""


def test_holes_are_given_back_when_they_are_many() -> None:
    command = [sys.executable, "-c", HOLES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    large, few, many = map(int, done.stdout.split())
    assert large < 100 << 20, "at once"
    assert few > 150 << 20, "they are taken again"
    assert many < 100 << 20
