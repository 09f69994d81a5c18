"""The optimizer of a recipe and its learning rate: one function and one line in a table each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from hyperslab.larc import scale_by_norms
from hyperslab.recipe.choices import choose
from hyperslab.recipe.optimizer import (
    AdamSection,
    AnySchedule,
    LarcSection,
    LinearSchedule,
    OptimizerSection,
    PolynomialSchedule,
    SGDSection,
    StepSchedule,
)

Weights = Iterable[torch.nn.Parameter]


def build_optimizer(config: AdamSection | SGDSection, parameters: Weights) -> torch.optim.Optimizer:
    """Torch's own optimizer with the recipe's numbers; with LARC, every step begins by it.

    Raises:
        RecipeError: `OPTIMIZERS` has no such name.
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


OPTIMIZERS: dict[str, Callable[[Any, Weights], torch.optim.Optimizer]] = {
    "adam": _adam,
    "sgd": _sgd,
}
"""By ``optimizer.name``; each takes its section of the recipe and the weights."""


def build_schedule(
    config: OptimizerSection, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> LambdaLR:
    """Set the learning rate before every step, as a function of the epochs done so far."""
    return LambdaLR(optimizer, lambda step: factor_at(config.schedule, step / steps_per_epoch))


def settings_of_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its learning rate, betas and the like, of every group of parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def put_settings(schedule: LambdaLR, settings: list[dict[str, Any]]) -> None:
    """Give a schedule's optimizer settings in place of those that came with a checkpoint.

    The rate is what the schedule makes of it at its step.
    """
    schedule.base_lrs = [group["initial_lr"] for group in settings]
    rates = [
        first * factor(schedule.last_epoch)
        for first, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, given, rate in zip(schedule.optimizer.param_groups, settings, rates, strict=True):
        group.update(given)
        group["lr"] = rate
    schedule._last_lr = rates


def factor_at(schedule: AnySchedule, epoch: float) -> float:
    """What multiplies the learning rate after so many epochs, which need not be whole.

    A warm-up grows linearly from zero to what the schedule says there.

    Raises:
        RecipeError: `SCHEDULES` has no such name.
    """
    warm = min(epoch / schedule.warmup, 1.0) if schedule.warmup else 1.0
    return warm * choose(SCHEDULES, schedule.name, "optimizer.schedule.name")(schedule, epoch)


def _linear(schedule: LinearSchedule, epoch: float) -> float:
    """1 - (1 - factor) * min(epoch / epochs, 1) (Oyama et al. 2020, section IV).

    So the rate decays to ``factor`` of the first one in ``epochs``.
    """
    return 1 - (1 - schedule.factor) * min(epoch / schedule.epochs, 1.0)


def _polynomial(schedule: PolynomialSchedule, epoch: float) -> float:
    """(1 - factor) (1 - min(epoch / epochs, 1))^power + factor (Mathuriya et al. 2018, III-B).

    Times the learning rate η_0 that is their (η_0 - η_min)(1 - t / t_decay) + η_min, as ``factor``
    is η_min / η_0.
    """
    left = 1 - min(epoch / schedule.epochs, 1.0)
    return float((1 - schedule.factor) * left**schedule.power + schedule.factor)


def _steps(schedule: StepSchedule, epoch: float) -> float:
    """The factor of the latest epoch that is reached, 1 before the first."""
    reached = [start for start in schedule.at if start <= epoch]
    return schedule.at[max(reached)] if reached else 1.0


SCHEDULES: dict[str, Callable[[Any, float], float]] = {
    "linear": _linear,
    "polynomial": _polynomial,
    "steps": _steps,
}
"""By ``optimizer.schedule.name``; each takes its section of the recipe and the epoch."""
