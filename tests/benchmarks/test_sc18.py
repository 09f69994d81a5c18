"""The run of the SC18 recipe: its overrides, and what it records (tier: no process)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sc18

from hyperslab.recipe.load import load_recipe
from hyperslab.studies.sweep.schema import load_sweep


def test_the_overrides_go_with_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(sc18.RECIPE, sc18.overrides(tmp_path, 128, 100, 20, 2))
    assert recipe.data.counts == (80, 10, 10)
    assert recipe.data.redshifts == (0.0,)
    assert recipe.data.targets == ("Omega_m", "sigma_8", "n_s")
    assert recipe.data.repeat == 2
    assert recipe.loss == "l1"
    assert recipe.epochs == recipe.optimizer.schedule.epochs == 20  # type: ignore[union-attr]
    assert recipe.optimizer.larc is not None
    assert recipe.grid.size == 2
    assert recipe.optimizer.learning_rate == sc18.RATE


def test_the_papers_own_numbers() -> None:
    """Section III-B; the effective mini-batch is that of 2048 nodes."""
    recipe = load_recipe(sc18.RECIPE)
    adam = recipe.optimizer
    assert recipe.data.batch_size * adam.accumulate == 2048
    assert (adam.learning_rate, adam.learning_rate * adam.schedule.factor) == pytest.approx(
        (2e-3, 1e-4)
    )
    assert adam.schedule.name == "polynomial"
    assert adam.larc is not None
    assert (adam.larc.trust, adam.larc.otherwise) == (0.002, 6.25e-5)
    assert recipe.data.counts == (None, 150, 50)


def test_figure_5_compares_mini_batches_at_equal_epochs() -> None:
    """Each a factor of four larger than the one before, as 2048 and 8192 nodes are."""
    sweep = load_sweep(sc18.RECIPE.parent / "sweeps" / "sc18-batches.yaml")
    recipes = [variant.recipe for variant in sweep.variants]
    assert [r.data.batch_size * r.optimizer.accumulate for r in recipes] == [2, 8, 32]
    assert len({recipe.epochs for recipe in recipes}) == 1
    assert {recipe.loss for recipe in recipes} == {"l1"}


def errors(ours: float, of_mean: float) -> dict[str, float]:
    return {"relative_error_sc18": ours, "relative_error_sc18_of_mean": of_mean}


def test_says_which_parameters_are_no_better_than_the_mean() -> None:
    found = {"a": errors(0.1, 0.2), "b": errors(0.2, 0.2), "c": errors(float("nan"), 0.2)}
    assert sc18.verdict(found) == {"better_than_the_mean": ["a"], "not": ["b", "c"]}


def test_parts_in_their_order_and_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that are there already go on: all are given what they need for that."""
    called: list[tuple[str, ...]] = []

    def command(*words: Any) -> None:
        called.append(tuple(map(str, words)))
        run = tmp_path / "run-32"
        (run / "evaluation").mkdir(parents=True, exist_ok=True)
        (run / "steps.csv").write_text("step,step_seconds\n1,3\n2,1\n3,2\n")
        (run / "epochs.csv").write_text("epoch,train_loss,validation_loss,seconds\n0,0.5,,1\n")
        metrics = {
            "parameters": {"n_s": errors(0.01, 0.02)},
            "date": "today",
            "checkpoint": "best",
            "samples": 1,
        }
        (run / "evaluation" / "metrics.json").write_text(json.dumps(metrics))

    monkeypatch.setattr(sc18, "hyperslab", command)
    out = tmp_path / "out.json"
    words = [str(tmp_path), "--size", "32", "--count", "10", "--json", str(out), "seed=3"]
    monkeypatch.setattr(sys, "argv", ["sc18.py", *words])
    sc18.main()
    assert [words[0] for words in called] == ["simulate", "train", "evaluate"]
    assert "--resume" in called[1]
    assert "seed=3" in called[1]
    assert called[0][-2:] == ("--ranges", "sc18")
    found = json.loads(out.read_text())
    assert found["better_than_the_mean"] == ["n_s"]
    assert found["step_seconds"] == 2
    assert found["epochs"] == [{"epoch": 0, "train_loss": 0.5}]
    assert found["overrides"][-1] == "seed=3"
    assert str(tmp_path) not in out.read_text()
