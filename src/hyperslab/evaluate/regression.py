"""Measure a network that predicts numbers: each sample's, and the errors over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperslab.atomic_files import write_csv, write_json
from hyperslab.data import Dataset
from hyperslab.metrics.of_volumes import averaged, calibration_of, recalibrated
from hyperslab.metrics.regression import (
    FloatArray,
    Predictions,
    errors_per_parameter,
    means_over_parameters,
)
from hyperslab.recipe.schema import Recipe
from hyperslab.train.build import training_split
from hyperslab.train.objective import MeansOfMetrics
from hyperslab.train.precision import autocast

VALIDATION = "validation.csv"
"""In an evaluation's folder: predictions of the validation split."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The errors of one checkpoint on one split; ``facts`` say how they came about.

    ``validation`` are the predictions of the validation split, where lines were fitted to them.
    """

    predictions: Predictions
    errors: dict[str, dict[str, float]]
    facts: dict[str, Any]
    validation: Predictions | None = None

    def write(self, folder: Path) -> None:
        """``predictions.csv``, ``metrics.csv``, ``metrics.json``: each is there whole or not.

        And ``validation.csv``, if there is something to write.
        """
        write_predictions(folder / "predictions.csv", self.predictions)
        (folder / VALIDATION).unlink(missing_ok=True)  # of another checkpoint
        if self.validation is not None:
            write_predictions(folder / VALIDATION, self.validation)
        keys = list(self.errors[self.predictions.names[0]])
        errors = ([name, *row.values()] for name, row in self.errors.items())
        write_csv(folder / "metrics.csv", ["parameter", *keys], errors)
        write_json(folder / "metrics.json", {"parameters": self.errors, **self.facts})


def write_predictions(path: Path, p: Predictions) -> None:
    """One row a sample, with the volume that it is a part of."""
    columns = [p.true, p.predicted, p.true_physical, p.predicted_physical]
    values = np.stack(columns, axis=-1).reshape(len(p.samples), -1)
    kinds = ("true", "predicted", "true_phys", "predicted_phys")
    head = ["sample", "volume", *(f"{kind}_{name}" for name in p.names for kind in kinds)]
    rows = zip(p.samples, p.volumes, values.tolist(), strict=True)
    write_csv(path, head, ([sample, volume, *row] for sample, volume, row in rows))


def evaluate_regression(
    model: torch.nn.Module,
    data: Dataset,
    recipe: Recipe,
    validation: Dataset | None = None,
    metrics: MeansOfMetrics | None = None,
) -> Evaluation:
    """Predict every sample once; every rank gets the same.

    With ``validation``, the validation split, a line for each parameter is fitted to its volumes
    and recalibrates the predictions for the volumes of ``data``. ``metrics`` see all of ``data``.
    """
    mean = training_mean(data, recipe)
    predictions = _predictions(model, data, recipe, mean, metrics)
    errors = errors_per_parameter(predictions)
    facts: dict[str, Any] = {
        "mean": means_over_parameters(errors),
        "training_mean": dict(zip(data.targets, mean.tolist(), strict=True)),
    }
    whole = averaged(predictions)
    if len(whole.samples) < len(predictions.samples):
        facts["averaged"] = {"volumes": len(whole.samples), **_summary(whole)}
    if validation is None:
        return Evaluation(predictions, errors, facts)
    seen = _predictions(model, validation, recipe, mean)
    lines = calibration_of(seen)
    better = recalibrated(whole, lines, data.parameters.physical)
    facts["recalibrated"] = {
        "volumes": len(whole.samples),
        **_summary(better),
        "slope": dict(zip(data.targets, lines.slope.tolist(), strict=True)),
        "intercept": dict(zip(data.targets, lines.intercept.tolist(), strict=True)),
    }
    return Evaluation(predictions, errors, facts, seen)


def _predictions(
    model: torch.nn.Module,
    data: Dataset,
    recipe: Recipe,
    mean: FloatArray,
    metrics: MeansOfMetrics | None = None,
) -> Predictions:
    names, true, predicted = predict_parameters(
        model, data, precision=recipe.precision, metrics=metrics
    )
    source = data.source
    volumes = {name: source.volume(sample) for sample, name in enumerate(source.names)}
    return Predictions(
        names=data.targets,
        samples=names,
        true=true,
        predicted=predicted,
        true_physical=data.parameters.physical(true),
        predicted_physical=data.parameters.physical(predicted),
        training_mean=mean,
        volumes=tuple(volumes[name] for name in names),
        training_mean_physical=data.parameters.physical(mean),
    )


def _summary(p: Predictions) -> dict[str, Any]:
    errors = errors_per_parameter(p)
    return {"parameters": errors, "mean": means_over_parameters(errors)}


@torch.no_grad()
def predict_parameters(
    model: torch.nn.Module,
    data: Dataset,
    *,
    precision: str = "float32",
    metrics: MeansOfMetrics | None = None,
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
            if metrics is not None:
                metrics.add(prediction, y)
        true.append(y.full().double().cpu())
        predicted.append(prediction.full().double().cpu())
        names += data.shown_names
    return tuple(names), torch.cat(true).numpy(), torch.cat(predicted).numpy()


def training_mean(data: Dataset, recipe: Recipe) -> FloatArray:
    """The mean (P,) of the normalised targets over the training split."""
    source = data.source
    chosen = training_split(recipe, data)
    return np.mean([source.target(sample) for sample in chosen], axis=0, dtype=np.float64)
