"""`grid: auto` (tiers: no process; 2 gloo ranks)."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import yaml

from hyperslab.errors import LayoutError, MachineError, RecipeError
from hyperslab.launch.restarts import chosen_overrides
from hyperslab.planner import search
from hyperslab.planner.auto import advice_for_memory, choose_grid, choose_grid_here
from hyperslab.planner.job import job_of
from hyperslab.planner.search import make_plan, trace_one
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection, Recipe
from hyperslab.train.run import train
from tests.planner.small import bounds, recipe_file, v100
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("traced_once")

SCANS = {
    "model": {"name": "unet3d", "channels": 4, "levels": 1},
    "data": {"synthetic": {"width": 8, "samples": 20, "channels": 1, "classes": 3}},
    "loss": "cross_entropy",
}


def auto(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(recipe_file(folder, grid="auto"), overrides)


def scans_file(folder: Path, grid: object, width: int = 8) -> Path:
    path = folder / "scans.yaml"
    synthetic = {**SCANS["data"]["synthetic"], "width": width}
    data = {"synthetic": synthetic, "batch_size": 2}
    path.write_text(yaml.safe_dump({**SCANS, "data": data, "grid": grid}))
    return path


def scans(folder: Path) -> Recipe:
    return load_recipe(scans_file(folder, "auto"))


def test_the_plans_best_is_taken_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = auto(tmp_path)
    with caplog.at_level(logging.INFO, "hyperslab"):
        found = choose_grid(recipe, 4, v100(), bounds())
    best = make_plan(job_of(recipe), v100(), 4, bounds()).best
    assert best is not None
    assert found.grid == best.grid
    assert found.grid.size == 4
    assert found.memory == "none"
    assert "grid=auto: " in caplog.text
    again = load_recipe(recipe_file(tmp_path, grid="auto"), chosen_overrides(found))
    assert again.grid == found.grid


def test_activations_are_recomputed_where_nothing_else_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = scans(tmp_path)
    job = job_of(recipe)
    smallest = make_plan(job, v100(), 2, bounds()).smallest
    assert smallest is not None
    again = job.with_recipe(memory="recompute")
    less = trace_one(again, smallest.grid, v100(), bounds()).memory.total
    assert less < smallest.memory.total
    with caplog.at_level(logging.INFO, "hyperslab"):
        found = choose_grid(recipe, 2, v100(), bounds(less))
    assert found.memory == "recompute"
    assert "memory=recompute" in caplog.text


def test_nothing_fits(tmp_path: Path) -> None:
    recipe = scans(tmp_path)
    again = job_of(recipe).with_recipe(memory="recompute")
    smallest = make_plan(again, v100(), 2, bounds()).smallest
    assert smallest is not None
    with pytest.raises(LayoutError, match="no grid of 2 ranks fits into") as caught:
        choose_grid(recipe, 2, v100(), bounds(smallest.memory.total - 1))
    assert "ranks would do: " in str(caught.value)
    with pytest.raises(LayoutError, match="none of the few traced grids"):
        choose_grid(recipe, 2, v100(), bounds(1 << 10))


def test_what_would_fit_where_the_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planned with less than what did not do, and can be typed."""
    path = scans_file(tmp_path, {"depth": 2}, width=16)
    recipe = load_recipe(path)
    planned = trace_one(job_of(recipe), recipe.grid, v100(), bounds()).memory
    monkeypatch.setattr(search, "host_bounds", lambda *_: bounds(2 * planned.total))
    words = advice_for_memory(recipe, "lassen-v100")
    first, second = words.splitlines()
    assert first.startswith("the plan expects ")
    assert "would do: " in second
    overrides = [word for word in second.split() if "=" in word]
    other = load_recipe(path, ["grid.depth=1", *overrides])
    less = trace_one(job_of(other), other.grid, v100(), bounds()).memory
    assert less.total - less.process <= 0.9 * (planned.total - planned.process)


def test_nobody_chooses(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing here can choose the grid"):
        train(auto(tmp_path))


def test_a_machine_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no machine file nowhere"):
        choose_grid_here(auto(tmp_path), 2, "nowhere")


def train_both(path: Path) -> str:
    train(
        load_recipe(path, ["epochs=1", "device=cpu"]),
        choose=partial(choose_grid_here, machine="lassen-v100"),
    )
    return (path.parent / "run" / "recipe.yaml").read_text()


def test_all_ranks_train_on_the_grid_that_one_chose(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, grid="auto")
    first, second = run_ranks(2, train_both, path)
    assert first == second
    grid = GridSection(**yaml.safe_load(first)["grid"])
    assert grid.size == 2
    assert not grid.auto
