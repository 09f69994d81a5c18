"""Recipes: what they say, and what they say when they are wrong (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe, nearest_key, save_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALLEST: dict[str, Any] = {"data": {"path": "universes", "batch_size": 4}}


def write(folder: Path, values: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST))
    adam = recipe.optimizer
    assert adam.name == "adam"
    assert (adam.betas, adam.eps) == ((0.9, 0.999), 1e-8)
    assert adam.schedule.name == "linear"
    assert (adam.schedule.epochs, adam.schedule.factor) == (100, 0.01)
    assert recipe.epochs == 130
    assert recipe.grid.size == 1
    assert recipe.output == Path("runs/mine")


def test_larc_takes_the_papers_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    assert load_recipe(path).optimizer.larc is None
    larc = load_recipe(path, ["optimizer.larc={}"]).optimizer.larc
    assert larc is not None
    assert (larc.trust, larc.otherwise) == (0.002, 6.25e-5)
    assert "unknown key 'optimizer.larc.eta'" in error(path, "optimizer.larc.eta=1")
    assert "'optimizer.larc.trust'" in error(path, "optimizer.larc.trust=0")


@pytest.mark.parametrize("said", ["lr", "learning_rate", "arguments"])
@pytest.mark.parametrize("word", ["lr", "learning_rate", "arguments.lr"])
def test_an_override_of_the_rate_is_the_one_that_counts(
    tmp_path: Path, said: str, word: str
) -> None:
    """Whether it has torch's name or ours, in the file and in the override."""
    given = {"lr": 0.5} if said == "arguments" else 0.5
    values = {**SMALLEST, "optimizer": {"name": "adamw", said: given}}
    recipe = load_recipe(write(tmp_path, values), [f"optimizer.{word}=0.25"])
    optimizer = recipe.optimizer.build([torch.nn.Parameter(torch.ones(1))])
    assert optimizer.param_groups[0]["lr"] == recipe.optimizer.learning_rate == 0.25
    assert load_recipe(write(tmp_path, values)).optimizer.learning_rate == 0.5
    saved = {**SMALLEST, "optimizer": {"name": "adamw", "learning_rate": None, "lr": 0.5}}
    assert load_recipe(write(tmp_path, saved)).optimizer.learning_rate == 0.5
    text = {"name": "adamw", "lr": "5e-1", "learning_rate": 0.5}  # YAML takes 5e-1 for a text
    assert load_recipe(write(tmp_path, {**SMALLEST, "optimizer": text})).optimizer.learning_rate
    text = {"name": "adamw", "learning_rate": 0.5, "arguments": {"lr": "1e-3"}}
    assert "given as 1e-3 and 0.5" in error(write(tmp_path, {**SMALLEST, "optimizer": text}))
    both = {**SMALLEST, "optimizer": {"name": "adamw", said: given, word.split(".")[-1]: 0.25}}
    if len(both["optimizer"]) == 3:
        assert "mine.yaml: optimizer.lr and optimizer.learning_rate are the same number" in error(
            write(tmp_path, both)
        )


def test_overrides_are_yaml_and_reach_into_missing_sections(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, SMALLEST),
        [
            "grid.depth=2",
            "grid.height=3",
            "optimizer.learning_rate=1e-2",  # which YAML takes for a string
            "data.augment=true",
            "data.fractions=[0.5, 0.25, 0.25]",
            "data.transform=null",
            "optimizer.schedule.epochs=7",
            "output=a=b",
        ],
    )
    assert recipe.grid.size == 6
    assert recipe.optimizer.learning_rate == 0.01
    assert recipe.data.augment is True
    assert recipe.data.fractions == (0.5, 0.25, 0.25)
    assert recipe.data.transform is None
    assert recipe.optimizer.schedule.name == "linear"
    assert recipe.optimizer.schedule.epochs == 7
    assert recipe.output == Path("a=b")


