"""The optimizer of a recipe and its learning rate: one function and one line in a table each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hyperslab.errors import RecipeError
from hyperslab.larc import scale_by_norms
from hyperslab.recipe.choices import choose
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
from hyperslab.recipe.targets.instantiate import AN_OPTIMIZER, Maker, imported
from hyperslab.train.parts.schedules import RateSchedule, schedule_from_target, schedule_given

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


def _from_target(config: TargetOptimizer, parameters: Weights) -> torch.optim.Optimizer:
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
    kind = imported(str(config.target), "optimizer.target")
    check_steps(kind, f"optimizer.target {config.target}")


def check_steps(kind: Any, name: str) -> None:
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
    "target": _from_target,
}
"""By ``optimizer.name``; each takes its section of the recipe and the weights."""


def build_schedule(
    config: AnyOptimizer,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int = 1,
    trusted: frozenset[str] = frozenset(),
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
            trusted=trusted,
        )

    def factor(step: int) -> float:
        return factor_at(schedule, step / steps_per_epoch)

    return RateSchedule(optimizer, LambdaLR(optimizer, factor), "step")


def settings_of_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its learning rate, betas and the like, of every group of parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def factor_at(schedule: AnySchedule, epoch: float) -> float:
    """What multiplies the learning rate after so many epochs, which need not be whole.

    A warm-up grows linearly from zero to what the schedule says there.

    Raises:
        RecipeError: `SCHEDULES` has no such name.
    """
    assert not isinstance(schedule, TargetSchedule)
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
