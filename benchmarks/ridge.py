"""What a ridge regression on moments and power spectra says of universes: a network's control.

    python benchmarks/ridge.py RECIPE [key=value ...] [--subvolume W ...] [--splits 1]
                               [--json OUT] [--out FOLDER]

RECIPE is one that `hyperslab train` takes, or the recipe.yaml of a run: volumes and split are its
own, so the errors stand beside those of `hyperslab evaluate`. The targets are regressed on the
numbers of `summary_statistics.py`; the validation samples choose the penalty of each target. Rows:
whole volumes; with ``--subvolume`` also sub-volumes of W voxels, each a sample of its own, and
their predictions averaged over a volume and recalibrated by a line, which the validation volumes
give. ``--splits 5`` does so for five seeds of the split, the recipe's and the next ones.

Errors are mean squared errors over that of predicting the mean of the training targets: median and
range over the splits. ``--out`` has for each width a folder with the predictions of the recipe's
own split, in the files of `hyperslab evaluate --calibrate`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clock import machine, summary
from numpy.typing import NDArray
from regression_control import Split, ridge_predictions
from summary_statistics import FloatArray, summary_statistics

import hyperslab as hs
from hyperslab.data.sampler import SPLITS, samples_of
from hyperslab.formats.targets import Parameters
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.builders import open_data
from hyperslab.train.evaluate import Evaluation
from hyperslab.train.metrics import (
    Predictions,
    averaged_over_volumes,
    calibration_of,
    errors_per_parameter,
    means_over_parameters,
    recalibrated,
)

AT_ONCE = 1 << 21
"""Values of the volumes that are looked at together."""

COUNTS = ("data.transform=null", "data.window=null", "data.augment=false", "grid.auto=false")
ALONE = tuple(f"grid.{axis}=1" for axis in ("data", "depth", "height", "width"))


@dataclass(frozen=True, slots=True)
class Samples:
    """N samples: their names and volumes, their statistics (N, F) and targets (N, P)."""

    names: tuple[str, ...]
    volumes: tuple[str, ...]
    statistics: FloatArray
    targets: FloatArray
    parameters: Parameters


def read_samples(recipe: Recipe, width: int | None) -> Samples:
    """All samples of a recipe's data, whole or cut into sub-volumes of ``width``."""
    with open_data(_reading(recipe, width, 1), hs.Grid(), split="all") as data:
        many = max(1, AT_ONCE // math.prod(data.shape))
    statistics = []
    targets = []
    with open_data(_reading(recipe, width, many), hs.Grid(), split="all") as data:
        for x, y in data.epoch(0):
            statistics.append(summary_statistics(x.full().numpy()))
            targets.append(y.full().double().numpy())
        source = data.source
        volumes = tuple(source.volume(sample) for sample in data.schedule.order(0))
        names = tuple(data.names(0))
    return Samples(
        names, volumes, np.concatenate(statistics), np.concatenate(targets), source.parameters
    )


def _reading(recipe: Recipe, width: int | None, batch_size: int) -> Recipe:
    changes = {"subvolume": width, "batch_size": batch_size}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})


def split_of(volumes: Sequence[str], recipe: Recipe, seed: int) -> Split:
    """The samples of each split, as training deals them out."""
    return {
        which: np.array(samples_of(volumes, which, recipe.data.fractions, seed, recipe.data.counts))
        for which in SPLITS
    }


def evaluation(samples: Samples, recipe: Recipe, seed: int) -> Evaluation:
    """The errors over the test samples; those of their volumes, too, where samples are parts."""
    split = split_of(samples.volumes, recipe, seed)
    predicted = ridge_predictions(samples.statistics, samples.targets, split)
    mean = samples.targets[split["train"]].mean(axis=0)
    test = _predictions(samples, predicted, split["test"], mean)
    errors = errors_per_parameter(test)
    names = samples.parameters.names
    facts: dict[str, Any] = {"mean": means_over_parameters(errors), "split": "test"}
    facts["training_mean"] = dict(zip(names, mean.tolist(), strict=True))
    if len(set(samples.volumes)) == len(samples.volumes):
        return Evaluation(test, errors, facts)
    validation = _predictions(samples, predicted, split["validation"], mean)
    lines = calibration_of(validation)
    better = recalibrated(averaged_over_volumes(test), lines, samples.parameters.physical)
    facts["recalibrated"] = {
        "volumes": len(better.samples),
        "parameters": errors_per_parameter(better),
    }
    return Evaluation(test, errors, facts, validation)


def _predictions(
    samples: Samples, predicted: FloatArray, chosen: NDArray[np.intp], mean: FloatArray
) -> Predictions:
    true = samples.targets[chosen]
    return Predictions(
        samples.parameters.names,
        tuple(samples.names[sample] for sample in chosen),
        true,
        predicted[chosen],
        samples.parameters.physical(true),
        samples.parameters.physical(predicted[chosen]),
        mean,
        tuple(samples.volumes[sample] for sample in chosen),
    )


def rows_of(recipe: Recipe, width: int | None, splits: int, out: Path | None) -> dict[str, Any]:
    """By the name of the row: the ratios of each parameter over the splits, and how many tests."""
    samples = read_samples(recipe, width)
    name = "whole" if width is None else str(width)
    rows: dict[str, Any] = {}
    for seed in range(recipe.data.seed, recipe.data.seed + splits):
        found = evaluation(samples, recipe, seed)
        _count(rows, name, found.errors, len(found.predictions.samples))
        of_volumes = found.facts.get("recalibrated")
        if of_volumes is not None:
            _count(rows, f"{name}-averaged", of_volumes["parameters"], of_volumes["volumes"])
        if out is not None and seed == recipe.data.seed:
            (out / name).mkdir(parents=True, exist_ok=True)
            found.write(out / name)
    return rows


def _count(
    rows: dict[str, Any], name: str, errors: Mapping[str, Mapping[str, float]], tests: int
) -> None:
    row = rows.setdefault(name, {"tests": tests, "ratios": {}})
    for parameter, values in errors.items():
        row["ratios"].setdefault(parameter, []).append(values["ratio"])


def print_rows(rows: Mapping[str, Any]) -> None:
    """A line for each row, a column for each parameter."""
    parameters = next(iter(rows.values()))["ratios"]
    print(f"{'':16}{'tests':>7}" + "".join(f"{parameter:>24}" for parameter in parameters))
    for name, row in rows.items():
        cells = map(summary, row["ratios"].values())
        words = (f"{c['median']:.3f} ({c['min']:.3f} .. {c['max']:.3f})" for c in cells)
        print(f"{name:16}{row['tests']:>7}" + "".join(f"{word:>24}" for word in words))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--subvolume", type=int, nargs="+", default=[])
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *COUNTS, *options.overrides])
    rows: dict[str, Any] = {}
    for width in (None, *options.subvolume):
        rows |= rows_of(recipe, width, options.splits, options.out)
    print_rows(rows)
    if options.json is not None:
        seed = recipe.data.seed
        about = {"machine": machine(), "seeds": list(range(seed, seed + options.splits))}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
