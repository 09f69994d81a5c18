"""Every shipped recipe says enough to be planned without its data (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.planner.job import job_of
from hyperslab.planner.machine import load_machine
from hyperslab.planner.search import trace_one
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection
from hyperslab.studies.scaling.points import ScalingKind, grown_points
from tests.planner.small import bounds

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_says_what_its_volumes_are(path: Path) -> None:
    if path.stem == "segresnet":
        pytest.importorskip("monai")
    recipe = load_recipe(path, [])
    job = job_of(recipe)
    assert "is not here" in job.assumed or recipe.data.synthetic is not None
    assert job.inputs[0] == recipe.data.batch_size
    if not recipe.grid.auto:
        (point,) = grown_points(ScalingKind.WEAK, recipe, [2 * recipe.grid.size], "data")
        each, rest = divmod(recipe.data.batch_size, recipe.grid.data)
        assert rest == 0
        assert point.batch_size == 2 * each * recipe.grid.data


def test_rates_by_norms_are_operators_of_the_optimizer() -> None:
    """Of sc18: 2048 mini-batches a step, whose norms no value of a tensor is read for."""
    path = next(path for path in RECIPES if path.stem == "sc18")
    small = ["data.subvolume=32", "model.width=32"]
    job = job_of(load_recipe(path, small))
    plain = job_of(load_recipe(path, [*small, "optimizer.larc=null"]))
    v100 = load_machine("lassen-v100")
    grid = GridSection(data=8)
    norms = trace_one(job, grid, v100, bounds()).cost
    none = trace_one(plain, grid, v100, bounds()).cost

    counts = [
        sum(layer.operators for layer in cost.layers if layer.phase == "optimizer")
        for cost in (norms, none)
    ]
    assert counts[0] > counts[1] > 0
