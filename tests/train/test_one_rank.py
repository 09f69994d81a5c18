"""One rank differs from the others: its loss, its speed, its data (tier: a few gloo ranks)."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import hyperslab as hs
from hyperslab.checkpoint.retention import latest
from hyperslab.errors import CheckpointError, DivergedError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.network import UserObjects
from hyperslab.train.run import train
from tests.ranks import RankError, run_ranks
from tests.train.universes import losses

RECIPE: dict[str, Any] = {
    "model": {"name": "unet3d", "channels": 2, "levels": 2},
    "data": {
        "synthetic": {"width": 8, "samples": 6, "channels": 1, "classes": 2},
        "batch_size": 1,
    },
    "loss": "cross_entropy",
    "kernels": "fixed",
    "device": "cpu",
    "timeout": 60,
    "epochs": 2,
    "grid": {"depth": 2},
    "checkpoint": {"every_steps": 1, "keep": 2},
}

Loss = Callable[[Any, Any], torch.Tensor]


class OddLoss:
    """Cross entropy, but on rank 1 in one training step or in one validation."""

    def __init__(self, odd: str, number: int) -> None:
        self.odd = odd
        self.number = number
        self.counts = {True: 0, False: 0}

    def __call__(self, prediction: Any, labels: Any) -> torch.Tensor:
        loss = F.cross_entropy(prediction, labels)
        if not isinstance(prediction, hs.Sharded):  # which form of labels does it take?
            return loss
        training = torch.is_grad_enabled()
        self.counts[training] += 1
        if prediction.grid.rank != 1 or self.counts[training] != self.number:
            return loss
        if self.odd == "loss" and training:
            return loss * math.nan
        if self.odd == "gradient" and training:
            return loss + (0 * prediction.local).sqrt().sum()  # 0, and its slope is infinite
        if self.odd == "validation" and not training:
            return loss * math.nan
        return loss


def write(folder: Path, **keys: Any) -> Path:
    recipe = folder / "own.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "output": str(folder / "run"), **keys}))
    return recipe


def train_with(recipe: Path, loss: Loss) -> str:
    """What it raises."""
    try:
        train(load_recipe(recipe), given=UserObjects(loss=loss))
    except (DivergedError, CheckpointError) as error:
        return str(error)
    return ""


def test_a_loss_that_is_no_number_on_one_rank_ends_all_and_names_it(tmp_path: Path) -> None:
    for words in run_ranks(2, train_with, write(tmp_path), OddLoss("loss", 3)):
        assert "the loss is not a finite number in step 3 (epoch 1); the first is rank 1" in words
        assert "are from before" in words
    newest = latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "step-00000002"


def test_a_first_step_that_diverges_speaks_of_no_checkpoints(tmp_path: Path) -> None:
    for words in run_ranks(2, train_with, write(tmp_path), OddLoss("loss", 1)):
        assert "the loss is not a finite number in step 1" in words
        assert "checkpoints" not in words


def test_weights_that_are_no_numbers_are_never_written(tmp_path: Path) -> None:
    """The loss of the step that made them was one, and that of the next comes too late."""
    recipe = write(tmp_path)
    for words in run_ranks(2, train_with, recipe, OddLoss("gradient", 3)):
        assert "a weight is not a finite number in step 3 (epoch 1)" in words
    newest = latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "step-00000002"


def test_a_validation_that_is_no_number_on_one_rank_is_none_on_any(tmp_path: Path) -> None:
    """Ranks that took another one for the best would part."""
    assert run_ranks(2, train_with, write(tmp_path), OddLoss("validation", 1)) == ["", ""]
    rows = (tmp_path / "run" / "epochs.csv").read_text().splitlines()
    column = rows[0].split(",").index("validation_loss")
    first, second = (row.split(",")[column] for row in rows[1:])
    assert first == "nan"
    assert float(second) > 0
    best = os.readlink(tmp_path / "run" / "checkpoints" / "best")
    assert best == "step-00000008"


class SlowLoss:
    """Takes ten times as long as a step on rank 1."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, prediction: Any, labels: Any) -> torch.Tensor:
        odd = isinstance(prediction, hs.Sharded) and prediction.grid.rank == 1
        time.sleep(self.seconds * odd)
        return F.cross_entropy(prediction, labels)


