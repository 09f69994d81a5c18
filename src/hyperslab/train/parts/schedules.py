"""Learning rates: the recipe's own schedules, and torch's."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import Recipe, TargetSchedule
from hyperslab.recipe.targets.instantiate import A_SCHEDULE, Maker, imported

BY_STEP = ("OneCycleLR", "CyclicLR")
"""Schedules of torch's that are meant to move on after every step."""

TAKE_FUNCTIONS = ("LambdaLR", "MultiplicativeLR")


class RateSchedule:
    """A scheduler of torch's, or none, and when it moves on.

    ``every``: after each "step" of the optimizer or each "epoch".
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, every: str) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.every = every
        self.said: dict[str, Any] = {}
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self) -> None:
        """A step of the optimizer is done."""
        if self.scheduler is not None and self.every == "step":
            self.scheduler.step()

    def end_epoch(self, measured: dict[str, float | None]) -> None:
        """An epoch is done, and this is what its validation has found.

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
        """Plain values."""
        if self.scheduler is None:
            return {}
        state: dict[str, Any] = self.scheduler.state_dict()
        return {key: value for key, value in state.items() if not callable(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the recipe's own numbers stay to be compared by `put_settings`."""
        if self.scheduler is not None:
            self.said = self._numbers()
            self.scheduler.load_state_dict(state)

    def put_settings(self, settings: list[dict[str, Any]]) -> None:
        """Give the optimizer settings in place of those that came with a checkpoint.

        The rate is what the schedule makes of the new one, by its own new numbers, at its step.

        Raises:
            RecipeError: rate or numbers have changed, and torch has no formula for this schedule.
        """
        scheduler = self.scheduler
        groups = self.optimizer.param_groups
        if isinstance(scheduler, LambdaLR):
            _put_rates(scheduler, settings)
            return
        kept = () if scheduler is None else ("lr", "initial_lr")
        before = [group.get("initial_lr") for group in groups]
        for group, given in zip(groups, settings, strict=True):
            group.update({key: value for key, value in given.items() if key not in kept})
        if scheduler is None:
            return
        rates = [given["initial_lr"] for given in settings]
        if rates == before and self._numbers() == self.said:
            return
        if not hasattr(scheduler, "_get_closed_form_lr"):
            raise RecipeError(
                f"--resume: optimizer.learning_rate or optimizer.schedule has changed, but "
                f"{type(scheduler).__name__} has no formula for the rate at its epoch "
                f"{scheduler.last_epoch}\n    put it back, or start another run"
            )
        vars(scheduler).update(self.said)
        scheduler.base_lrs = rates
        for group, first in zip(groups, rates, strict=True):
            group["initial_lr"] = first
        for group, rate in zip(groups, scheduler._get_closed_form_lr(), strict=True):
            group["lr"] = rate
        scheduler._last_lr = [group["lr"] for group in groups]

    def _numbers(self) -> dict[str, Any]:
        """Those that the scheduler was made with."""
        state = {} if self.scheduler is None else vars(self.scheduler)
        names = inspect.signature(type(self.scheduler)).parameters
        return {n: state[n] for n in names if n in state and n not in ("optimizer", "last_epoch")}


def _put_rates(scheduler: LambdaLR, settings: list[dict[str, Any]]) -> None:
    scheduler.base_lrs = [group["initial_lr"] for group in settings]
    rates = [
        first * factor(scheduler.last_epoch)
        for first, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, given, rate in zip(scheduler.optimizer.param_groups, settings, rates, strict=True):
        group.update(given)
        group["lr"] = rate
    scheduler._last_lr = rates


def schedule_given(scheduler: LRScheduler, optimizer: Optimizer, steps: int) -> RateSchedule:
    """A program's scheduler for a training of so many steps.

    Raises:
        RecipeError: it ends before the training.
    """
    every = "step" if type(scheduler).__name__ in BY_STEP else "epoch"
    end = getattr(scheduler, "total_steps", None)
    if every == "step" and end is not None and end < steps:
        raise RecipeError(
            f"schedule: {type(scheduler).__name__} moves on after each step and ends after {end}, "
            f"but the training has {steps}\n    make it with total_steps={steps}"
        )
    return RateSchedule(optimizer, scheduler, every)


def schedule_from_target(
    config: TargetSchedule,
    optimizer: Optimizer,
    *,
    epochs: int,
    steps_per_epoch: int,
    trusted: frozenset[str],
) -> RateSchedule:
    """Torch's scheduler that a recipe names.

    Raises:
        RecipeError: as `Maker`; or it takes a function, which a recipe cannot hold.
    """
    key = "optimizer.schedule"
    assert config.target is not None
    kind = imported(config.target, f"{key}.target")
    name = getattr(kind, "__name__", "")
    if name in TAKE_FUNCTIONS:
        raise RecipeError(
            f"{key}.target {config.target} takes a function, which a recipe cannot hold\n"
            "    name a class of your own derived from LRScheduler, or hand one to hyperslab.fit"
        )
    every = config.every or ("step" if name in BY_STEP else "epoch")
    total = epochs * steps_per_epoch
    references = {
        "training.epochs": epochs,
        "training.steps": total,
        "training.steps_per_epoch": steps_per_epoch,
    }
    if name == "OneCycleLR" and not {"total_steps", "epochs"} & config.arguments.keys():
        arguments = {**config.arguments, "total_steps": total if every == "step" else epochs}
        config = config.model_copy(update={"arguments": arguments})
    made = Maker(key, A_SCHEDULE, (optimizer,), references, trusted)(config)
    return RateSchedule(optimizer, made, every)


def check_schedule(recipe: Recipe) -> None:
    """Look at a schedule's target and its arguments; nothing is made."""
    config = recipe.optimizer.schedule
    if isinstance(config, TargetSchedule):
        Maker("optimizer.schedule", A_SCHEDULE, (None,), trusted=recipe.trusted).check(config)
