"""The objective of a training, regression or segmentation: its loss and the validation metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hyperslab import losses
from hyperslab.comm import Grid
from hyperslab.metrics.confusion import count, predicted_classes, scores_of, sum_over_ranks
from hyperslab.recipe.choices import choose
from hyperslab.tensor import Sharded

LossFunction = Callable[[Any, Any], torch.Tensor]

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

    def __init__(self, loss: str) -> None:
        self.loss = choose(LOSSES, loss, "loss")

    def metric_sums(self, grid: Grid) -> MetricSums:
        return _Errors(grid)


class Segmentation:
    """Give every voxel its class.

    Dice is of all voxels of the split together, and so are the counts that it is made of.
    """

    def __init__(self, loss: str, classes: tuple[str, ...]) -> None:
        self.loss = choose(LOSSES, loss, "loss")
        self.classes = classes
        dice = [f"validation_dice_{name}" for name in classes]
        counts = [f"{kind}_{name}" for name in classes for kind in COUNTS]
        self.measures = ("validation_loss", *dice, *counts)

    def metric_sums(self, grid: Grid) -> MetricSums:
        return _Confusion(grid, self.classes)


COUNTS = {"tp": "true_positives", "fp": "false_positives", "fn": "false_negatives"}


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
