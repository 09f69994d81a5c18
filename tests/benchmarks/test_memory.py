"""What a step saves for backward per rank, and takes in all (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch
from launch import run_ranks as run_fresh_ranks
from resident import peak_memory, resident
from saved import GRIDS, saved_bytes

from tests.ranks import run_ranks
from tests.selection import in_gate

WIDTH = 32
SLACK = {"cosmoflow": 1.05, "unet3d": 1.08}
CASES = [("cosmoflow", False), ("cosmoflow", True), ("unet3d", True)]


@pytest.mark.parametrize("ranks", in_gate([2, 4, 8], kept=[2]))
@pytest.mark.parametrize(("network", "batch_norm"), CASES)
def test_saved_bytes_shrink_with_the_ranks(ranks: int, network: str, batch_norm: bool) -> None:
    serial = run_ranks(1, saved_bytes, network, WIDTH, batch_norm, GRIDS[1])[0]
    assert serial["saved"] > 4 * WIDTH**3  # at least the input
    assert serial["halos"] == 0
    for rank in run_ranks(ranks, saved_bytes, network, WIDTH, batch_norm, GRIDS[ranks]):
        assert 0 < rank["halos"] < rank["saved"]
        assert rank["saved"] <= SLACK[network] * serial["saved"] / ranks + rank["halos"]


def held(nbytes: int) -> dict[str, int]:
    """The most memory of a process that holds so much for a while."""
    before = resident("VmRSS")
    torch.ones(nbytes, dtype=torch.uint8)
    return {"most": resident("VmHWM") - before, "now": resident("VmRSS") - before}


@pytest.mark.long
def test_the_most_that_a_process_holds_is_its_own() -> None:
    large = torch.ones(1 << 29, dtype=torch.uint8)  # of the parent: the ranks know nothing of it
    found = run_fresh_ranks(1, held, 1 << 28)[0]
    assert 1 << 28 <= found["most"] < 1.5 * (1 << 28) < large.nbytes
    assert found["now"] < found["most"]


@pytest.mark.long
def test_training_takes_at_least_what_it_saves() -> None:
    found = run_fresh_ranks(1, peak_memory, "cosmoflow", WIDTH, False, {})[0]
    saved = run_ranks(1, saved_bytes, "cosmoflow", WIDTH, False, GRIDS[1])[0]["saved"]
    assert found["process"] > found["step"] > saved
