"""A prediction in the form of a profile (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.planner.auto import predicted_profile, write_prediction
from hyperslab.planner.search import trace_one
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection
from hyperslab.train.profile import predicted_path, read_profile
from tests.planner.small import bounds, recipe_file, small_job, v100


def test_layers_and_stages_are_those_of_the_trace(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    found = trace_one(job, GridSection(depth=2), v100(), bounds())
    profile = predicted_profile(found, job.recipe)
    assert profile.kind == "predicted"
    assert {layer.stage for layer in profile.layers} == {"forward", "backward", "optimizer"}
    assert "features.conv1" in {layer.layer for layer in profile.layers}
    spent = found.seconds
    assert sum(layer.compute for layer in profile.layers) == pytest.approx(spent.compute)
    waited = sum(layer.communication for layer in profile.layers)
    assert waited == pytest.approx(spent.halos + spent.statistics)


def test_it_is_written_beside_the_profile(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path))
    write_prediction(recipe, "lassen-v100")
    assert read_profile(predicted_path(recipe.output)).layers
