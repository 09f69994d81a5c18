"""Losses, optimizers and schedules that are not ours, without a training (tier: no process)."""

from __future__ import annotations

from typing import Any

import monai.losses
import pytest
import torch
from torch.optim import lr_scheduler

from hyperslab.checkpoint.run_state import DataCard, Position
from hyperslab.errors import RecipeError
from hyperslab.formats.targets import Parameters
from hyperslab.recipe.instantiate import A_LOSS, Maker
from hyperslab.recipe.load import recipe_of_values, torch_classes
from hyperslab.recipe.section import TargetSection
from hyperslab.train.network import check_output
from hyperslab.train.objective import LossOfLabels, with_fitting_labels
from hyperslab.train.optimizer import build_optimizer, build_schedule
from tests.train.scans import CLASSES

SCANS = DataCard((1, 16, 16, 16), (1, 16, 16, 16), CLASSES, Parameters.normalised(()))
NUMBERS = DataCard((1, 8, 8, 8), (1, 8, 8, 8), (), Parameters.normalised(("a", "b")))


def soft_dice(prediction: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    p = prediction.softmax(1)
    shares = 2 * (p * codes).sum((2, 3, 4)) / (p.sum((2, 3, 4)) + codes.sum((2, 3, 4)))
    return 1 - shares.mean()


def numbers(classes: int) -> torch.Tensor:
    return torch.arange(classes).view(1, -1, 1, 1, 1)


def dice_without_background(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, y = p.softmax(1)[:, 1:], y[:, 1:]
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


FORMS: dict[str, tuple[Any, str]] = {
    "torch": (torch.nn.CrossEntropyLoss(), "classes (N, D, H, W)"),
    "MONAI": (monai.losses.DiceLoss(to_onehot_y=True, softmax=True), "classes (N, 1, D, H, W)"),
    "one-hot": (monai.losses.DiceLoss(softmax=True), "one-hot codes (N, C, D, H, W)"),
    "a channel a class": (torch.nn.BCEWithLogitsLoss(), "one-hot codes (N, C, D, H, W)"),
    "focal": (monai.losses.FocalLoss(to_onehot_y=True), "classes (N, 1, D, H, W)"),
    "codes that are multiplied": (
        lambda p, y: -(p.softmax(1) * y).sum(),
        "one-hot codes (N, C, D, H, W)",
    ),
    "volumes of classes": (
        lambda p, y: (p.softmax(1).sum((2, 3, 4)) - y.sum((2, 3, 4))).abs().mean(),
        "one-hot codes (N, C, D, H, W)",
    ),
    "codes by broadcasting": (soft_dice, "one-hot codes (N, C, D, H, W)"),
    "MONAI's by broadcasting": (
        monai.losses.SoftDiceclDiceLoss(iter_=1),
        "one-hot codes (N, C, D, H, W)",
    ),
    "distances of classes": (
        lambda p, y: (p.softmax(1) * (y - numbers(p.shape[1])).abs()).sum(1).mean(),
        "classes (N, 1, D, H, W)",
    ),
    "compared": (lambda p, y: (p[:, 1:2] * (y == 1)).mean(), "classes (N, 1, D, H, W)"),
    "a mask": (lambda p, y: (p[:, 1:2].sigmoid() * y).mean(), "classes (N, 1, D, H, W)"),
}


@pytest.mark.parametrize(("loss", "form"), FORMS.values(), ids=FORMS)
def test_a_loss_gets_labels_as_it_takes_them(loss: Any, form: str) -> None:
    state = torch.get_rng_state()
    found = with_fitting_labels(loss, SCANS, "loss")
    assert isinstance(found, LossOfLabels)
    assert found.form == form
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RecipeError, match="not one number"):
        with_fitting_labels(torch.nn.MSELoss(reduction="none"), NUMBERS, "loss")


def test_two_classes_without_background_are_given_codes() -> None:
    """Of class numbers nothing is left: no channel comes after their only one."""
    two = DataCard((1, 16, 16, 16), (1, 16, 16, 16), CLASSES[:2], Parameters.normalised(()))
    found = with_fitting_labels(dice_without_background, two, "loss")
    assert isinstance(found, LossOfLabels)
    assert found.form == "one-hot codes (N, C, D, H, W)"


def test_several_predictions_are_refused_in_words() -> None:
    """As MONAI's DynUNet stacks them behind the samples for deep supervision."""
    output = torch.zeros(2, 3, len(CLASSES), 16, 16, 16)
    with pytest.raises(RecipeError, match="switch deep supervision off"):
        check_output(output, (2, 1, 16, 16, 16), SCANS, "model.target Net")
    with pytest.raises(RecipeError, match="stands for"):
        check_output(output[:, 0, 1:], (2, 1, 16, 16, 16), SCANS, "model.target Net")


def test_every_loss_of_torch_that_takes_two_tensors_of_a_shape_is_taken() -> None:
    for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss"):
        made = Maker("loss", A_LOSS)(TargetSection(target=f"torch.nn.{name}"))
        assert with_fitting_labels(made, NUMBERS, "loss") is made


def optimizer_of(name: str, parameters: Any, **keys: Any) -> tuple[Any, Any]:
    values = {"data": {"path": "x", "batch_size": 1}, "output": "out"}
    recipe = recipe_of_values({**values, "optimizer": {"name": name, **keys}}, "f")
    return build_optimizer(recipe.optimizer, parameters), recipe


@pytest.mark.parametrize("name", sorted({*torch_classes("optimizer")} - {"adam", "sgd"}))
def test_every_optimizer_of_torch_is_made_by_its_short_name_or_refused(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    if name in ("lbfgs", "sparseadam"):
        with pytest.raises(RecipeError, match=r"closure|sparse gradients"):
            optimizer_of(name, parameters)
        return
    optimizer, _ = optimizer_of(name, parameters, lr=0.25)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == 0.25


ARGUMENTS: dict[str, dict[str, Any]] = {
    "steplr": {"step_size": 2},
    "multisteplr": {"milestones": [1, 2]},
    "constantlr": {"total_iters": 2},
    "exponentiallr": {"gamma": 0.5},
    "cosineannealinglr": {"T_max": "${training.epochs}"},
    "cosineannealingwarmrestarts": {"T_0": 2},
    "cycliclr": {"base_lr": 0.1, "max_lr": 0.5},
    "onecyclelr": {"max_lr": 0.5},
    "sequentiallr": {
        "milestones": [2],
        "schedulers": [
            {"target": "torch.optim.lr_scheduler.LinearLR"},
            {"target": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
        ],
    },
    "chainedscheduler": {
        "schedulers": [
            {"target": "torch.optim.lr_scheduler.ConstantLR"},
            {"target": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
        ]
    },
}


@pytest.mark.parametrize("name", sorted(torch_classes("optimizer.schedule")))
def test_every_schedule_of_torch_goes_on_where_it_was(name: str) -> None:
    """Stopped after two epochs of three steps and gone on with, rates and momenta are the same."""
    schedule = {"name": name, **ARGUMENTS.get(name, {})}

    def made() -> tuple[Any, Any]:
        parameters = [torch.nn.Parameter(torch.ones(2))]
        optimizer, recipe = optimizer_of("adamw", parameters, lr=0.25, schedule=schedule)
        built = build_schedule(recipe.optimizer, optimizer, 3, epochs=4)
        return optimizer, built

    if name in ("lambdalr", "multiplicativelr"):
        with pytest.raises(RecipeError, match="takes a function"):
            made()
        return

    def rates(optimizer: Any, built: Any, epochs: int) -> list[tuple[float, float]]:
        """With which each step is taken."""
        found = []
        for _ in range(epochs):
            for _ in range(3):
                group = optimizer.param_groups[0]
                found.append((group["lr"], group["betas"][0]))
                optimizer.step()
                built.step()
            built.end_epoch({"validation_loss": 1.0})
        return found

    whole = rates(*made(), 4)
    assert name == "reducelronplateau" or len(set(whole)) > 1
    optimizer, built = made()
    before = rates(optimizer, built, 2)
    other, again = made()
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(built.state_dict())
    again.put_settings(Position(6, 2))
    assert before + rates(other, again, 2) == whole
    assert issubclass(type(again.scheduler), lr_scheduler.LRScheduler)


@pytest.mark.parametrize("before", ["none", "steplr", "cycliclr", "linear"])
@pytest.mark.parametrize("now", ["none", "cosineannealinglr", "multisteplr", "linear"])
def test_a_changed_schedule_goes_on_as_if_it_had_always_been_there(before: str, now: str) -> None:
    """Whatever the one before was, and whether that counted steps or epochs."""

    def made(name: str) -> tuple[Any, Any]:
        parameters = [torch.nn.Parameter(torch.ones(2))]
        schedule = None if name == "none" else {"name": name, **ARGUMENTS.get(name, {})}
        optimizer, recipe = optimizer_of("adamw", parameters, lr=0.25, schedule=schedule)
        return optimizer, build_schedule(recipe.optimizer, optimizer, 3, epochs=4)

    def train(optimizer: Any, built: Any, epochs: int) -> list[float]:
        for _ in range(epochs):
            for _ in range(3):
                optimizer.step()
                built.step()
            built.end_epoch({"validation_loss": 1.0})
        return [optimizer.param_groups[0]["lr"]]

    optimizer, built = made(before)
    train(optimizer, built, 2)
    other, again = made(now)
    other.load_state_dict(optimizer.state_dict())
    again.changed = True
    again.load_state_dict(built.state_dict())
    again.put_settings(Position(6, 2))
    always = made(now)
    train(*always, 2)
    for _ in range(3):
        rate, expected = other.param_groups[0]["lr"], always[0].param_groups[0]["lr"]
        assert rate == pytest.approx(expected)
        train(other, again, 1)
        train(*always, 1)


def test_numbers_that_a_schedule_does_not_keep_are_not_ignored() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    schedule = {"name": "cycliclr", **ARGUMENTS["cycliclr"]}
    optimizer, recipe = optimizer_of("adamw", parameters, lr=0.25, schedule=schedule)
    built = build_schedule(recipe.optimizer, optimizer, 3, epochs=4)
    again = build_schedule(recipe.optimizer, optimizer, 3, epochs=4)
    again.changed = True
    again.load_state_dict(built.state_dict())
    with pytest.raises(RecipeError, match="CyclicLR has no formula for the rate at its step 6"):
        again.put_settings(Position(6, 2))
