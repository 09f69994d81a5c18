"""What a step saves for backward per rank, and takes in all (tier: a few gloo ranks)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from large import ROWS, Row, kept_by_plain_torch
from launch import run_ranks as run_fresh_ranks
from predict_memory import measure
from resident import peak_memory, resident
from saved import GRIDS, saved_bytes

from hyperslab.recipe.schema import Recipe
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
    least = (1 << 28) - (1 << 20)  # the system counts pages by dozens
    assert least <= found["most"] < 1.5 * (1 << 28) < large.nbytes
    assert found["now"] < found["most"]


@pytest.mark.long
def test_training_takes_at_least_what_it_saves() -> None:
    found = run_fresh_ranks(1, peak_memory, "cosmoflow", WIDTH, False, {})[0]
    saved = run_ranks(1, saved_bytes, "cosmoflow", WIDTH, False, GRIDS[1])[0]["saved"]
    assert found["process"] > found["step"] > saved


@pytest.mark.long
@pytest.mark.parametrize(("size", "side"), [(128, 0), (256, 64)], ids=["whole", "windows"])
def test_predicting_takes_less_on_more_ranks(tmp_path: Path, size: int, side: int) -> None:
    """By half as much again, for buffers that do not shrink; docs/medical.md has the numbers."""
    grown = {n: measure(tmp_path, size, side, n, "zarr")["grown"] for n in (1, 2, 4)}
    assert grown[1] * 2**20 > size**3, "a serial prediction holds the volume at least"
    assert grown[2] < 0.75 * grown[1]
    assert grown[4] < 0.75 * grown[2] or grown[4] < 0.375 * grown[1]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_what_plain_torch_keeps_is_counted_without_memory(batch_norm: bool) -> None:
    kept = kept_by_plain_torch(Row(0, WIDTH, batch_norm=batch_norm))
    assert kept == pytest.approx(saved_bytes("cosmoflow", WIDTH, batch_norm, {})["saved"], rel=0.02)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_recipe(name: str, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(ROWS[name].recipe(2, tmp_path))
    assert recipe.grid.depth == ROWS[name].ranks
