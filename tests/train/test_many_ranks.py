"""As many ranks as have neighbours on all sides (tier: 9 gloo ranks; 27 and 64 in the long run)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hyperslab.train.evaluate import evaluate
from tests.ranks import close_pool, run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, narrow_network, run, write_recipe

AXES = ("depth", "height", "width")


def grid_of(side: int, axes: tuple[str, ...]) -> list[str]:
    return [f"grid.{axis}={side}" for axis in axes]


def scores(folder: Path) -> dict[str, float]:
    """Evaluate a run as this rank."""
    with narrow_network():
        return dict(evaluate(folder, checkpoint="latest").facts["mean"])


CASES = [(3, ("depth", "width")), (3, AXES), (4, AXES)]


@pytest.mark.parametrize(("side", "axes"), in_gate(CASES, kept=CASES[:1]))
def test_a_run_that_goes_on_with_fewer_ranks_is_the_serial_one(
    tmp_path: Path, universes: Path, side: int, axes: tuple[str, ...]
) -> None:
    """Blocks of 6, 5 and 5 voxels a side, later 2, 1 and 1: with three ranks a side uneven."""
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2, timeout=300)
    few = ["data.batch_size=2", "data.counts=[4,1,1]"]
    run(recipe, *few, f"output={tmp_path / 'serial'}")
    ranks = side ** len(axes)
    try:
        run_ranks(ranks, run, recipe, *few, "epochs=1", *grid_of(side, axes), timeout=600)
    finally:
        if ranks > 9:
            close_pool()  # nobody else needs so many ranks
    fewer = 2 ** len(axes)
    run_ranks(fewer, partial(run, resume=True), recipe, *few, *grid_of(2, axes))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "serial"), rel=1e-4)
    serial = scores(tmp_path / "serial")
    for found in run_ranks(fewer, scores, tmp_path / "run"):
        assert found == pytest.approx(serial, rel=1e-3)
