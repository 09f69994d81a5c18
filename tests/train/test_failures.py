"""Runs that cannot go well (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperslab.checkpoint.retention import latest
from hyperslab.errors import CheckpointError, DataError, DivergedError, HyperslabError, RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.history import HistoryFile
from hyperslab.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, run, write_recipe


def diverging(recipe: Path, *overrides: str) -> str:
    """Let the weights of one rank become NaN in the fifth step."""
    original = Trainer.train_step

    def broken(self: Trainer, *args: Any) -> Any:
        if self.at.step == 4:
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", broken)
        with pytest.raises(DivergedError) as caught:
            run(recipe, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, universes: Path, ranks: int) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    every = "checkpoint.every_steps=2"
    if ranks == 1:
        message = diverging(recipe, every)
    else:
        message = run_ranks(2, diverging, recipe, every, "grid.depth=2")[1]
    assert "not a finite number in step 5 (epoch 2); the first is rank 0" in message
    newest = latest(out)
    assert newest is not None
    assert newest.name == "step-00000004"
    assert len(losses(out)) == 4


def test_a_run_that_cannot_be_written_is_named(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    (tmp_path / "run").write_text("a file in the way")
    with pytest.raises(RecipeError, match=f"cannot write into output {tmp_path / 'run'}: "):
        run(recipe)


def test_a_disk_that_is_full_under_the_history_is_named(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(HistoryFile, "add", full)
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    with pytest.raises(HyperslabError, match=f"run {tmp_path / 'run'}: No space left"):
        run(recipe)


def failing_to_save(recipe: Path, *overrides: str) -> str:
    (load_recipe(recipe).output / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError) as caught:
        run(recipe, *overrides)
    return str(caught.value)


def test_all_ranks_say_that_a_checkpoint_cannot_be_written(tmp_path: Path, universes: Path) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    out.mkdir()
    messages = run_ranks(2, failing_to_save, recipe, "grid.data=2", "checkpoint.every=1")
    assert messages[0] == messages[1]
    assert f"cannot write the checkpoint {out / 'checkpoints' / 'step-00000003'}" in messages[0]
    assert len(losses(out)) == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.width=32", r"volumes of \[16, 16, 16\] voxels but the model takes \[32, 32, 32\]"),
        ("model.variant=sc18", "takes no width 16: use one of 128"),
    ],
)
def test_a_model_that_does_not_go_with_the_data(
    tmp_path: Path, universes: Path, override: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        run(write_recipe(tmp_path / "run.yaml", universes), override)


@pytest.mark.parametrize("name", ["steps.csv", "epochs.csv"])
@pytest.mark.parametrize(
    "content", [b"\x80\x04\x95\n", b"x,0,0,0,0,0,0,0,0,0\n"], ids=["bytes", "row"]
)
def test_a_damaged_history_is_named(
    tmp_path: Path, universes: Path, name: str, content: bytes
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    head = (out / name).read_bytes().splitlines(keepends=True)[0]
    row = b",".join(content.split(b",")[: head.count(b",") + 1])
    (out / name).write_bytes(head + (row if row.endswith(b"\n") else row + b"\n"))
    with pytest.raises(DataError, match=f"{out / name} is damaged"):
        run(recipe, "epochs=2", resume=True)
