"""Regression of targets on a few numbers a sample, as a control of what a network learns.

Legend: N samples, F numbers a sample, P targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

FloatArray = NDArray[np.float64]
Split = Mapping[str, NDArray[np.intp]]
"""The samples of "train", "validation" and "test"."""

PENALTIES = np.logspace(-8, 3, 34)
"""Per sample of the training split, of features that are scaled to a variance of 1."""


def ridge_predictions(x: FloatArray, y: FloatArray, split: Split) -> FloatArray:
    """The targets ``y`` (N, P) by a ridge regression on features ``x`` (N, F).

    It sees the training samples; each target has the penalty with the least squared error over the
    validation samples.
    """
    train = split["train"]
    validation = split["validation"]

    def fitted(penalty: FloatArray | float) -> FloatArray:
        model = make_pipeline(StandardScaler(), Ridge(alpha=penalty * len(train)))
        return model.fit(x[train], y[train]).predict(x)

    tried = [fitted(penalty) for penalty in PENALTIES]
    errors = [np.mean((t[validation] - y[validation]) ** 2, axis=0) for t in tried]
    best = np.argmin(errors, axis=0)
    return np.stack([tried[b][:, p] for p, b in enumerate(best)], axis=1)


def averaged(volumes: Sequence[str], values: FloatArray) -> tuple[tuple[str, ...], FloatArray]:
    """The volumes, each once, and the mean of the values (N, P) of its samples: (V, P)."""
    names, volume = np.unique(volumes, return_inverse=True)
    sums = np.zeros((names.size, values.shape[1]))
    np.add.at(sums, volume, values)
    return tuple(names.tolist()), sums / np.bincount(volume)[:, None]


def recalibrated(predicted: FloatArray, targets: FloatArray, known: NDArray[np.intp]) -> FloatArray:
    """The targets (N, P), each by a line in its prediction: the best over the ``known`` samples."""
    columns = [
        LinearRegression().fit(p[known, None], t[known]).predict(p[:, None])
        for p, t in zip(predicted.T, targets.T, strict=True)
    ]
    return np.stack(columns, axis=1)
