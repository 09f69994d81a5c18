"""Measure a network that predicts numbers: each sample's, and the errors over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperslab.atomic_files import write_csv, write_json
from hyperslab.data import Dataset
from hyperslab.metrics.regression import (
    FloatArray,
    Predictions,
    errors_per_parameter,
    means_over_parameters,
)
from hyperslab.recipe.schema import Recipe
from hyperslab.train.build import training_split
from hyperslab.train.precision import autocast


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The errors of one checkpoint on one split; ``facts`` say how they came about."""

    predictions: Predictions
    errors: dict[str, dict[str, float]]
    facts: dict[str, Any]

    def write(self, folder: Path) -> None:
        """``predictions.csv``, ``metrics.csv``, ``metrics.json``: each is there whole or not."""
        p = self.predictions
        columns = [p.true, p.predicted, p.true_physical, p.predicted_physical]
        values = np.stack(columns, axis=-1).reshape(len(p.samples), -1)
        kinds = ("true", "predicted", "true_phys", "predicted_phys")
        head = ["sample", *(f"{kind}_{name}" for name in p.names for kind in kinds)]
        rows = ([name, *row] for name, row in zip(p.samples, values.tolist(), strict=True))
        write_csv(folder / "predictions.csv", head, rows)
        keys = list(self.errors[p.names[0]])
        errors = ([name, *row.values()] for name, row in self.errors.items())
        write_csv(folder / "metrics.csv", ["parameter", *keys], errors)
        write_json(folder / "metrics.json", {"parameters": self.errors, **self.facts})


def evaluate_regression(model: torch.nn.Module, data: Dataset, recipe: Recipe) -> Evaluation:
    """Predict every sample once; every rank gets the same."""
    names, true, predicted = predict_parameters(model, data, precision=recipe.precision)
    predictions = Predictions(
        data.targets,
        names,
        true,
        predicted,
        data.parameters.physical(true),
        data.parameters.physical(predicted),
        training_mean(data, recipe),
    )
    errors = errors_per_parameter(predictions)
    means = dict(zip(data.targets, predictions.training_mean.tolist(), strict=True))
    facts = {"mean": means_over_parameters(errors), "training_mean": means}
    return Evaluation(predictions, errors, facts)


@torch.no_grad()
def predict_parameters(
    model: torch.nn.Module, data: Dataset, *, precision: str = "float32"
) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    """Names, true and predicted normalised parameters, both (N, P) float64, as epoch 0 shows them.

    Every rank gets those of all samples.
    """
    model.eval()
    names: list[str] = []
    true: list[torch.Tensor] = []
    predicted: list[torch.Tensor] = []
    for x, y in data.epoch(0):
        with autocast(data.grid.device, precision):
            prediction = model(x)
        true.append(y.full().double().cpu())
        predicted.append(prediction.full().double().cpu())
        names += data.shown_names
    return tuple(names), torch.cat(true).numpy(), torch.cat(predicted).numpy()


def training_mean(data: Dataset, recipe: Recipe) -> FloatArray:
    """The mean (P,) of the normalised targets over the training split."""
    source = data.source
    chosen = training_split(recipe, data)
    return np.mean([source.target(sample) for sample in chosen], axis=0, dtype=np.float64)
