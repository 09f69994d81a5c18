"""Recipes that come along are listed and copied (tier: no process)."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.shipped import copy_recipe, shipped_recipes
from hyperslab.studies.sweep.schema import load_sweep

RECIPES = Path(__file__).parents[2] / "recipes"


def test_all_recipes_of_the_repository_are_listed_with_a_sentence_each() -> None:
    names = {
        path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")
    }
    assert set(shipped_recipes()) == names
    assert all(20 < len(about) < 300 and "\n" not in about for about in shipped_recipes().values())


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "/" not in name])
def test_a_copy_is_the_recipe(name: str, tmp_path: Path) -> None:
    (copy,) = copy_recipe(name, tmp_path / "new" / "folder")
    assert copy.read_text() == (RECIPES / f"{name}.yaml").read_text()
    load_recipe(copy)


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "/" in name])
def test_a_sweep_is_copied_with_what_it_varies(name: str, tmp_path: Path) -> None:
    sweep, base = copy_recipe(name, tmp_path)
    assert sweep == tmp_path / f"{name}.yaml"
    assert base.parent == tmp_path
    assert load_sweep(sweep).variants


def test_a_changed_copy_is_not_replaced(tmp_path: Path) -> None:
    (copy,) = copy_recipe("demo", tmp_path)
    assert copy_recipe("demo", tmp_path) == [copy]
    copy.write_text("mine: 1")
    with pytest.raises(RecipeError, match=r"demo.yaml exists already, and differs"):
        copy_recipe("demo", tmp_path)
    assert copy.read_text() == "mine: 1"


def test_what_cannot_be_copied_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"there is no shipped recipe 'dem'\n    there are .*demo,"
    ):
        copy_recipe("dem", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"cannot copy a recipe to .*file"):
        copy_recipe("demo", tmp_path / "file")


def test_the_commands(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["recipes"]).stdout
    for name, about in shipped_recipes().items():
        assert any(line.split(maxsplit=1) == [name, about] for line in listed.splitlines())
    copied = CliRunner().invoke(app, ["recipes", "copy", "demo", str(tmp_path)])
    assert copied.stdout == f"{tmp_path / 'demo.yaml'}\n"


def test_the_list_on_a_terminal_narrower_than_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    monkeypatch.setattr(
        "hyperslab.cli.recipes.sys", SimpleNamespace(stdout=Mock(isatty=lambda: True))
    )
    listed = CliRunner().invoke(app, ["recipes"])
    assert listed.exit_code == 0
    assert "demo                          Small universes ..." in listed.stdout


def test_a_recipe_that_is_not_here_but_comes_along_is_pointed_to(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"\n    hyperslab ships one: hyperslab recipes copy demo$"
    ):
        load_recipe(tmp_path / "demo.yaml")
    with pytest.raises(RecipeError, match=r"No such file or directory$"):
        load_recipe(tmp_path / "other.yaml")
