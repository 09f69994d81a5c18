"""What a ridge regression on summary statistics says of universes: a network's control.

    python benchmarks/ridge.py RECIPE [key=value ...] [--subvolume W ...] [--splits 1]
                               [--features FILE.npz] [--json OUT] [--out FOLDER]

RECIPE is one that `hyperslab train` takes, or the recipe.yaml of a run: volumes and split are its
own, so the errors stand beside those of `hyperslab evaluate`. The targets are regressed on power
spectra, also between channels, equilateral bispectra, the distribution of counts and moments
(`summary_statistics.py`); the validation samples choose the penalty of each target, and which set
of the statistics it is regressed on. Rows: whole volumes; with ``--subvolume`` also sub-volumes of
W voxels, each a sample of its own, and their predictions averaged over a volume and recalibrated by
a line, which the validation volumes give. ``--splits 5`` does so for five seeds of the split, the
recipe's and the next ones.

``--features`` names a file that keeps the statistics (of sub-volumes FILE-W.npz): if there is none
it is written, and otherwise read in place of the volumes. So this is a learning curve:

    for n in 128 512 2048; do
        python benchmarks/ridge.py RECIPE "data.counts=[$n,512,512]" --features statistics.npz
    done

Errors are mean squared errors over that of predicting the mean of the training targets: median and
range over the splits. ``--out`` has for each width a folder with the predictions of the recipe's
own split, in the files of `hyperslab evaluate --calibrate`. The uncertainty of a prediction is the
covariance of the residuals over the validation samples, the same for all: a little too small, as
these samples chose the penalties.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clock import machine, summary
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from regression_control import FloatArray, Split, fit_ridge
from summary_statistics import SETS, summary_statistics

import hyperslab as hs
from hyperslab.data.sampler import SPLITS
from hyperslab.errors import DataError
from hyperslab.formats.files import ANY, naming
from hyperslab.formats.source import Source
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
from hyperslab.train.samples import samples_of_split
from hyperslab.train.uncertainty import uncertainty_of
from hyperslab.util.atomic_files import created_aside

AT_ONCE = 1 << 21
"""Values of the volumes that are looked at together."""

COUNTS = ("data.transform=null", "data.window=null", "data.augment=false", "grid.auto=false")
ALONE = tuple(f"grid.{axis}=1" for axis in ("data", "depth", "height", "width"))


@dataclass(frozen=True, slots=True)
class Samples:
    """N samples: their names and volumes, targets (N, P) and sets of statistics (N, F)."""

    source: Source
    names: tuple[str, ...]
    volumes: tuple[str, ...]
    targets: FloatArray
    sets: Mapping[str, FloatArray]


def read_samples(recipe: Recipe, width: int | None, kept: Path | None = None) -> Samples:
    """All samples of a recipe's data, whole or cut into sub-volumes of ``width``.

    Statistics that the file ``kept`` has are not computed anew, but for those of the first sample,
    which must be the same; without that file it is written.

    Raises:
        DataError: the file has the statistics of other data, or others.
    """
    with open_data(_reading(recipe, width, 1), hs.Grid(), split="all") as data:
        many = max(1, AT_ONCE // math.prod(data.shape))
        source = data.source
        samples = range(len(source.names))
        targets = np.array([source.target(sample) for sample in samples], dtype=np.float64)
    names = tuple(source.names)
    about = json.dumps([names, targets.tolist()])
    if kept is not None and kept.exists():
        first = next(_statistics(_reading(recipe, width, 1)))
        parts = _read_parts(kept, about, first, len(names))
    else:
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)  # fails before hours of statistics
        found = list(_statistics(_reading(recipe, width, many)))
        parts = {name: np.concatenate([some[name] for some in found]) for name in found[0]}
        if kept is not None:
            with created_aside(kept) as file:
                np.savez(file, about=np.array(about), **parts)
    sets = {
        name: np.concatenate([parts[part] for part in own], axis=1, dtype=np.float64)
        for name, own in SETS.items()
    }
    volumes = tuple(source.volume(sample) for sample in samples)
    return Samples(source, names, volumes, targets, sets)


def _statistics(recipe: Recipe) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Of one mini-batch after the other."""
    with open_data(recipe, hs.Grid(), split="all") as data:
        for x, _ in data.epoch(0):
            yield summary_statistics(x.full().numpy())


