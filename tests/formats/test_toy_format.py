"""The format of docs/formats.md, through every command (tier: child processes, two gloo ranks)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hyperslab.errors import RecipeError
from hyperslab.formats import registry
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.formats.test_own_format import PAGE
from tests.formats.universes import counts, public, unit
from tests.ranks import run_ranks
from tests.train.universes import losses, write_recipe, write_universes

pytestmark = pytest.mark.usefixtures("forked")

MOST_LINES = 40
N, SHAPE = 3, (9, 8, 7, 4)
OVERRIDES = ("data.batch_size=2", "data.plugins=[toy_format]")
RANKS = ("--ranks", "2", "grid.depth=2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module of the page, as a user may have it."""
    path = tmp_path_factory.mktemp("home")
    _, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (path / "toy_format.py").write_text(code)
    return path


@pytest.fixture(scope="module")
def toys(home: Path) -> tuple[Path, list[Any]]:
    """Files written by numpy alone, one of them in a sub-folder, and their volumes."""
    folder = home / "toys"
    (folder / "sub").mkdir(parents=True)
    volumes = [np.moveaxis(counts(seed, SHAPE), -1, 0) for seed in range(N)]
    for seed, name in enumerate(("a", "b", "sub/c")):
        with (folder / f"{name}.toy").open("wb") as file:
            np.savez(file, volume=volumes[seed], target=unit(seed))
    return folder, volumes


def hyperslab(home: Path, *arguments: str) -> str:
    """What a command says that is started in the user's folder."""
    command = [sys.executable, "-m", "hyperslab", *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # as for the command of the same name
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_format_is_so_many_lines(home: Path) -> None:
    lines = (home / "toy_format.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= MOST_LINES


def read_all(home: str, folder: str) -> list[Any]:
    """What this rank has of each sample."""
    sys.path.insert(0, home)
    import hyperslab as hs
    from hyperslab.formats.registry import load_plugins

    load_plugins(["toy_format"])
    with hs.open(folder, hs.Grid(depth=2), batch_size=1, split="all", transform=None) as data:
        return [(x.box.slices(), x.local.numpy(), y.full().numpy()) for x, y in data.epoch(0)]


def test_open(home: Path, toys: tuple[Path, list[Any]]) -> None:
    folder, volumes = toys
    for rank in run_ranks(2, read_all, str(home), str(folder)):
        for seed, (box, values, target) in enumerate(rank):
            np.testing.assert_array_equal(values, volumes[seed][None][box])
            np.testing.assert_allclose(target[0], unit(seed), rtol=1e-6)


def test_inspect(home: Path, toys: tuple[Path, list[Any]]) -> None:
    words = hyperslab(home, "inspect", "toys", "grid.depth=2", "--plugin", "toy_format")
    assert "toys: 3 samples, toy" in words
    assert "4 x 9 x 8 x 7 (C x D x H x W) int16" in words
    assert "stored     not said by its format" in words
    assert "y0, y1, y2, y3" in words


def test_from_it_to_hdf5(home: Path, toys: tuple[Path, list[Any]]) -> None:
    import h5py

    _, volumes = toys
    convert = ("convert", "toys", "hdf5", "--plugin", "toy_format", "--workers", "2")
    assert "3 converted, 0 kept" in hyperslab(home, *convert)
    for seed, name in enumerate(("a", "b", "sub/c")):
        with h5py.File(home / "hdf5" / f"{name}.hdf5") as file:
            np.testing.assert_array_equal(np.moveaxis(file["full"][()], -1, 0), volumes[seed])
            np.testing.assert_array_equal(file["unitPar"][()], unit(seed))
    assert "0 converted, 3 kept" in hyperslab(home, *convert)


def test_from_hdf5_to_it(home: Path) -> None:
    """By two workers, which have to know the format themselves."""
    for seed in range(N):
        public(home / f"cubes/u{seed}.hdf5", counts(seed, SHAPE), seed)
    convert = ("convert", "cubes", "back", "--format", "toy", "--plugin", "toy_format")
    assert "3 converted, 0 kept" in hyperslab(home, *convert, "--workers", "2")
    for seed in range(N):
        with np.load(home / "back" / f"u{seed}.toy") as file:
            np.testing.assert_array_equal(file["volume"], np.moveaxis(counts(seed, SHAPE), -1, 0))
            np.testing.assert_array_equal(file["target"], unit(seed))


def test_train(home: Path) -> None:
    """The losses of HDF5 files on one rank, here on two; the run's folder knows the format."""
    write_universes(home / "universes", 5)
    convert = ("convert", "universes", "trained", "--format", "toy", "--plugin", "toy_format")
    hyperslab(home, *convert, "--workers", "1")
    recipe = write_recipe(home / "of-universes.yaml", home / "universes", epochs=1)
    train(load_recipe(recipe, ["data.batch_size=2"]), resume=False)
    recipe = write_recipe(home / "trained.yaml", home / "trained", epochs=1, output="of-trained")
    hyperslab(home, "train", str(recipe), *RANKS, *OVERRIDES)
    np.testing.assert_allclose(
        losses(home / "of-trained"), losses(home / "of-universes"), rtol=1e-4
    )
    saved = yaml.safe_load((home / "of-trained" / "recipe.yaml").read_text())
    assert saved["data"]["plugins"] == ["toy_format"]


def test_a_recipe_may_name_it_and_an_unknown_one_is_told_the_known_ones(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    monkeypatch.delitem(sys.modules, "toy_format", raising=False)
    recipe = write_recipe(home / "some.yaml", home / "nowhere")
    words = "bad value 'toy' for 'data.format': it should be one of hdf5, lbann, npy, tfrecord, z"
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe, ["data.format=toy"])
    with pytest.raises(RecipeError, match="plugin 'no_such': cannot be imported: ModuleNotFound"):
        load_recipe(recipe, ["data.plugins=[no_such]"])
    found = load_recipe(recipe, ["data.format=toy", "data.plugins=[toy_format]"])
    assert (found.data.format, found.data.plugins) == ("toy", ("toy_format",))
    sys.modules.pop("toy_format")
