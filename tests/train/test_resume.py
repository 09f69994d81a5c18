"""Going on with another recipe: it takes effect, or is refused (tier: no process)."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from hyperslab.checkpoint.run_state import RunState
from hyperslab.errors import RecipeError
from hyperslab.recipe.compare import COMPARED, SAME_RESULT, TAKES_EFFECT, changed_keys
from hyperslab.recipe.load import load_recipe
from hyperslab.train.history import CHANGES
from hyperslab.train.run import train
from hyperslab.train.samples import training_digest
from hyperslab.train.trainer import Trainer
from hyperslab.util.documents import read_json_lines
from tests.train.universes import losses, narrow_network, run, write_recipe

REFUSED = (
    "optimizer.accumulate=2",
    "loss=l1",
    "seed=1",
    "model.dropout=0.5",
    "model.batch_norm=false",
    "model.statistics=replica",
    "data.transform=null",
    "data.window=[0,1]",
)


def rates(out: Path) -> list[float]:
    with (out / "steps.csv").open() as file:
        return [float(row["learning_rate"]) for row in csv.DictReader(file)]


def test_a_changed_optimizer_takes_effect_and_is_recorded(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    groups: list[dict[str, object]] = []
    original = Trainer.train_epoch

    def watched(self: Trainer) -> None:
        groups.append(dict(self.optimizer.param_groups[0]))
        original(self)

    monkeypatch.setattr(Trainer, "train_epoch", watched)
    changed = ["optimizer.learning_rate=0.0005", "optimizer.betas=[0.8,0.9]", "epochs=2"]
    run(recipe, *changed, "optimizer.schedule.epochs=10", resume=True)
    assert groups[0]["betas"] == (0.8, 0.9)
    # An epoch of ten is done: 1 - (1 - 0.01) / 10 of the new rate, and less after each step.
    assert rates(out)[2:4] == pytest.approx([1e-3 * (1 - 0.99 * 2 / 300), 5e-4 * (1 - 0.099)])
    assert load_recipe(out / "recipe.yaml").optimizer.learning_rate == 5e-4
    (row,), _ = read_json_lines(out / CHANGES)
    assert row["step"] == 3
    assert row["changes"] == {
        "epochs": [1, 2],
        "optimizer.betas": [[0.9, 0.999], [0.8, 0.9]],
        "optimizer.learning_rate": [0.001, 0.0005],
        "optimizer.schedule.epochs": [100.0, 10.0],
    }
    run(recipe, *changed, "optimizer.schedule.epochs=10", "epochs=3", resume=True)
    assert [row["step"] for row in read_json_lines(out / CHANGES)[0]] == [3, 6]


def test_a_schedule_that_comes_later_counts_from_the_beginning(
    tmp_path: Path, universes: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe, "optimizer.schedule=null")
    run(recipe, "epochs=2", resume=True)  # the schedule of the defaults
    assert rates(out) == pytest.approx(
        [1e-3] * 3 + [1e-3 * (1 - 0.99 * k / 300) for k in (3, 4, 5)]
    )
    waves = "optimizer.schedule={target: torch.optim.lr_scheduler.CyclicLR, base_lr: 0, max_lr: 1}"
    with pytest.raises(RecipeError, match="CyclicLR has no formula for the rate at its step 6"):
        run(recipe, "epochs=3", waves, resume=True)


def test_what_a_run_keeps_is_refused_and_nothing_is_changed(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    before = (out / "recipe.yaml").read_bytes()
    with pytest.raises(RecipeError) as caught:
        run(recipe, "loss=l1", "epochs=2", resume=True)
    words = str(caught.value)
    assert words.startswith(f"--resume: loss is l1 but the run in output {out} has mse")
    assert "a resumed run may change optimizer.learning_rate, optimizer.schedule," in words
    assert (out / "recipe.yaml").read_bytes() == before
    assert not (out / CHANGES).exists()
    was = load_recipe(recipe)
    for override in REFUSED:
        with pytest.raises(RecipeError, match=f"^--resume: {override.split('=')[0]}"):
            changed_keys(was, load_recipe(recipe, [override]))
    with pytest.raises(RecipeError, match=r"^--resume: optimizer.name is sgd but .* has adam"):
        changed_keys(was, load_recipe(recipe, ["optimizer={name: sgd}"]))
    (out / "recipe.yaml").write_text("cut off: [")  # a run whose recipe is lost goes on
    monkeypatch.setattr(RunState, "_check_shown", lambda *_: None)
    run(recipe, "epochs=2", resume=True)
    assert len(rates(out)) == 6


def keys_of(section: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        found.add(prefix + name)
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found |= keys_of(inner, f"{prefix}{name}.")
    return found


def test_the_keys_that_are_named_exist(tmp_path: Path, universes: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "run.yaml", universes))
    there = keys_of(type(recipe)) | {"optimizer.momentum", "optimizer.weight_decay"}
    assert not {*TAKES_EFFECT, *SAME_RESULT, *COMPARED} - there


def test_a_training_pauses_where_it_is_told_to(
    tmp_path: Path, universes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a checkpoint that none was due for; the whole is that of a run without a pause."""
    recipe = load_recipe(write_recipe(tmp_path / "run.yaml", universes))
    caplog.set_level("INFO", "hyperslab")
    with narrow_network():
        for _ in range(2):  # the second time nothing is left until there
            train(recipe, resume=True, until=2)
            (kept,) = (recipe.output / "checkpoints").glob("step-*")
            assert kept.name == "step-00000006"
        train(recipe, resume=True, until=9)
        train(load_recipe(write_recipe(tmp_path / "whole.yaml", universes)))
    assert caplog.text.count("2 of 3 epochs are done: continue with --resume") == 2
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_other_targets_beside_the_same_volumes_are_another_training(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for i in range(10):
        np.save(data / f"v{i}.npy", np.full((4, 5, 6), i, np.float32))
    recipe = load_recipe(write_recipe(tmp_path / "run.yaml", data))

    def digest(factor: float) -> str:
        lines = "".join(f"v{i},{factor * i}\n" for i in range(10))
        (data / "targets.csv").write_text(f"name,a\n{lines}")
        return training_digest(recipe, recipe.data.chosen_volumes())

    assert digest(1.0) == digest(1.0) != digest(2.0)
