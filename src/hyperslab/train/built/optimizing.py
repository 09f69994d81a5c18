"""The optimizer and the schedule of a recipe, or what a program has handed in."""

from __future__ import annotations

import torch

from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import Recipe
from hyperslab.train.optimizers import build_optimizer, build_schedule, check_steps
from hyperslab.train.parts.given import Given
from hyperslab.train.parts.schedules import RateSchedule


def optimizer_and_schedule(
    recipe: Recipe, model: torch.nn.Module, steps_per_epoch: int, given: Given
) -> tuple[torch.optim.Optimizer, RateSchedule]:
    """Of a parallelised network.

    Raises:
        RecipeError: the network has no parameter to train, or the optimizer that is given another
            network's; or see `check_steps`, `build_optimizer` and `build_schedule`.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(f"{type(model).__name__} has no parameters that can be trained")
    optimizer = given.optimizer or build_optimizer(recipe.optimizer, model.parameters())
    if given.optimizer is not None:
        check_steps(type(optimizer), f"the optimizer ({type(optimizer).__name__})")
        _check_parameters(optimizer, model)
    schedule = build_schedule(
        recipe.optimizer,
        optimizer,
        steps_per_epoch,
        epochs=recipe.epochs,
        trusted=recipe.trusted,
        given=given.schedule,
    )
    return optimizer, schedule


def _check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in own for parameter in held)
    if strangers:
        raise RecipeError(
            f"{strangers} of the {len(held)} parameters that the optimizer holds are none of the "
            f"network's ({type(model).__name__}), so they would not be trained\n    make it from "
            "the parameters of the network that you hand in"
        )
