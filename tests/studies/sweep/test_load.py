"""What a sweep file means, and what is wrong with it (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperslab.errors import DataError, RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.studies.sweep.schema import check_variant, load_sweep, shortened
from tests.studies.sweep.sweeps import write_sweep

SWEEPS = sorted((Path(__file__).parents[3] / "recipes" / "sweeps").glob("*.yaml"))


def test_every_rate_and_every_seed_of_every_variant(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path), ["data.batch_size=5"])
    choosing = [(run.variant, run.rate, run.seed) for run in sweep.choosing()]
    assert choosing == [
        ("plain", 1e-3, 0),
        ("plain", 1e-2, 0),
        ("no norm", 1e-3, 5),
        ("no norm", 1e-2, 5),
    ]
    final = sweep.final({"plain": 1e-3, "no norm": 1e-2})
    assert [(run.variant, run.rate, run.seed) for run in final] == [
        ("plain", 1e-3, 0),
        ("no norm", 1e-2, 5),
        ("plain", 1e-3, 1),
    ]
    recipe = final[1].recipe
    assert (recipe.seed, recipe.optimizer.learning_rate, recipe.epochs) == (5, 1e-2, 3)
    assert (recipe.model.batch_norm, recipe.data.batch_size) == (False, 5)  # type: ignore[union-attr]
    assert recipe.output == tmp_path / "out" / "no norm" / "rate-0.01-seed-5"
    assert len({run.folder for run in [*sweep.choosing(), *final]}) == 7


def test_a_variant_has_the_last_word(tmp_path: Path) -> None:
    variants = {"small": {"data.batch_size": 2, "rates": [0.5]}, "usual": {}}
    sweep = load_sweep(write_sweep(tmp_path, variants=variants), ["data.batch_size=5"])
    small, usual = sweep.variants
    assert (small.recipe.data.batch_size, usual.recipe.data.batch_size) == (2, 5)
    assert (small.rates, small.choosing_runs, usual.choosing_runs) == ((0.5,), 0, 2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "linear", "epochs": 90, "warmup": 9}, {"epochs": 30.0, "warmup": 3.0}),
        ({"name": "polynomial", "epochs": 120}, {"epochs": 40.0}),
        ({"name": "steps", "at": {33: 0.5, 60: 0.1}}, {"at": {11: 0.5, 20: 0.1}}),
    ],
    ids=lambda value: value.get("name"),
)
def test_a_shorter_training_has_a_shorter_schedule(
    tmp_path: Path, schedule: dict[str, Any], expected: dict[str, Any]
) -> None:
    write_sweep(tmp_path)
    words = [f"optimizer.schedule={schedule}", "epochs=120", "output=x", "follow_test=true"]
    short = shortened(load_recipe(tmp_path / "recipe.yaml", words), 1 / 3)
    assert (short.epochs, short.follow_test) == (40, False)
    values = short.optimizer.schedule.model_dump()
    assert {key: values[key] for key in expected} == expected
    assert values["name"] == schedule["name"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"seeds": []}, "'seeds': give at least one value"),
        ({"rates": [1e-3, 1e-3]}, "give at least one value, and none twice"),
        ({"rates": [-1]}, "bad value -1 for 'rates.0'"),
        ({"variants": {}}, "give at least one variant"),
        ({"variants": {"../x": {}}}, "'../x': a folder will have this name"),
        ({"variants": {1: {}}}, "the name 1 in 'variants' is no text\n    write it in quotes: '1'"),
        ({"variants": {"a": {"seed": 3}}}, "'a': seed is set by the sweep itself"),
        (
            {"variants": {"a": {"optimizer": {"learning_rate": 1}}}},
            "learning_rate is set by the sweep itself\n    give rates in the sweep's file",
        ),
        ({"variants": {"a": {"data.subvolum": 8}}}, "nearest: 'data.subvolume'"),
        ({"variants": {"a": {"epochs": 0}}}, "variant 'a'.*bad value 0 for 'epochs'"),
        ({"choose": {"epoch": 1}}, "nearest: 'choose.epochs'\n    valid in choose: epochs, seeds"),
        ({"choose": {"epochs": 2}}, "bad value 2 for 'choose.epochs'"),
        ({"ratess": [1]}, "unknown key 'ratess'\n    nearest: 'rates'"),
        ({"recipe": "nowhere.yaml"}, "cannot read the recipe .*nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    path = write_sweep(tmp_path, **keys)
    with pytest.raises(RecipeError, match=words) as caught:
        load_sweep(path)
    assert str(path) in str(caught.value)


OF_A_SWEEP = ["seed=1", "output=x", "optimizer={learning_rate: 1}", "optimizer.lr=1"]


@pytest.mark.parametrize("word", [*OF_A_SWEEP, "optimizer={arguments: {lr: 1}}"])
def test_no_override_is_left_out_for_what_the_sweep_sets(tmp_path: Path, word: str) -> None:
    with pytest.raises(RecipeError, match=r"override: .* is set by the sweep itself\n    give "):
        load_sweep(write_sweep(tmp_path), [word])


def test_rates_are_chosen_on_something(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="chosen on a validation split"):
        load_sweep(write_sweep(tmp_path), ["data.fractions=[0.8,0,0.2]"])


@pytest.mark.parametrize(
    ("counts", "split"), [("[16,4,0]", "test"), ("[0,4,4]", "train"), ("[20,4,4]", "train 20")]
)
def test_what_no_run_could_be_evaluated_on_is_said_before(
    tmp_path: Path, counts: str, split: str
) -> None:
    (variant, _) = load_sweep(write_sweep(tmp_path), [f"data.counts={counts}"]).variants
    with pytest.raises(DataError, match=f"variant 'plain': .*{split}") as caught:
        check_variant(variant)
    assert "compares on test" in str(caught.value)


@pytest.mark.parametrize("at", ["{1: 0.1}", "{3: 0.5, 4: 0.1}"])
def test_steps_of_the_rate_that_a_share_has_no_place_for(tmp_path: Path, at: str) -> None:
    write_sweep(tmp_path)
    words = [f"optimizer.schedule={{name: steps, at: {at}}}", "epochs=9"]
    recipe = load_recipe(tmp_path / "recipe.yaml", words)
    words_of_it = r"no place for the steps at .*\n    choose in more"
    with pytest.raises(RecipeError, match=words_of_it):
        shortened(recipe, 1 / 3)
    steps = {"optimizer.schedule": {"name": "steps", "at": yaml.safe_load(at)}, "epochs": 9}
    with pytest.raises(RecipeError, match=rf"sweep\.yaml, variant 'stepped': .*{words_of_it}"):
        load_sweep(write_sweep(tmp_path, variants={"plain": {}, "stepped": steps}))
    steps["rates"] = [1e-3]  # of which none is chosen
    load_sweep(write_sweep(tmp_path, variants={"stepped": steps, "plain": {}}))


def test_runs_end_after_equal_epochs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="stop_at would end its runs after different epochs"):
        load_sweep(write_sweep(tmp_path), ["stop_at.validation_loss=0.1"])


def test_rates_that_would_share_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"two of the rates .* are the same"):
        load_sweep(write_sweep(tmp_path, rates=[1e-3, 0.0010000001]))


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
def test_files_that_are_no_sweeps(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"s\.yaml"):
        load_sweep(tmp_path / "s.yaml")


def test_a_key_is_missing(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"recipe": "x", "rates": [1], "seeds": [1]}))
    with pytest.raises(RecipeError, match="'variants' is missing\n    valid there: recipe, var"):
        load_sweep(tmp_path / "s.yaml")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_shipped_sweeps_are_read(path: Path) -> None:
    sweep = load_sweep(path)
    assert sweep.final({variant.name: variant.rates[0] for variant in sweep.variants})
    assert all(variant.recipe.follow_test for variant in sweep.variants)
