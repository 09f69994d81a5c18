"""Training on lists, folders and folds by recipe (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from hyperslab.comm import Grid
from hyperslab.errors import DataError, RecipeError
from hyperslab.formats import registry
from hyperslab.recipe.load import load_recipe
from hyperslab.train.builders import open_data, open_training
from hyperslab.train.evaluate import evaluate
from tests.train.universes import losses, run, write_recipe, write_universes


def shown(recipe: Path, *overrides: str) -> list[list[str]]:
    """The names of the samples that training and validation show."""
    found = []
    for data in open_training(load_recipe(recipe, overrides), Grid()):
        with data:
            found.append([data.source.names[sample] for sample in data.schedule.samples])
    return found


def test_a_fold_validates_and_another_one_is_another_run(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1)
    folds = [shown(recipe, f"data.fold={fold}", "data.folds=4") for fold in range(4)]
    held_out = [name for _, validation in folds for name in validation]
    assert sorted(held_out) == sorted(name for split in folds[0] for name in split)
    run(recipe, "data.fold=1", "data.folds=4")
    assert len(losses(tmp_path / "run")) == 3
    with pytest.raises(RecipeError, match=r"training split is not the one that .*data\.fold"):
        run(recipe, "data.fold=2", "data.folds=4", "epochs=2", resume=True)
    with pytest.raises(DataError, match=r"no split 'test': 4 folds"):
        evaluate(tmp_path / "run")
    evaluate(tmp_path / "run", split="validation")


def test_folders_are_scanned_once_for_all_splits(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1)
    with patch.object(registry, "scanned", wraps=registry.scanned) as scans:
        names = shown(recipe, "follow_test=true")
    assert len(names) == 3
    assert scans.call_count == 1
    apart = [open_data(load_recipe(recipe), Grid(), split=split) for split in ("train", "test")]
    for data, shown_together in zip(apart, (names[0], names[2]), strict=True):
        with data:
            assert [data.source.names[s] for s in data.schedule.samples] == shown_together


def test_a_list_that_changes_is_another_run(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1)
    names = sorted(path.name for path in universes.iterdir())
    (tmp_path / "train.txt").write_text("\n".join(names[:8]))
    words = [f"data.train={tmp_path / 'train.txt'}", "data.validation=8:10", "data.test=[10:13]"]
    run(recipe, *words)
    assert len(losses(tmp_path / "run")) == 2
    evaluate(tmp_path / "run")
    (tmp_path / "train.txt").write_text("\n".join(names[:7]))
    with pytest.raises(RecipeError, match=r"training split is not the one that .*data\.train"):
        run(recipe, *words, "epochs=2", resume=True)
    with pytest.raises(DataError, match=r"data\.train and data\.test overlap"):
        run(recipe, words[0], "data.validation=8:10", "data.test=6:8", f"output={tmp_path}/b")


def test_folders_of_their_own(tmp_path: Path) -> None:
    train = write_universes(tmp_path / "here" / "mine", 6)
    validation = write_universes(tmp_path / "there" / "theirs", 3)
    recipe = write_recipe(tmp_path / "run.yaml", train, epochs=1)
    words = ["data.path=null", f"data.train={train}", f"data.validation={validation}"]
    names = shown(recipe, *words)
    assert [len(split) for split in names] == [6, 3]
    assert names[0][0] == "here/mine/univ_ics_000"
    assert names[1][0] == "there/theirs/univ_ics_000"
    run(recipe, *words)
    saved = load_recipe(tmp_path / "run" / "recipe.yaml")
    with open_data(saved, Grid(), split="validation") as data:
        assert data.source.where(data.schedule.samples[0]).startswith(str(validation))
    small = write_universes(tmp_path / "small", 1, width=8)
    words[2] = f"data.validation={small}"
    with pytest.raises(DataError, match=r"small: shape is \(4, 8, 8, 8\) but \(4, 16, 16, 16\)"):
        run(recipe, *words, f"output={tmp_path / 'other'}")