def test_numbers_and_names_are_what_people_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By YAML 1.1 it is 8, a date, and a folder called ~."""
    monkeypatch.setenv("HOME", "/somewhere")
    words = ["seed=010", "data.path=2026-11-29", "output=~/runs/010", "data.staging=~other/x"]
    lists = ["data.train=[001, ~/a]", "data.validation=0:5"]
    first = load_recipe(write(tmp_path, SMALLEST), [*words, *lists])
    save_recipe(first, tmp_path / "again.yaml")
    for recipe in (first, load_recipe(tmp_path / "again.yaml")):
        assert recipe.seed == 10
        assert str(recipe.data.path).endswith("2026-11-29")
        assert recipe.output == Path("/somewhere/runs/010")
        assert recipe.data.staging == Path("~other/x")  # there is nobody of this name
        assert recipe.data.train == ("001", "/somewhere/a")


def test_a_saved_recipe_reads_back_equal(tmp_path: Path) -> None:
    overrides = ["optimizer.name=sgd", "optimizer.schedule={name: steps, at: {32: 0.25}}"]
    recipe = load_recipe(write(tmp_path, SMALLEST), overrides)
    save_recipe(recipe, tmp_path / "again.yaml")
    again = load_recipe(tmp_path / "again.yaml")
    assert again.data.path == recipe.data.path.absolute() != recipe.data.path
    assert again.model_copy(update={"data": recipe.data}) == recipe


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("epoch", "epochs"),
        ("batch_size", "data.batch_size"),
        ("data.batchsize", "data.batch_size"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("optimizer.schedule.factr", "optimizer.schedule.factor"),
        ("grid.deph", "grid.depth"),
        ("gird.depth", "grid"),
        ("checkpoint.keeps", "checkpoint.keep"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    message = error(write(tmp_path, SMALLEST), f"{key}=3")
    named = key if near != "grid" else "gird"
    assert f"override {key}=: unknown key '{named}'" in message
    assert f"nearest: '{near}'" in message


def test_an_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALLEST, "precison": "bf16"})
    message = error(path)
    assert f"{path}: unknown key 'precison'\n    nearest: 'precision'" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "precision=bf61",
            "'bf61' for 'precision': it should be one of float32, tf32, bf16, float16\n",
        ),
        ("precision=bf61", "nearest: 'bf16'"),
        ("data.transform=logp1", "nearest: 'log1p'"),
        ("optimizer.name=adm", "'adm' for 'optimizer.name'"),
        ("optimizer.name=adm", "nearest: 'adam'"),
        ("optimizer.schedule.name=liner", "nearest: 'linear'"),
        ("optimizer.momentum=0.5", "'optimizer.momentum' does not go with the chosen"),
        ("data.batch_size=0", "bad value 0 for 'data.batch_size': it should be greater than 0"),
        ("data.fractions=[1, 1, 1]", "make 3, not 1"),
        ("data.fractions=[1, a, 0]", "'data.fractions.1'"),
        ("epochs=1.5", "bad value 1.5 for 'epochs'"),
        ("optimizer.learning_rate=.inf", "'optimizer.learning_rate': it should be a finite"),
        ("grid=4", "'grid': it is a section of keys\n    valid in grid: data, depth"),
        ("model=4", "'model': it is a section of keys\n    valid in model: "),
        ("model.name=unet", "'unet' for 'model.name': it should be one of"),
        ("model.levels=4", "'model.levels' does not go with the chosen model.name"),
        ("loss=dise", "nearest: 'dice'"),
        ("data.window=3", "bad value 3 for 'data.window': it should be a list, [...]"),
        ("metrics=mse", "it should be {key: value}"),
        ("data.batch_size=yes", "bad value True for 'data.batch_size': it should be a number"),
        ("data.budget=much", "bad value 'much' for 'data.budget': it should be a size, 16GiB say"),
        ("optimizer.clip=true", "bad value True for 'optimizer.clip': it should be a number"),
        ("data.counts=[on, 1, 1]", "bad value True for 'data.counts.0': it should be a number"),
        ("data.ranges={a: [no, 1]}", "bad value False for 'data.ranges.a.0'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_valid(tmp_path: Path, override: str, words: str) -> None:
    message = error(write(tmp_path, SMALLEST), override)
    assert f"override {override.partition('=')[0]}=: " in message
    assert words in message


def test_optimizers_and_schedules_that_no_training_takes_are_not_offered(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    optimizers = error(path, "optimizer.name=adm")
    assert "one of adam, sgd, " in optimizers
    assert "adamw" in optimizers
    schedules = error(path, "optimizer.schedule.name=liner")
    assert "steplr" in schedules
    refused = ("lbfgs", "muon", "sparseadam", "lambdalr", "multiplicativelr")
    assert not any(name in optimizers + schedules for name in refused)


def test_a_pattern_of_files_may_begin_with_a_star(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), ["data.files=*/snap_*.h5", "data.augment=yes"])
    assert recipe.data.files == ("*/snap_*.h5",)
    assert recipe.data.augment


def test_a_metric_has_a_target_and_a_name_for_a_column(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    assert "give a name, such as mse, or a section with a target" in error(path, "metrics={m: {}}")
    assert "'a,b' cannot head a column" in error(path, 'metrics={"a,b": l1}')
    names = load_recipe(path, ['metrics={"dice of rim (2 mm)": l1}']).metrics
    assert list(names) == ["dice of rim (2 mm)"]


def test_a_network_for_classes_and_a_window(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALLEST, "loss": "dice"})
    recipe = load_recipe(path, ["model.name=unet3d", "data.window=[-100, 400]"])
    assert recipe.model.name == "unet3d"
    assert (recipe.model.channels, recipe.model.levels) == (32, 3)
    assert (recipe.data.window, recipe.data.transform) == ((-100.0, 400.0), "auto")
    save_recipe(recipe, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml").data.window == (-100.0, 400.0)
    assert "loss=dice does not go with model.name=cosmoflow: use one of mse, l1" in error(path)
    message = error(path, "model.name=unet3d", "loss=mse")
    assert "loss=mse does not go with model.name=unet3d: use one of cross_entropy, dice" in message
    message = error(path, "model.name=unet3d", "data.window=[0, 1]", "data.transform=mean")
    assert "data.window and data.transform are two transforms" in message


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    message = error(write(tmp_path, {"epochs": 0, "optimzer": {}}), "device=gpu")
    assert all(word in message for word in ("'epochs'", "'optimzer'", "'device'", "'data'"))
    assert "'data' is missing" in message


@pytest.mark.parametrize("override", ["epochs", "=3", "epochs=[1"])
def test_what_is_no_override(tmp_path: Path, override: str) -> None:
    assert repr(override) in error(write(tmp_path, SMALLEST), override)


def test_what_is_no_recipe(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in error(tmp_path / "none.yaml")
    assert "is not a recipe" in error(write(tmp_path, [1, 2]))
    (tmp_path / "mine.yaml").write_text("a: [")
    assert "mine.yaml is not valid YAML" in error(tmp_path / "mine.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_recipes_that_come_along_are_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.output == Path("runs") / path.stem


def test_nearest_prefers_the_same_last_part() -> None:
    assert nearest_key("batch_size", ["model.batch_norm", "data.batch_size"]) == "data.batch_size"
    assert nearest_key("optimizer.lr", ["optimizer.eps", "optimizer.learning_rate"]) == (
        "optimizer.learning_rate"
    )


def test_a_grid_may_be_left_to_the_plan(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALLEST, "grid": "auto"})
    assert load_recipe(path).grid.auto
    assert load_recipe(path, ["grid.depth=2"]).grid.size == 2
    assert load_recipe(write(tmp_path, SMALLEST), ["grid=auto"]).grid.auto
    assert "auto" not in load_recipe(write(tmp_path, SMALLEST)).model_dump()["grid"]
    assert "grid=auto chooses the axes" in error(path, "grid={auto: true, depth: 2}")
