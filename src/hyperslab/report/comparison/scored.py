"""What some network or control predicts of the test volumes, ready to be compared.

Legend: S seeds, V volumes of the test split, N samples, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError
from hyperslab.metrics.bootstrap import ConfidenceInterval, ratio_interval
from hyperslab.metrics.of_volumes import fit_calibration, means_of_volumes, volume_indices
from hyperslab.metrics.regression import FloatArray
from hyperslab.report.run_folder import TEXT, read_evaluation, read_table, read_words

MEAN = "mean"
"""In place of a parameter's name: the mean of the errors of all of them."""


@dataclass(frozen=True, slots=True)
class SplitPredictions:
    """The samples of a split: their volumes, and (N, P) normalised truths and predictions."""

    volumes: tuple[str, ...]
    true: FloatArray
    predicted: FloatArray

    @property
    def of_parts(self) -> bool:
        """Whether volumes have several samples."""
        return len(set(self.volumes)) < len(self.volumes)


@dataclass(frozen=True, slots=True)
class Scored:
    """A network, or a control, by seed.

    ``errors`` (S, V, P) are squared, each the mean over the samples of a volume; ``of_mean`` (V, P)
    those of predicting the mean of the training split. ``volumes`` are in the order of names.
    """

    name: str
    parameters: tuple[str, ...]
    volumes: tuple[str, ...]
    seeds: tuple[SplitPredictions, ...]
    errors: FloatArray
    of_mean: FloatArray

    @property
    def true(self) -> FloatArray:
        """The true values (V, P)."""
        return means_of_volumes(self.seeds[0].true, self.seeds[0].volumes)

    def error(self, parameter: str) -> FloatArray:
        """The errors (S, V) of one parameter, or of their `MEAN`."""
        return self._of(self.errors, parameter)

    def ratio(self, parameter: str) -> ConfidenceInterval:
        """The error over that of predicting the mean, on the mean over seeds."""
        return ratio_interval(self.error(parameter), self._of(self.of_mean[None], parameter))

    def ratio_to(self, other: Scored, parameter: str) -> ConfidenceInterval:
        """The error over that of another."""
        return ratio_interval(self.error(parameter), other.error(parameter))

    def ratios(self, parameter: str) -> FloatArray:
        """By seed, the error over that of predicting the mean (S,)."""
        of_mean = self._of(self.of_mean[None], parameter).mean()
        return self.error(parameter).mean(1) / of_mean

    @property
    def typical(self) -> SplitPredictions:
        """Of the seed with the median error."""
        order = np.argsort(self.error(MEAN).mean(1))
        return self.seeds[int(order[(len(order) - 1) // 2])]

    def _of(self, values: FloatArray, parameter: str) -> FloatArray:
        if parameter == MEAN:
            return values.mean(-1)
        chosen: FloatArray = values[..., self.parameters.index(parameter)]
        return chosen


def read_scored(name: str, folders: Sequence[Path]) -> tuple[Scored, Scored | None]:
    """From the evaluations of several seeds: as they are, and averaged and recalibrated.

    The second is there where volumes have several samples and every evaluation has predictions of
    the validation split, to which lines are fitted.

    Raises:
        DataError: an evaluation is missing, broken, of classes, or of other volumes than the first.
    """
    found = [_read(folder) for folder in folders]
    parameters, mean, _, _ = found[0]
    for folder, (names, _, _, _) in zip(folders, found, strict=True):
        if names != parameters:
            raise DataError(f"{folder} predicts {', '.join(names)}: not what {folders[0]} does")
    tests = [test for _, _, test, _ in found]
    for folder, test in zip(folders, tests, strict=True):
        if set(test.volumes) != set(tests[0].volumes):
            raise DataError(
                f"{name}: the test volumes of its runs are not the same: those of {folder} are not "
                f"those of {folders[0]}"
            )
    plain = score(name, parameters, tests, mean)
    validations = [validation for _, _, _, validation in found if validation is not None]
    if not tests[0].of_parts or len(validations) < len(tests):
        return plain, None
    better = [_recalibrated(*pair) for pair in zip(tests, validations, strict=True)]
    return plain, score(f"{name}, averaged and recalibrated", parameters, better, mean)


def score(
    name: str, parameters: tuple[str, ...], seeds: Sequence[SplitPredictions], mean: FloatArray
) -> Scored:
    """The errors of predictions; ``mean`` (P,) is that of the training split's targets.

    All seeds have the same volumes.
    """
    volumes, _ = volume_indices(seeds[0].volumes)
    errors = []
    for seed in seeds:
        errors.append(means_of_volumes((seed.predicted - seed.true) ** 2, seed.volumes))
    true = means_of_volumes(seeds[0].true, seeds[0].volumes)
    return Scored(name, parameters, volumes, tuple(seeds), np.stack(errors), (true - mean) ** 2)


def _recalibrated(test: SplitPredictions, validation: SplitPredictions) -> SplitPredictions:
    lines = fit_calibration(
        means_of_volumes(validation.predicted, validation.volumes),
        means_of_volumes(validation.true, validation.volumes),
    )
    names, _ = volume_indices(test.volumes)
    predicted = lines(means_of_volumes(test.predicted, test.volumes))
    return SplitPredictions(names, means_of_volumes(test.true, test.volumes), predicted)


def _read(
    folder: Path,
) -> tuple[tuple[str, ...], FloatArray, SplitPredictions, SplitPredictions | None]:
    """Parameters, training mean (P,), test and validation predictions of an evaluation's folder."""
    evaluation = read_evaluation(folder / "metrics.json")
    if "parameters" not in evaluation:
        what = "an evaluation of classes" if evaluation else "not there"
        raise DataError(
            f"{folder / 'metrics.json'} is {what}: numbers that were predicted are compared here\n"
            "    hyperslab evaluate RUN --calibrate"
        )
    names = tuple(evaluation["parameters"])
    mean = np.array([evaluation.get("training_mean", {}).get(name, 0.0) for name in names])
    test = _read_split(folder / "predictions.csv", names)
    if test is None:
        raise DataError(f"{folder / 'predictions.csv'} is not there: hyperslab evaluate writes it")
    return names, mean, test, _read_split(folder / "validation.csv", names)


def _read_split(path: Path, names: Sequence[str]) -> SplitPredictions | None:
    kinds = [[f"{kind}_{name}" for name in names] for kind in ("true", "predicted")]
    table = read_table(path, ["volume", *kinds[0], *kinds[1]], text=TEXT)
    if not table:
        return None
    volumes = read_words(path, "volume")
    true, predicted = (np.stack([table[name] for name in kind], axis=1) for kind in kinds)
    return SplitPredictions(volumes, true, predicted)
