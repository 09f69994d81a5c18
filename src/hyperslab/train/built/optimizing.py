"""The optimizer and the schedule of a recipe, or what a program has handed in."""

from __future__ import annotations

import torch

from hyperslab.recipe.schema import Recipe
from hyperslab.train.optimizers import build_optimizer, build_schedule
from hyperslab.train.parts.given import Given
from hyperslab.train.parts.schedules import RateSchedule


def optimizer_and_schedule(
    recipe: Recipe, model: torch.nn.Module, steps_per_epoch: int, given: Given
) -> tuple[torch.optim.Optimizer, RateSchedule]:
    """Of a parallelised network; raises what `build_optimizer` and `build_schedule` do."""
    optimizer = given.optimizer or build_optimizer(recipe.optimizer, model.parameters())
    schedule = build_schedule(
        recipe.optimizer,
        optimizer,
        steps_per_epoch,
        epochs=recipe.epochs,
        trusted=recipe.trusted,
        given=given.schedule,
    )
    return optimizer, schedule
