"""As many ranks as have neighbours on both sides (tier: 9 gloo ranks; 27, 64 in the long run)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import pytest

from hyperslab.train.evaluate import evaluate
from tests.ranks import close_pool, run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, narrow_network, run, write_recipe


def words(grid: Mapping[str, int]) -> list[str]:
    return [f"grid.{axis}={parts}" for axis, parts in grid.items()]


def scores(folder: Path) -> dict[str, float]:
    """Evaluate a run as this rank."""
    with narrow_network():
        return dict(evaluate(folder, checkpoint="latest").facts["mean"])


PLANE = {"depth": 3, "height": 3}
CUBES = [dict.fromkeys(("depth", "height", "width"), side) for side in (3, 4)]


@pytest.mark.parametrize("grid", in_gate([PLANE, *CUBES], kept=[PLANE]), ids=str)
def test_a_run_that_goes_on_with_fewer_ranks_is_the_serial_one(
    tmp_path: Path, universes: Path, grid: dict[str, int]
) -> None:
    """Blocks of 6, 5 and 5 voxels a side, later 2, 1 and 1: by threes they are uneven.

    A run on two ranks goes on from them.
    """
    half = {"height": 2}
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2, timeout=300)
    few = ["data.batch_size=2", "data.counts=[4,1,1]"]
    run(recipe, *few, f"output={tmp_path / 'serial'}")
    try:
        run_ranks(prod(grid.values()), run, recipe, *few, "epochs=1", *words(grid), timeout=600)
    finally:
        if len(grid) == 3:
            close_pool()  # nobody else needs so many ranks
    run_ranks(2, partial(run, resume=True), recipe, *few, *words(half))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "serial"), rel=1e-4)
    serial = scores(tmp_path / "serial")
    for found in run_ranks(2, scores, tmp_path / "run"):
        assert found == pytest.approx(serial, rel=1e-3)
