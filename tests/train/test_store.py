"""Runs whose samples are kept, or cannot be read (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import h5py
import pytest

from hyperslab.errors import DataError, RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import evaluate
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, run, write_recipe

TOLERANCE = 1e-4


def on_ranks(recipe: Path, *overrides: str) -> None:
    run(recipe, *overrides)


@pytest.fixture(scope="module")
def read_each_time(universes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a serial run that keeps nothing."""
    recipe = write_recipe(tmp_path_factory.mktemp("serial") / "run.yaml", universes, epochs=2)
    run(recipe, "data.mode=direct")
    return losses(recipe.with_suffix(""))


@pytest.mark.parametrize(
    "how",
    in_gate(
        ["direct", "preload", "sample", "store data.budget=30KB"],
        kept=["sample", "store data.budget=30KB"],
    ),
)
def test_keeping_changes_nothing(
    tmp_path: Path, universes: Path, read_each_time: list[float], how: str
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2)
    places = ["grid.data=2", "grid.depth=2", f"data.mode={how}"]
    run_ranks(4, on_ranks, recipe, *" ".join(places).split())
    assert losses(tmp_path / "run") == pytest.approx(read_each_time, rel=TOLERANCE)


@pytest.fixture
def spoilt(universes: Path, tmp_path: Path) -> Path:
    """Two universes with a negative count, which no header shows."""
    folder = tmp_path / "spoilt"
    shutil.copytree(universes, folder)
    for number in (2, 7):
        with h5py.File(folder / f"univ_ics_{number:03}.hdf5", "a") as file:
            file["full"][3, 4, 5, 1] = -1
    return folder


SKIPPING = [
    (*way, grid)
    for way in itertools.product(("direct", "store", "sample"), (1, 2))
    for grid in ("data", "width", "data width")
]
IN_TURN = [("direct", 1, "width"), ("store", 2, "data width")]


@pytest.mark.parametrize(("mode", "accumulate", "cut"), in_gate(SKIPPING, kept=IN_TURN))
def test_skipping_is_the_same_on_every_grid(
    tmp_path: Path, spoilt: Path, mode: str, accumulate: int, cut: str
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", spoilt, epochs=2)
    how = ("data.on_error=skip", f"data.mode={mode}", f"optimizer.accumulate={accumulate}")
    run(recipe, *how, f"output={tmp_path}/serial")
    grid = [f"grid.{axis}=2" for axis in cut.split()]
    run_ranks(2 ** len(grid), on_ranks, recipe, *how, *grid)
    expected = losses(tmp_path / "serial")
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)


def test_a_sample_that_cannot_be_read_stops_a_run_or_is_left_out(
    tmp_path: Path, spoilt: Path
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", spoilt, epochs=1)
    with pytest.raises(DataError, match=r"univ_ics_00[27]\.hdf5.*negative counts"):
        run(recipe)
    shutil.rmtree(tmp_path / "run")
    run(recipe, "data.on_error=skip")
    result: Any = evaluate(tmp_path / "run", checkpoint="latest", split="all")
    names = result.predictions.samples
    assert len(names) == 11
    assert not {"univ_ics_002", "univ_ics_007"} & set(names)


def test_files_that_are_damaged_from_the_beginning(tmp_path: Path, universes: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(universes, folder)
    (folder / "univ_ics_003.hdf5").write_bytes(b"nothing")
    recipe = write_recipe(tmp_path / "run.yaml", folder, epochs=1)
    with pytest.raises(DataError, match=r"univ_ics_003\.hdf5: cannot be read"):
        run(recipe)
    shutil.rmtree(tmp_path / "run")
    run(recipe, "data.on_error=skip")
    assert losses(tmp_path / "run")
    for number in range(4, 12):
        (folder / f"univ_ics_{number:03}.hdf5").write_bytes(b"nothing")
    with pytest.raises(DataError, match="9 files were left out and only 4 kept"):
        run(recipe, "data.on_error=skip", f"output={tmp_path}/other")


def test_keys_of_the_store(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    assert load_recipe(recipe, ["data.budget=8GiB"]).data.budget == 8 * 2**30
    with pytest.raises(RecipeError, match=r"belong to the store, but data\.mode=direct"):
        load_recipe(recipe, ["data.mode=direct", "data.staging=/scratch"])
    with pytest.raises(RecipeError, match=r"(?s)data\.mode.*nearest: 'preload'"):
        load_recipe(recipe, ["data.mode=preloaded"])
