"""The test loss by epoch, and the best checkpoint of a run that was killed (tier: one process)."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest

from hyperslab.checkpoint import retention
from hyperslab.checkpoint.retention import folder_of
from hyperslab.train.evaluate import Evaluation, evaluate
from hyperslab.train.trainer import Trainer
from tests.selection import in_gate
from tests.train.universes import losses, run, write_recipe


def epochs(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "epochs.csv").read_text().splitlines()))


@pytest.mark.parametrize("mode", in_gate(["store", "direct"], kept=["store"]))
def test_the_test_loss_is_that_of_an_evaluation_and_changes_nothing(
    tmp_path: Path, universes: Path, mode: str
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=2), tmp_path / "run"
    run(recipe, f"output={out}-plain", f"data.mode={mode}")
    run(recipe, "follow_test=true", f"data.mode={mode}")
    assert losses(out) == losses(Path(f"{out}-plain"))
    rows = epochs(out)
    result = evaluate(out, checkpoint="latest")
    assert isinstance(result, Evaluation)
    assert float(rows[1]["test_loss"]) == pytest.approx(result.facts["mean"]["mse"], rel=1e-5)
    assert "test_loss" not in epochs(Path(f"{out}-plain"))[0]
    assert rows[0]["test_loss"] != rows[0]["validation_loss"]


def test_a_run_killed_before_it_points_to_its_best_checkpoint_mends_that(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is complete, and the one before is still said to be the best."""
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    found = [0.3, 0.1, 0.2]  # by epoch
    measures = {"validation_mae": 0.5}
    monkeypatch.setattr(
        Trainer, "measure", lambda self, _: {"validation_loss": found[self.at.epoch], **measures}
    )
    original = retention._tidy

    def killed(new: Path, **options: Any) -> None:
        if new.name == "step-00000006":
            raise KeyboardInterrupt
        original(new, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "_tidy", killed)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, "checkpoint.every=1")
    assert os.readlink(folder_of(out) / "best") == "step-00000003"
    run(recipe, "checkpoint.every=1", resume=True)
    assert os.readlink(folder_of(out) / "best") == "step-00000006"
    assert [float(row["validation_loss"]) for row in epochs(out)] == found
