"""As many ranks as have neighbours on all sides (tier: 27 gloo ranks; 64 in the long run)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hyperslab.train.evaluate import evaluate
from tests.ranks import close_pool, run_ranks
from tests.train.universes import losses, narrow_network, run, write_recipe


def grid_of(side: int) -> list[str]:
    return [f"grid.{axis}={side}" for axis in ("depth", "height", "width")]


def scores(folder: Path) -> dict[str, float]:
    """Evaluate a run as this rank."""
    with narrow_network():
        return dict(evaluate(folder, checkpoint="latest").facts["mean"])


@pytest.mark.parametrize("side", [3, pytest.param(4, marks=pytest.mark.long)])
def test_a_run_that_goes_on_with_fewer_ranks_is_the_serial_one(
    tmp_path: Path, universes: Path, side: int
) -> None:
    """Blocks of 6, 5 and 5 voxels a side, later 2, 1 and 1: with 27 ranks they are uneven."""
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2, timeout=300)
    few = ["data.batch_size=2", "data.counts=[4,1,1]"]
    run(recipe, *few, f"output={tmp_path / 'serial'}")
    try:
        run_ranks(side**3, run, recipe, *few, "epochs=1", *grid_of(side), timeout=600)
    finally:
        close_pool()  # nobody else needs so many ranks
    run_ranks(8, partial(run, resume=True), recipe, *few, *grid_of(2))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "serial"), rel=1e-4)
    serial = scores(tmp_path / "serial")
    for found in run_ranks(8, scores, tmp_path / "run"):
        assert found == pytest.approx(serial, rel=1e-3)
