"""Recipes whose volumes are made in memory (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hyperslab.data import SyntheticVolumes
from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe, save_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"data": {"synthetic": {"width": 16}, "batch_size": 4}}))
    return path


def test_what_a_recipe_says_is_what_comes(recipe: Path) -> None:
    source = load_recipe(recipe).data.origin
    assert isinstance(source, SyntheticVolumes)
    assert (source.shape, len(source.names)) == ((4, 16, 16, 16), 128)
    assert len(source.parameters.names) == 4
    words = ["data.synthetic={extents: [8, 6, 4], channels: 1, samples: 9, classes: 3}"]
    source = load_recipe(recipe, words).data.origin
    assert isinstance(source, SyntheticVolumes)
    assert (source.shape, len(source.names)) == ((1, 8, 6, 4), 9)
    assert source.classes == ("background", "class 1", "class 2")


def test_a_folder_takes_their_place(recipe: Path) -> None:
    data = load_recipe(recipe, ["data.path=universes", "data.synthetic=null"]).data
    assert data.origin == Path("universes")


def test_a_saved_recipe_reads_back_equal(recipe: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe)
    save_recipe(config, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml").data == config.data


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "data.synthetic=null",
            "or data.synthetic (volumes made in memory) is needed, and neither",
        ),
        ("data.path=universes", "is needed, and both are; make one of them null"),
        ("data.format=hdf5", "data.format describes files, but data.synthetic reads none"),
        (
            "data.synthetic.width=null",
            "needs width=N (voxels along each side) or extents=[D, H, W]",
        ),
        ("data.synthetic.extents=[4, 4, 4]", "needs width=N"),
        ("data.synthetic={width: 4, targets: 2, classes: 3}", "do not go together"),
        ("data.synthetic.classes=1", "'data.synthetic.classes': it should be greater than"),
        ("data.synthetic=4", "'data.synthetic': it is a section of keys\n    valid in data.synth"),
        ("data.synthetic.size=4", "unknown key 'data.synthetic.size'"),
    ],
)
def test_what_does_not_go(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [override])
    assert words in str(caught.value)
