"""Makes the optimizer of a recipe and its learning-rate schedule.

One function and one line of a table each: `OPTIMIZERS` by ``optimizer.name``, `SCHEDULES` by
``optimizer.schedule.name``. Torch's own, named by target or handed in by a program, go the same
way. `RateSchedule` says when a schedule moves on, and how it is resumed with other numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hyperslab.errors import RecipeError
from hyperslab.models.larc import scale_by_norms
from hyperslab.recipe.instantiate import A_SCHEDULE, AN_OPTIMIZER, Maker, imported
from hyperslab.recipe.optimizer import (
    AdamSection,
    AnyOptimizer,
    AnySchedule,
    LarcSection,
    LinearSchedule,
    PolynomialSchedule,
    SGDSection,
    StepSchedule,
    TargetOptimizer,
    TargetSchedule,
)
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import choose
from hyperslab.train.network import UserObjects

SCHEDULES_BY_STEP = ("OneCycleLR", "CyclicLR")
"""Schedules of torch's that are meant to move on after every step."""

SCHEDULES_OF_FUNCTIONS = ("LambdaLR", "MultiplicativeLR")


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
        """Return plain values."""
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
        """Return the numbers that the scheduler was made with."""
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
    """Return a program's scheduler for a training of so many steps.

    Raises:
        RecipeError: it ends before the training.
    """
    every = "step" if type(scheduler).__name__ in SCHEDULES_BY_STEP else "epoch"
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
) -> RateSchedule:
    """Torch's scheduler that a recipe names.

    Raises:
        RecipeError: as `Maker`; or it takes a function, which a recipe cannot hold.
    """
    key = "optimizer.schedule"
    assert config.target is not None
    kind = imported(config.target, f"{key}.target", config.trust)
    name = getattr(kind, "__name__", "")
    if name in SCHEDULES_OF_FUNCTIONS:
        raise RecipeError(
            f"{key}.target {config.target} takes a function, which a recipe cannot hold\n"
            "    name a class of your own derived from LRScheduler, or hand one to hyperslab.fit"
        )
    every = config.every or ("step" if name in SCHEDULES_BY_STEP else "epoch")
    total = epochs * steps_per_epoch
    references = {
        "training.epochs": epochs,
        "training.steps": total,
        "training.steps_per_epoch": steps_per_epoch,
    }
    if name == "OneCycleLR" and not {"total_steps", "epochs"} & config.arguments.keys():
        arguments = {**config.arguments, "total_steps": total if every == "step" else epochs}
        config = config.model_copy(update={"arguments": arguments})
    made = Maker(key, A_SCHEDULE, (optimizer,), references)(config)
    return RateSchedule(optimizer, made, every)


def check_schedule(recipe: Recipe) -> None:
    """Look at a schedule's target and its arguments; nothing is made."""
    config = recipe.optimizer.schedule
    if isinstance(config, TargetSchedule):
        Maker("optimizer.schedule", A_SCHEDULE, (None,)).check(config)


Weights = Iterable[torch.nn.Parameter]


def build_optimizer(config: AnyOptimizer, parameters: Weights) -> torch.optim.Optimizer:
    """Torch's own optimizer with the recipe's numbers; with LARC, every step begins by it.

    Raises:
        RecipeError: `OPTIMIZERS` has no such name; or of a target what `Maker` raises.
    """
    optimizer = choose(OPTIMIZERS, config.name, "optimizer.name")(config, parameters)
    if config.larc is not None:
        _control_rates(optimizer, config.larc)
    return optimizer


def _control_rates(optimizer: torch.optim.Optimizer, config: LarcSection) -> None:
    """A hook and no optimizer of our own: checkpoints are those of torch's."""

    def scale(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = (p for group in optimizer.param_groups for p in group["params"])
        scale_by_norms(weights, trust=config.trust, otherwise=config.otherwise)

    optimizer.register_step_pre_hook(scale)


def _adam(config: AdamSection, parameters: Weights) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def _sgd(config: SGDSection, parameters: Weights) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config.learning_rate, momentum=config.momentum)


def _optimizer_from_target(config: TargetOptimizer, parameters: Weights) -> torch.optim.Optimizer:
    check_optimizer(config)
    optimizer: torch.optim.Optimizer = Maker("optimizer", AN_OPTIMIZER, ([*parameters],))(
        _with_rate(config)
    )
    return optimizer


def check_optimizer(config: AnyOptimizer) -> None:
    """Look at a target and its arguments, and make nothing.

    Raises:
        RecipeError: as `Maker`; or it is one that cannot train a network here.
    """
    if not isinstance(config, TargetOptimizer):
        return
    Maker("optimizer", AN_OPTIMIZER, ([],)).check(_with_rate(config))
    kind = imported(str(config.target), "optimizer.target", config.trust)
    check_optimizer_class(kind, f"optimizer.target {config.target}")


