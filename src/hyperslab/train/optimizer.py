"""Makes the optimizer of a recipe and its learning-rate schedule, or takes a program's own.

What there is to choose from is declared in `hyperslab.recipe.optimizer` and `schedule`.
`RateSchedule` says when a schedule moves on, and how it is resumed with other numbers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hyperslab.checkpoint.run_state import Position
from hyperslab.errors import RecipeError
from hyperslab.models.larc import scale_by_norms
from hyperslab.recipe.optimizer import OptimizerSection, Weights, check_optimizer_class
from hyperslab.recipe.schedule import SCHEDULES_BY_STEP, Every
from hyperslab.recipe.schema import Recipe
from hyperslab.train.network import UserObjects

GIVEN = "given"
"""In a schedule's state: the settings that its optimizer was given, as `RateSchedule.given`."""


class RateSchedule:
    """A scheduler of torch's, or none, and when it moves on.

    ``every``: after each "step" of the optimizer or each "epoch". ``given`` are the settings of the
    optimizer's groups before the first step, as the recipe or the program says them. A scheduler
    may move others of them than the rate: OneCycleLR and CyclicLR move the momentum. ``changed``
    says, before it is loaded, that the state is that of another schedule or of other numbers.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, every: Every) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.every = every
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.given = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self.changed = False
        self.fresh: dict[str, Any] = {}
        self.moved: list[set[str]] = [set() for _ in self.given]

    def step(self) -> None:
        if self.scheduler is not None and self.every == "step":
            self.scheduler.step()

    def end_epoch(self, measured: dict[str, float | None]) -> None:
        """Move on after an epoch, given what its validation has ``measured``.

        Raises:
            RecipeError: the schedule follows the validation loss, and there is none.
        """
        if self.scheduler is None or self.every != "epoch":
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        loss = measured["validation_loss"]
        if loss is None:
            raise RecipeError(
                "ReduceLROnPlateau follows the validation loss, but there are no samples to "
                "validate on: data.fractions, data.validation"
            )
        self.scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        if self.scheduler is None:
            return {}
        state: dict[str, Any] = self.scheduler.state_dict()
        plain = {key: value for key, value in state.items() if not callable(value)}
        return {**plain, GIVEN: [{k: v for k, v in g.items() if k != "lr"} for g in self.given]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what the recipe says now stays to be compared by `put_settings`."""
        if self.scheduler is None:
            return
        self.fresh = {**vars(self.scheduler)}
        rest = {**state}
        then = rest.pop(GIVEN, None)  # earlier versions did not write it
        if then is not None:
            pairs = zip(self.given, then, strict=True)
            self.moved = [{k for k in now if k in old and now[k] == old[k]} for now, old in pairs]
        for keys in self.moved:
            keys.update(("lr", "initial_lr"))
        if not self.changed:
            self.scheduler.load_state_dict(rest)
            self.changed = self._numbers(vars(self.scheduler)) != self._numbers(self.fresh)

    def put_settings(self, at: Position) -> None:
        """Give the optimizer settings in place of those that came with a checkpoint.

        Those that are not said otherwise than then stay as the schedule has moved them. The rate is
        what the schedule makes of the new one, by its own new numbers, at its step.

        Raises:
            RecipeError: rate or numbers have changed, and torch has no formula for this schedule.
        """
        scheduler = self.scheduler
        groups = self.optimizer.param_groups
        before = [group.get("initial_lr") for group in groups]
        for group, given, moved in zip(groups, self.given, self.moved, strict=True):
            group.update({key: value for key, value in given.items() if key not in moved})
        if scheduler is None:
            return
        rates = [given["initial_lr"] for given in self.given]
        if self.changed:  # the state may be of another class, and count something else
            vars(scheduler).clear()
            vars(scheduler).update(self.fresh)
            scheduler.last_epoch = at.step if self.every == "step" else at.epoch
            scheduler._step_count = scheduler.last_epoch + 1
        if isinstance(scheduler, LambdaLR):  # its numbers are within the functions
            step = scheduler.last_epoch
            factors = [function(step) for function in scheduler.lr_lambdas]
            now = [first * factor for first, factor in zip(rates, factors, strict=True)]
        elif rates == before and not self.changed:
            return
        elif hasattr(scheduler, "_get_closed_form_lr"):
            scheduler.base_lrs = rates
            now = scheduler._get_closed_form_lr()
        else:
            raise RecipeError(
                f"--resume: optimizer.learning_rate or optimizer.schedule has changed, but "
                f"{type(scheduler).__name__} has no formula for the rate at its {self.every} "
                f"{scheduler.last_epoch}\n    change it back, or start another run"
            )
        scheduler.base_lrs = rates
        for group, first, rate in zip(groups, rates, now, strict=True):
            group.update(initial_lr=first, lr=rate)
        scheduler._last_lr = [group["lr"] for group in groups]

    def _numbers(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers that the scheduler was made with, of those that it keeps."""
        names = inspect.signature(type(self.scheduler)).parameters
        return {n: state[n] for n in names if n in state and n not in ("optimizer", "last_epoch")}


def build_optimizer(config: OptimizerSection, weights: Weights) -> Optimizer:
    """Make the recipe's optimizer; with LARC, every step begins by it. Raises as its section."""
    optimizer = config.build(weights)
    larc = config.larc
    if larc is not None:

        def scale(optimizer: Optimizer, *_: Any) -> None:
            weights = (p for group in optimizer.param_groups for p in group["params"])
            scale_by_norms(weights, trust=larc.trust, otherwise=larc.otherwise)

        # A hook and no optimizer of our own: checkpoints are those of torch's.
        optimizer.register_step_pre_hook(scale)
    return optimizer


def build_schedule(
    config: OptimizerSection,
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int = 1,
    given: LRScheduler | None = None,
) -> RateSchedule:
    """Make the recipe's schedule, or take the scheduler that is ``given``.

    That one moves on after each epoch, or each step where torch's does.

    Raises:
        RecipeError: the one that is given ends before the training; or as the schedule's section.
    """
    if given is not None:
        moves_on: Every = "step" if type(given).__name__ in SCHEDULES_BY_STEP else "epoch"
        end = getattr(given, "total_steps", None)
        steps = epochs * steps_per_epoch
        if moves_on == "step" and end is not None and end < steps:
            raise RecipeError(
                f"schedule: {type(given).__name__} moves on after each step and ends after {end}, "
                f"but the training has {steps}\n    make it with total_steps={steps}"
            )
        return RateSchedule(optimizer, given, moves_on)
    if config.schedule is None:
        return RateSchedule(optimizer, None, "epoch")
    scheduler, every = config.schedule.build(
        optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch
    )
    return RateSchedule(optimizer, scheduler, every)


def optimizer_and_schedule(
    recipe: Recipe, model: torch.nn.Module, steps_per_epoch: int, given: UserObjects
) -> tuple[Optimizer, RateSchedule]:
    """Build the optimizer and the schedule of a parallelised network.

    Raises:
        RecipeError: the network has no parameter to train, or the optimizer that is given another
            network's; or see `check_optimizer_class`, `build_optimizer` and `build_schedule`.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(f"{type(model).__name__} has no parameters that can be trained")
    optimizer = given.optimizer or build_optimizer(recipe.optimizer, model.parameters())
    if given.optimizer is not None:
        check_optimizer_class(type(optimizer), f"the optimizer ({type(optimizer).__name__})")
        own = {id(parameter) for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = sum(id(parameter) not in own for parameter in held)
        if strangers:
            raise RecipeError(
                f"{strangers} of the {len(held)} parameters that the optimizer holds are not the "
                f"network's ({type(model).__name__}), so it would not train the network\n    make "
                "it from the parameters of the network that you pass"
            )
    schedule = build_schedule(
        recipe.optimizer, optimizer, steps_per_epoch, epochs=recipe.epochs, given=given.schedule
    )
    return optimizer, schedule
