"""Ridge regression of targets on a few numbers a sample.

Legend: N samples, F numbers a sample, P targets.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
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