def _read_parts(
    path: Path, about: str, first: Mapping[str, NDArray[np.float32]], count: int
) -> dict[str, NDArray[np.float32]]:
    """Of ``count`` samples, of which the statistics of the first are to be ``first``."""
    with naming(path, "statistics of benchmarks/ridge.py", ANY), path.open("rb") as opened:
        with NpzFile(opened) as file:
            parts = {name: file[name] for name in file.files}
        same = str(parts.pop("about")) == about and parts.keys() == first.keys()
    if not same or any(not _begins(parts[name], first[name], count) for name in first):
        raise DataError(f"{path} has the statistics of other volumes, or others; name another file")
    return parts


def _begins(part: NDArray[np.float32], first: NDArray[np.float32], count: int) -> bool:
    """Tell if its first row is ``first`` but for rounding, and it has ``count`` of them."""
    alike = part.dtype == first.dtype and part.shape == (count, *first.shape[1:])
    return alike and np.allclose(part[:1], first, rtol=1e-3, atol=1e-3)


def _reading(recipe: Recipe, width: int | None, batch_size: int) -> Recipe:
    changes = {"subvolume": width, "batch_size": batch_size}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})


def split_of(source: Source, recipe: Recipe, seed: int) -> Split:
    """The samples of each split, as training deals them out."""
    data = recipe.data.model_copy(update={"seed": seed})
    seeded = recipe.model_copy(update={"data": data})
    return {which: np.array(samples_of_split(seeded, source, which)) for which in SPLITS}


def evaluation(samples: Samples, recipe: Recipe, seed: int) -> Evaluation:
    """The errors over the test samples; those of their volumes, too, where samples are parts."""
    split = split_of(samples.source, recipe, seed)
    ridge = fit_ridge(samples.sets, samples.targets, split)
    predicted = ridge.predicted
    mean = samples.targets[split["train"]].mean(axis=0)
    residuals = (predicted - samples.targets)[split["validation"]]
    covariance = residuals.T @ residuals / len(residuals)
    test = _predictions(samples, predicted, split["test"], mean, covariance)
    errors = errors_per_parameter(test)
    facts: dict[str, Any] = {
        "mean": means_over_parameters(errors),
        "training_mean": dict(zip(test.names, mean.tolist(), strict=True)),
        "split": "test",
        "uncertainty": uncertainty_of(test),
        "ridge": {
            name: {"statistics": chosen, "penalty": penalty}
            for name, (chosen, penalty) in zip(test.names, ridge.chosen, strict=True)
        },
    }
    if len(set(samples.volumes)) == len(samples.volumes):
        return Evaluation(test, errors, facts)
    validation = _predictions(samples, predicted, split["validation"], mean, covariance)
    lines = calibration_of(validation)
    better = recalibrated(averaged_over_volumes(test), lines)
    facts["recalibrated"] = {
        "volumes": len(better.samples),
        "parameters": errors_per_parameter(better),
    }
    return Evaluation(test, errors, facts, validation)


def _predictions(
    samples: Samples,
    predicted: FloatArray,
    chosen: NDArray[np.intp],
    mean: FloatArray,
    covariance: FloatArray,
) -> Predictions:
    """All have the same ``covariance`` (P, P), of residuals."""
    return Predictions(
        samples.source.parameters,
        tuple(samples.names[sample] for sample in chosen),
        samples.targets[chosen],
        predicted[chosen],
        mean,
        tuple(samples.volumes[sample] for sample in chosen),
        covariance=np.repeat(covariance[None], len(chosen), axis=0),
    )


def rows_of(
    recipe: Recipe, width: int | None, splits: int, out: Path | None, kept: Path | None
) -> dict[str, Any]:
    """By the name of the row: the ratios of each parameter over the splits, and how many tests."""
    if kept is not None and width is not None:
        kept = kept.with_stem(f"{kept.stem}-{width}")
    samples = read_samples(recipe, width, kept)
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
    parser.add_argument("--features", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *COUNTS, *options.overrides])
    rows: dict[str, Any] = {}
    for width in (None, *options.subvolume):
        rows |= rows_of(recipe, width, options.splits, options.out, options.features)
    print_rows(rows)
    if options.json is not None:
        seed = recipe.data.seed
        about = {"machine": machine(), "seeds": list(range(seed, seed + options.splits))}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
