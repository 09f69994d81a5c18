"""How much memory a rank may have (tier: a fork)."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest

from hyperslab.planner import search
from hyperslab.planner.search import host_bounds, process_bytes
from tests.forked import forked_commands

ADDRESSES = """
import resource
from hyperslab.planner.search import PROCESS_STATUS, host_bounds, process_bytes
process_bytes()
lines = dict(line.split(":", 1) for line in PROCESS_STATUS.read_text().splitlines())
taken = int(lines["VmSize"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))
limit = host_bounds(1, "cpu")
print(limit.nbytes - process_bytes() >> 20, limit.reason)
"""


def test_ranks_share_what_is_free() -> None:
    """Of so much, as what is free on a machine changes between two looks at it."""
    with mock.patch.object(search, "free_memory", return_value=8 << 30):
        alone = host_bounds(1, "cpu").nbytes - process_bytes()
        each = host_bounds(4, "cpu").nbytes - process_bytes()
    assert alone == pytest.approx(8 << 30, rel=0.01)
    assert each == pytest.approx(2 << 30, rel=0.03)


def test_a_limit_of_addresses_counts() -> None:
    with forked_commands():
        run = subprocess.run([sys.executable, "-c", ADDRESSES], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    left, _, reason = run.stdout.partition(" ")
    assert 55 <= int(left) <= 65
    assert "ulimit -v" in reason