def check_optimizer_class(kind: Any, name: str) -> None:
    """Refuse an optimizer that cannot train a network here.

    Raises:
        RecipeError: it needs a closure, or sparse gradients.
    """
    step = inspect.signature(kind.step).parameters if hasattr(kind, "step") else {}
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:
        raise RecipeError(
            f"{name} calls the network several times a step (it needs a "
            "closure)\n    take one that makes one step of one gradient: AdamW, SGD, ..."
        )
    if kind is torch.optim.SparseAdam:
        raise RecipeError(
            f"{name} takes sparse gradients only, which volumes do not give\n"
            "    take torch.optim.Adam"
        )


def _with_rate(config: TargetOptimizer) -> TargetOptimizer:
    if config.learning_rate is None:
        return config
    return config.model_copy(update={"arguments": {"lr": config.learning_rate, **config.arguments}})


OPTIMIZERS: dict[str, Callable[[Any, Weights], torch.optim.Optimizer]] = {
    "adam": _adam,
    "sgd": _sgd,
    "target": _optimizer_from_target,
}
"""Builders by ``optimizer.name`` take a section of the recipe and the weights."""


def build_schedule(
    config: AnyOptimizer,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int = 1,
    given: LRScheduler | None = None,
) -> RateSchedule:
    """Set the learning rate before every step: the recipe's own are functions of the epochs done.

    A scheduler that is ``given`` moves on after each epoch, or each step where torch's does.

    Raises:
        RecipeError: `SCHEDULES` has no such name; or of a target what `schedule_from_target` does.
    """
    schedule = config.schedule
    if given is not None:
        return schedule_given(given, optimizer, epochs * steps_per_epoch)
    if schedule is None:
        return RateSchedule(optimizer, None, "epoch")
    if isinstance(schedule, TargetSchedule):
        return schedule_from_target(
            schedule,
            optimizer,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
        )

    def factor(step: int) -> float:
        return factor_at(schedule, step / steps_per_epoch)

    return RateSchedule(optimizer, LambdaLR(optimizer, factor), "step")


def settings_of_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its learning rate, betas and the like, of every group of parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def factor_at(schedule: AnySchedule, epoch: float) -> float:
    """Return the factor of the learning rate after so many epochs, which need not be whole.

    A warm-up grows linearly from zero to what the schedule says there.

    Raises:
        RecipeError: `SCHEDULES` has no such name.
    """
    assert not isinstance(schedule, TargetSchedule)
    warm = min(epoch / schedule.warmup, 1.0) if schedule.warmup else 1.0
    return warm * choose(SCHEDULES, schedule.name, "optimizer.schedule.name")(schedule, epoch)


def _linear_factor(schedule: LinearSchedule, epoch: float) -> float:
    """Return 1 - (1 - factor) * min(epoch / epochs, 1) (Oyama et al. 2020, section IV).

    So the rate decays to ``factor`` of the first one in ``epochs``.
    """
    return 1 - (1 - schedule.factor) * min(epoch / schedule.epochs, 1.0)


def _polynomial_factor(schedule: PolynomialSchedule, epoch: float) -> float:
    """Return (1 - factor) (1 - min(epoch / epochs, 1))^power + factor.

    Times the learning rate η_0, with power 1, that is (η_0 - η_min)(1 - t / t_decay) + η_min
    (Mathuriya et al. 2018, section III-B), as ``factor`` is η_min / η_0.
    """
    left = 1 - min(epoch / schedule.epochs, 1.0)
    return float((1 - schedule.factor) * left**schedule.power + schedule.factor)


def _steps_factor(schedule: StepSchedule, epoch: float) -> float:
    """Return the factor of the latest epoch that is reached, 1 before the first."""
    reached = [start for start in schedule.at if start <= epoch]
    return schedule.at[max(reached)] if reached else 1.0


SCHEDULES: dict[str, Callable[[Any, float], float]] = {
    "linear": _linear_factor,
    "polynomial": _polynomial_factor,
    "steps": _steps_factor,
}
"""Factors by ``optimizer.schedule.name`` take a section of the recipe and the epoch."""


def optimizer_and_schedule(
    recipe: Recipe, model: torch.nn.Module, steps_per_epoch: int, given: UserObjects
) -> tuple[torch.optim.Optimizer, RateSchedule]:
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
        _check_own_parameters(optimizer, model)
    schedule = build_schedule(
        recipe.optimizer,
        optimizer,
        steps_per_epoch,
        epochs=recipe.epochs,
        given=given.schedule,
    )
    return optimizer, schedule


def _check_own_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in own for parameter in held)
    if strangers:
        raise RecipeError(
            f"{strangers} of the {len(held)} parameters that the optimizer holds are none of the "
            f"network's ({type(model).__name__}), so they would not be trained\n    make it from "
            "the parameters of the network that you hand in"
        )
