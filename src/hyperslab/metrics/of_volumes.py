"""From the samples of volumes to the volumes: averages, and lines that recalibrate them.

Legend: N samples, V volumes, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyperslab.metrics.regression import FloatArray, Predictions


@dataclass(frozen=True, slots=True)
class CalibrationLines:
    """A line for each parameter, from what was predicted to what was true: both (P,).

    An average of sub-volumes' predictions is too close to the mean of the prior: each of them
    saw little and was trained to hedge. A line undoes that.
    """

    slope: FloatArray
    intercept: FloatArray

    def __call__(self, predicted: FloatArray) -> FloatArray:
        """Recalibrated predictions (N, P)."""
        return predicted * self.slope + self.intercept


def fit_calibration(predicted: FloatArray, true: FloatArray) -> CalibrationLines:
    """The lines of least squares from predictions to truths, both (N, P).

    Where all predictions are the same the line is flat: the mean of the truths.
    """
    x = predicted - predicted.mean(0)
    spread = (x**2).sum(0)
    moves = np.ptp(predicted, axis=0) > 0
    slope = np.zeros_like(spread)
    np.divide((x * (true - true.mean(0))).sum(0), spread, out=slope, where=moves)
    return CalibrationLines(slope, true.mean(0) - slope * predicted.mean(0))


def volume_indices(volumes: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """The volumes in the order of their names, and which of them each sample belongs to (N,)."""
    names, indices = np.unique(np.asarray(volumes, dtype=object).astype(str), return_inverse=True)
    return tuple(names.tolist()), indices


def means_of_volumes(values: FloatArray, volumes: Sequence[str]) -> FloatArray:
    """The mean over the samples of each volume: (N, ...) to (V, ...), in the order of names."""
    names, indices = volume_indices(volumes)
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, indices, values)
    counts = np.bincount(indices).reshape(-1, *[1] * (values.ndim - 1))
    return sums / counts


def averaged(p: Predictions) -> Predictions:
    """One prediction a volume: the mean of those of its samples."""
    names, _ = volume_indices(p.volumes)
    means = (
        means_of_volumes(values, p.volumes)
        for values in (p.true, p.predicted, p.true_physical, p.predicted_physical)
    )
    true, predicted, true_physical, predicted_physical = means
    return replace(
        p,
        samples=names,
        volumes=names,
        true=true,
        predicted=predicted,
        true_physical=true_physical,
        predicted_physical=predicted_physical,
    )


def calibration_of(validation: Predictions) -> CalibrationLines:
    """The lines that recalibrate averages over volumes, fitted to those of the validation split."""
    whole = averaged(validation)
    return fit_calibration(whole.predicted, whole.true)


def recalibrated(
    p: Predictions, calibration: CalibrationLines, physical: Callable[[FloatArray], FloatArray]
) -> Predictions:
    """The same with other predictions; ``physical`` gives them (N, P) in their own units."""
    predicted = calibration(p.predicted)
    return replace(p, predicted=predicted, predicted_physical=physical(predicted))
