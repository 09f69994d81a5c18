"""Paths and lists of splits in recipes (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperslab.errors import DataError, RecipeError
from hyperslab.recipe.load import load_recipe, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.samples import splits_of_recipe


def recipe_of(folder: Path, **data: Any) -> Recipe:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"data": {"batch_size": 1, **data}}))
    return load_recipe(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("one/a.npy", "one/b.npy", "two/c.npy", "two/deep/d.npy", "e.npy"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_lists_beside_a_path(tree: Path) -> None:
    (tree / "val.txt").write_text("# of today\ntwo/c.npy\n\n  e.npy\n")
    data = recipe_of(
        tree, path=str(tree), train=["one", "two/deep"], validation="val.txt", test="0:1"
    )
    assert data.data.origin == tree
    splits = splits_of_recipe(data)
    assert splits is not None
    assert splits.train == ("one", "two/deep")
    assert splits.validation == ("two/c.npy", "e.npy")
    assert splits.test == ("0:1",)


def test_paths_alone_are_the_data_set(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    recipe = recipe_of(tree, train="one", validation=["two/c.npy", "two/deep"])
    assert recipe.data.origin == [tree / "one", tree / "two"]
    splits = splits_of_recipe(recipe)
    assert splits is not None
    assert (splits.train, splits.validation) == (("one",), ("two/c.npy", "two/deep"))
    one = recipe_of(tree, train="one/a.npy", validation="one/*b.npy")
    assert one.data.origin == [tree / "one"]
    found = splits_of_recipe(one)
    assert found is not None
    assert (found.train, found.validation) == (("a.npy",), ("b.npy",))


def test_a_list_alone_is_relative_to_its_own_folder(tree: Path) -> None:
    for name, line in (("train", "a.npy"), ("validation", "b.npy")):
        (tree / "one" / f"{name}.txt").write_text(f"{line}\r\n", "utf-8-sig", newline="")
    words = {name: str(tree / f"one/{name}.txt") for name in ("train", "validation")}
    recipe = recipe_of(tree, **words)
    assert recipe.data.origin == [tree / "one"]


def test_a_saved_recipe_means_the_same_elsewhere(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    (tree / "val.txt").write_text("e.npy\n")
    recipe = recipe_of(tree, train="one", validation="val.txt")
    before = (recipe.data.origin, splits_of_recipe(recipe))
    save_recipe(recipe, tree / "saved.yaml")
    monkeypatch.chdir("/")
    again = load_recipe(tree / "saved.yaml")
    assert (again.data.origin, splits_of_recipe(again)) == before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"train": "a"}, "data.validation is missing: data.train is given as a list"),
        ({"test": "a"}, "data.train is missing: data.test is given as a list"),
        ({"train": "a", "validation": "b", "counts": [1, 1, 1]}, "data.train and data.counts are"),
        ({"fold": 1}, "data.fold and data.folds go together"),
        ({"fold": 5, "folds": 5}, "counted from 0"),
        ({"fold": 0, "folds": 2, "train": "a"}, "data.folds and data.train both choose"),
        ({"fold": 0, "folds": 2, "fractions": [1, 0, 0]}, "data.folds and data.fractions are two"),
        ({"train": [], "validation": "b"}, "give a path or a list of samples"),
        ({"train": 620, "validation": "b"}, "'data.train'"),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, path="universes", **data)
    assert words in str(caught.value)


def test_paths_that_lead_nowhere(tree: Path) -> None:
    with pytest.raises(DataError, match=r"data.validation: .*three does not exist"):
        _ = recipe_of(tree, train=str(tree / "one"), validation=str(tree / "three")).data.origin
    (tree / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"data.train: the list .*bad.txt cannot be read"):
        splits_of_recipe(recipe_of(tree, path=str(tree), train="bad.txt", validation="e"))
    (tree / "none.txt").write_text("# nothing\n")
    with pytest.raises(DataError, match=r"none.txt has no line that names a sample"):
        splits_of_recipe(recipe_of(tree, path=str(tree), train="none.txt", validation="e"))
    with pytest.raises(RecipeError, match=r"is not in data.path"):
        splits_of_recipe(recipe_of(tree, path=str(tree / "one"), train=str(tree), validation="e"))
