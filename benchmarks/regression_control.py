"""Ridge regression of targets on numbers of each sample.

Legend: N samples, F numbers of a set, P targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.preprocessing import StandardScaler

FloatArray = NDArray[np.float64]
Split = Mapping[str, NDArray[np.intp]]
"""The samples of "train", "validation" and "test"."""

PENALTIES = np.logspace(-8, 3, 34)
"""Per sample of the training split, of features that are scaled to a variance of 1."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """A ridge regression on sets of numbers.

    Args:
        predicted: (N, P), of all samples.
        chosen: by target, the name of the set and the penalty.
    """

    predicted: FloatArray
    chosen: tuple[tuple[str, float], ...]


def fit_ridge(sets: Mapping[str, FloatArray], y: FloatArray, split: Split) -> Ridge:
    """The targets ``y`` (N, P) by a ridge regression on one of the sets (N, F).

    It sees the training samples; each target has the set and the penalty with the least squared
    error over the validation samples.
    """
    train = split["train"]
    validation = split["validation"]
    mean = y[train].mean(axis=0)
    best = np.full(y.shape[1], np.inf)
    chosen = [("", 0.0)] * y.shape[1]
    predicted = np.empty(y.shape)
    for name, numbers in sets.items():
        x = StandardScaler().fit(numbers[train]).transform(numbers)
        # Along the principal axes of the training samples all penalties have their solution.
        variances, axes = np.linalg.eigh(x[train].T @ x[train] / len(train))
        along = x @ axes
        covariances = along[train].T @ (y[train] - mean) / len(train)
        for penalty in PENALTIES:
            tried = along @ (covariances / (variances + penalty)[:, None]) + mean
            errors = np.mean((tried[validation] - y[validation]) ** 2, axis=0)
            for target in np.flatnonzero(errors < best):
                best[target] = errors[target]
                chosen[target] = (name, float(penalty))
                predicted[:, target] = tried[:, target]
    return Ridge(predicted, tuple(chosen))
