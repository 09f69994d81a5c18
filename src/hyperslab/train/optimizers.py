"""The optimizer of a recipe and the course of its learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from hyperslab.recipe.schema import SGD, Adam, Linear, Steps


def build_optimizer(
    config: Adam | SGD, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Torch's own optimizer with the recipe's numbers."""
    if isinstance(config, Adam):
        return torch.optim.Adam(
            parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps
        )
    return torch.optim.SGD(parameters, lr=config.learning_rate, momentum=config.momentum)


def build_schedule(
    config: Adam | SGD, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> LambdaLR:
    """Set the learning rate before every step, as a function of the epochs done so far."""
    return LambdaLR(optimizer, lambda step: factor_at(config.schedule, step / steps_per_epoch))


def factor_at(schedule: Linear | Steps, epoch: float) -> float:
    """What multiplies the learning rate after so many epochs, which need not be whole.

    Linear: 1 - (1 - factor) * min(epoch / epochs, 1), so it decays to ``factor`` of the first
    rate in ``epochs`` (Oyama et al. 2020, section IV). A warm-up grows linearly from zero to
    what the schedule says there.
    """
    warm = min(epoch / schedule.warmup, 1.0) if schedule.warmup else 1.0
    if isinstance(schedule, Linear):
        return warm * (1 - (1 - schedule.factor) * min(epoch / schedule.epochs, 1.0))
    reached = [start for start in schedule.at if start <= epoch]
    return warm * (schedule.at[max(reached)] if reached else 1.0)
