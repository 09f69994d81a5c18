"""What a step saves for backward per rank, which is deterministic (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
from saved import GRIDS, saved_bytes

from tests.ranks import run_ranks

WIDTH = 32
SLACK = {"cosmoflow": 1.05, "unet3d": 1.08}
CASES = [("cosmoflow", False), ("cosmoflow", True), ("unet3d", True)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("network", "batch_norm"), CASES)
def test_saved_bytes_shrink_with_the_ranks(ranks: int, network: str, batch_norm: bool) -> None:
    serial = run_ranks(1, saved_bytes, network, WIDTH, batch_norm, GRIDS[1])[0]
    assert serial["saved"] > 4 * WIDTH**3  # at least the input
    assert serial["halos"] == 0
    for rank in run_ranks(ranks, saved_bytes, network, WIDTH, batch_norm, GRIDS[ranks]):
        assert 0 < rank["halos"] < rank["saved"]
        assert rank["saved"] <= SLACK[network] * serial["saved"] / ranks + rank["halos"]
