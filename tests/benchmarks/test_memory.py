"""What a step saves for backward per rank: bytes are deterministic, so the bar is a test."""

from __future__ import annotations

import pytest

from benchmarks.saved import GRIDS, saved_bytes
from tests.ranks import run_ranks

WIDTH = 32


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batch norm"])
def test_saved_bytes_shrink_with_the_ranks(ranks: int, batch_norm: bool) -> None:
    serial = run_ranks(1, saved_bytes, WIDTH, batch_norm, GRIDS[1])[0]
    assert serial["saved"] > 4 * 4 * WIDTH**3  # at least the input
    assert serial["halos"] == 0
    for rank in run_ranks(ranks, saved_bytes, WIDTH, batch_norm, GRIDS[ranks]):
        assert 0 < rank["halos"] < rank["saved"]
        assert rank["saved"] <= 1.05 * serial["saved"] / ranks + rank["halos"]