def test_a_slow_rank_changes_nothing(tmp_path: Path) -> None:
    found = []
    for seconds in (0.0, 0.2):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        assert run_ranks(2, train_with, write(folder, epochs=1), SlowLoss(seconds)) == ["", ""]
        found.append(losses(folder / "run"))
    assert len(found[0]) == 4
    assert found[0] == found[1]


class OneWay(torch.nn.Module):
    """Sends in one direction only: even kernels with more padding behind, before any sum."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        shapes = zip((1, 2, 2, 2, 2), (2, 2, 2, 2, 2), strict=True)
        self.layers = torch.nn.Sequential(
            *(torch.nn.Conv3d(i, o, (2, 1, 1), padding="same") for i, o in shapes)
        )

    def forward(self, x: Any) -> Any:
        if isinstance(x, hs.Sharded) and x.grid.rank == 0:  # it receives
            time.sleep(self.seconds)
        return self.layers(x)


def train_one_way(recipe: Path, seconds: float) -> None:
    torch.manual_seed(1)
    train(load_recipe(recipe), given=UserObjects(model=OneWay(seconds)))


def test_a_slow_rank_loses_none_of_the_messages_that_wait_for_it(tmp_path: Path) -> None:
    """More are sent to it than there are places for, while it has not begun."""
    found = []
    for seconds in (0.0, 0.2):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        run_ranks(2, train_one_way, write(folder, epochs=1), seconds)
        found.append(losses(folder / "run"))
    assert len(found[0]) == 4
    assert found[0] == found[1]


def uneven_loop(steps: list[int]) -> None:
    """A program's own loop, which is shorter on one rank, and is all that it does."""
    grid = hs.Grid(data=2)
    model = hs.parallelize(torch.nn.Conv3d(1, 2, 3, padding=1), grid)
    for number in range(steps[grid.rank]):
        torch.manual_seed(number)
        model(hs.shard(torch.randn(2, 1, 4, 4, 4), grid)).square().mean().backward()
    os._exit(0)


def test_a_loop_that_is_shorter_on_one_rank_ends_the_others_with_its_name() -> None:
    """`hs.open` has as many mini-batches for every rank, a loader of somebody's may not."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, uneven_loop, [3, 2])
    caught.match("rank 1: died with exit code 0")
    caught.match(r"CommError: rank 0 lost contact with rank 1 during .*: it has ended")


def full_disk(recipe: Path, step: str) -> str:
    """The disk has no room for that checkpoint of rank 1."""
    sync = os.fsync

    def full(descriptor: int) -> None:
        if step in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        if hs.Grid(depth=2).rank == 1:
            patch.setattr(os, "fsync", full)
        return train_with(recipe, F.cross_entropy)


def go_on(recipe: Path) -> None:
    train(load_recipe(recipe), resume=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_disk_that_fills_behind_the_steps_ends_all_and_leaves_what_was_there(
    tmp_path: Path,
) -> None:
    every = {"every_steps": 1, "keep": 2, "background": True}
    recipe = write(tmp_path, epochs=1, checkpoint=every)
    folder = tmp_path / "run" / "checkpoints"
    for words in run_ranks(2, full_disk, recipe, "step-00000003"):
        assert f"cannot write the checkpoint {folder / 'step-00000003'}: No space left" in words
        assert "(rank 1)" in words
    assert {*os.listdir(folder)} == {"best", "step-00000001", "step-00000002"}
    run_ranks(2, go_on, recipe)
    assert len(losses(tmp_path / "run")) == 4
