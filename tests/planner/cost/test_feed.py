"""Reading: the numbers of both papers (tier: no process)."""

from __future__ import annotations

import pytest

from hyperslab.planner.cost import least_bandwidth
from hyperslab.planner.machine import load_machine


def test_the_papers_minimum() -> None:
    """Mathuriya et al. 2018, section V: 62 MB/s of a node at 128^3, b = 1 and 0.129 s."""
    assert least_bandwidth(8e6, 0.129) == pytest.approx(62e6, rel=0.01)


def test_what_64_samples_take_without_a_store() -> None:
    """Oyama et al. 2020, section III-B: at least 256 ms at 240 GB/s, on any number of ranks."""
    lassen = load_machine("lassen-v100")
    for ranks in (64, 512, 2048):
        seconds = lassen.read_seconds(64 * 10**9 // ranks, ranks)
        assert seconds == pytest.approx(64 * 10**9 / 240e9)
        assert 0.256 <= seconds < 1.05 * 0.256
