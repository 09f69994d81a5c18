"""The objective of a training, regression or segmentation: its loss and the validation metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from hyperslab import losses
from hyperslab.comm import Grid
from hyperslab.errors import RecipeError, UnsupportedOp
from hyperslab.metrics.confusion import count, predicted_classes, scores_of, sum_over_ranks
from hyperslab.recipe.choices import choose
from hyperslab.tensor import Sharded
from hyperslab.train.parts.given import LossFunction

LOSSES: dict[str, LossFunction] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "cross_entropy": F.cross_entropy,
    "dice": losses.dice_loss,
    "generalised_dice": losses.generalised_dice_loss,
    "focal": losses.focal_loss,
    "dice_cross_entropy": losses.dice_cross_entropy_loss,
}
"""By their names in a recipe; each is the mean over the global mini-batch."""


def named_loss(loss: str | LossFunction) -> LossFunction:
    """The loss of this name; one that is none's stays itself.

    Raises:
        RecipeError: `LOSSES` has no such name.
    """
    return choose(LOSSES, loss, "loss") if isinstance(loss, str) else loss


class MetricSums(Protocol):
    """The metrics of one pass over a split, as sums so far."""

    def add(self, prediction: Sharded, target: Sharded, loss: torch.Tensor) -> None:
        """Count a mini-batch; every rank calls it, and nobody waits."""
        ...

    def result(self) -> dict[str, float | None]:
        """By the names of `Objective.measures`; the same on every rank, which all call it."""
        ...


class Objective(Protocol):
    """The loss of a step and the metrics of a validation, "validation_loss" the first of them."""

    loss: LossFunction
    measures: tuple[str, ...]

    def metric_sums(self, grid: Grid) -> MetricSums: ...


class Regression:
    """Predict the numbers that made a volume."""

    measures: tuple[str, ...] = ("validation_loss", "validation_mae")

    def __init__(self, loss: str | LossFunction) -> None:
        self.loss = named_loss(loss)

    def metric_sums(self, grid: Grid) -> MetricSums:
        return _Errors(grid)


class Segmentation:
    """Give every voxel its class.

    Dice is of all voxels of the split together, and so are the counts that it is made of.
    """

    def __init__(self, loss: str | LossFunction, classes: tuple[str, ...]) -> None:
        self.loss = named_loss(loss)
        self.classes = classes
        dice = [f"validation_dice_{name}" for name in classes]
        counts = [f"{kind}_{name}" for name in classes for kind in COUNTS]
        self.measures = ("validation_loss", *dice, *counts)

    def metric_sums(self, grid: Grid) -> MetricSums:
        return _Confusion(grid, self.classes)


COUNTS = {"tp": "true_positives", "fp": "false_positives", "fn": "false_negatives"}


class WithMetrics:
    """An objective of which more is measured: ``metrics`` by the names that they get.

    Raises:
        RecipeError: a name is that of a measure of the objective's own.
    """

    def __init__(self, objective: Objective, metrics: Mapping[str, LossFunction]) -> None:
        self.objective = objective
        self.loss = objective.loss
        self.metrics = metrics
        self.measures = (*objective.measures, *(f"validation_{name}" for name in metrics))
        for name in metrics:
            if f"validation_{name}" in objective.measures:
                raise RecipeError(
                    f"metrics.{name}: validation_{name} is measured anyhow\n    take another name"
                )

    def metric_sums(self, grid: Grid) -> MetricSums:
        return _More(self.objective.metric_sums(grid), MeansOfMetrics(grid, self.metrics))


class _More:
    """An objective's own sums and those of metrics."""

    def __init__(self, own: MetricSums, more: MeansOfMetrics) -> None:
        self.own = own
        self.more = more

    def add(self, prediction: Sharded, target: Sharded, loss: torch.Tensor) -> None:
        self.own.add(prediction, target, loss)
        self.more.add(prediction, target)

    def result(self) -> dict[str, float | None]:
        found = {f"validation_{name}": value for name, value in self.more.result().items()}
        return {**self.own.result(), **found}


class MeansOfMetrics:
    """Metrics of mini-batches, and their means over the samples of a split.

    Each is called with what the loss is called with, so that it is exact on cut tensors or refused.
    """

    def __init__(self, grid: Grid, metrics: Mapping[str, LossFunction]) -> None:
        self.metrics = metrics
        self.mean = _Mean(grid, len(metrics))

    def add(self, prediction: Sharded, target: Sharded) -> None:
        """Count a mini-batch.

        Raises:
            UnsupportedOp: a metric uses an operator that has no rule; names the metric.
        """
        values = [self._value(name, prediction, target) for name in self.metrics]
        if values:
            self.mean.add(target.shape[0], *values)

    def _value(self, name: str, prediction: Sharded, target: Sharded) -> torch.Tensor:
        try:
            value = self.metrics[name](prediction, target)
        except UnsupportedOp as error:
            raise UnsupportedOp(f"metrics.{name}: {error}") from error
        if isinstance(value, Sharded):
            value = value.full()
        return value.detach().reshape(()).double()

    def result(self) -> dict[str, float | None]:
        """By name; the same on every rank."""
        return dict(zip(self.metrics, self.mean.result(), strict=True))


class _Mean:
    """The mean over samples of ``size`` numbers that are equal on all ranks."""

    def __init__(self, grid: Grid, size: int) -> None:
        self.sums = torch.zeros(size, dtype=torch.float64, device=grid.device)
        self.samples = 0

    def add(self, samples: int, *values: torch.Tensor) -> None:
        self.sums += torch.stack(values) * samples
        self.samples += samples

    def result(self) -> list[float | None]:
        return [value / self.samples if self.samples else None for value in self.sums.tolist()]


class _Errors:
    """Loss and mean absolute error."""

    def __init__(self, grid: Grid) -> None:
        self.mean = _Mean(grid, 2)

    def add(self, prediction: Sharded, target: Sharded, loss: torch.Tensor) -> None:
        self.mean.add(target.shape[0], loss, F.l1_loss(prediction, target))

    def result(self) -> dict[str, float | None]:
        return dict(zip(Regression.measures, self.mean.result(), strict=True))


class _Confusion:
    """Loss and confusion counts; the ranks' parts of these are summed once, in the end."""

    def __init__(self, grid: Grid, classes: tuple[str, ...]) -> None:
        self.grid = grid
        self.classes = classes
        self.mean = _Mean(grid, 1)
        self.counts = torch.zeros(len(classes), len(classes), dtype=torch.int64, device=grid.device)

    def add(self, prediction: Sharded, target: Sharded, loss: torch.Tensor) -> None:
        self.mean.add(target.shape[0], loss)
        self.counts += count(predicted_classes(prediction), target, len(self.classes)).sum(0)

    def result(self) -> dict[str, float | None]:
        scores = scores_of(sum_over_ranks(self.counts, self.grid).cpu().numpy(), self.classes)
        found = {"validation_loss": self.mean.result()[0]}
        for name, score in scores.items():
            dice = score["dice"]
            found[f"validation_dice_{name}"] = None if math.isnan(dice) else dice
            found |= {f"{kind}_{name}": score[key] for kind, key in COUNTS.items()}
        return found
