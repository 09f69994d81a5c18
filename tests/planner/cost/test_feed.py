"""Reading: the numbers of a paper (tier: no process)."""

from __future__ import annotations

import pytest

from hyperslab.planner.machine import load_machine


def test_what_64_samples_take_without_a_store() -> None:
    """Oyama et al. 2020, section III-B: at least 256 ms at 240 GB/s, on any number of ranks."""
    lassen = load_machine("lassen-v100")
    for ranks in (64, 512, 2048):
        seconds = lassen.read_seconds(64 * 10**9 // ranks, ranks)
        assert seconds == pytest.approx(64 * 10**9 / 240e9)
        assert 0.256 <= seconds < 1.05 * 0.256
