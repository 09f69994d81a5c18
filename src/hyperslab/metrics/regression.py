"""Errors of predicted parameters: plain arrays in, plain numbers out.

Legend: N samples, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """What the network said about each sample, beside the truth; float64 throughout.

    ``true`` and ``predicted`` (N, P) are normalised to [-1, 1]; their ``_physical`` twins have
    each parameter's own unit. ``training_mean`` (P,), normalised, is what one would predict
    without looking at the sample; ``training_mean_physical`` (P,) the same in physical units, where
    they are known. ``volumes`` are those that the samples are parts of; empty where that is not
    known.
    """

    names: tuple[str, ...]
    samples: tuple[str, ...]
    true: FloatArray
    predicted: FloatArray
    true_physical: FloatArray
    predicted_physical: FloatArray
    training_mean: FloatArray
    volumes: tuple[str, ...] = ()
    training_mean_physical: FloatArray | None = None


def errors_per_parameter(p: Predictions) -> dict[str, dict[str, float]]:
    """The errors of each parameter by name: those of :func:`errors_of`."""
    return {
        name: errors_of(
            p.true[:, i],
            p.predicted[:, i],
            true_physical=p.true_physical[:, i],
            predicted_physical=p.predicted_physical[:, i],
            training_mean=float(p.training_mean[i]),
            training_mean_physical=(
                None if p.training_mean_physical is None else float(p.training_mean_physical[i])
            ),
        )
        for i, name in enumerate(p.names)
    }


def errors_of(
    true: FloatArray,
    predicted: FloatArray,
    *,
    true_physical: FloatArray,
    predicted_physical: FloatArray,
    training_mean: float,
    training_mean_physical: float | None = None,
) -> dict[str, float]:
    """The errors of one parameter over N samples; arrays are (N,).

    ``mse_of_mean`` is the error of always predicting ``training_mean`` and ``ratio`` is
    ``mse / mse_of_mean``: 1 means that nothing was learnt, 0 is perfect. ``relative_error`` is
    the mean of |predicted - true| / |true| in physical units. ``relative_error_sc18`` is that of
    Mathuriya et al. 2018, section VII-A, who divide by the prediction; to first order it is the
    same. ``relative_error_sc18_of_mean`` is what always predicting ``training_mean_physical`` gives
    by their formula. A number that is not defined, such as the correlation of one sample, is NaN.
    """
    mse = float(np.mean((predicted - true) ** 2))
    mse_of_mean = float(np.mean((training_mean - true) ** 2))
    off = np.abs(predicted_physical - true_physical)
    return {
        **_distances(true, predicted),
        "r2": 1.0 - _divide(mse, float(np.var(true))),
        "correlation": correlation(true, predicted),
        "mse_of_mean": mse_of_mean,
        "ratio": _divide(mse, mse_of_mean),
        **{f"{k}_physical": v for k, v in _distances(true_physical, predicted_physical).items()},
        "relative_error": _mean_relative(off, true_physical),
        "relative_error_sc18": _mean_relative(off, predicted_physical),
        "relative_error_sc18_of_mean": (
            float("nan")
            if training_mean_physical is None
            else _mean_relative(
                np.abs(training_mean_physical - true_physical),
                np.full_like(true_physical, training_mean_physical),
            )
        ),
    }


def _mean_relative(off: FloatArray, to: FloatArray) -> float:
    return float(np.mean(off / np.abs(to))) if np.all(to) else float("nan")


def correlation(a: FloatArray, b: FloatArray) -> float:
    """Pearson's correlation of two arrays (N,); NaN where one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")  # a mean of equal numbers rounds: do not correlate what is left
    a = a - a.mean()
    b = b - b.mean()
    return _divide(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))


def means_over_parameters(errors: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The normalised errors, averaged over the parameters: the loss that the training saw."""
    rows: Sequence[Mapping[str, float]] = list(errors.values())
    means = {k: float(np.mean([row[k] for row in rows])) for k in ("mse", "mae", "mse_of_mean")}
    return {**means, "ratio": _divide(means["mse"], means["mse_of_mean"])}


def _distances(true: FloatArray, predicted: FloatArray) -> dict[str, float]:
    off = predicted - true
    mse = float(np.mean(off**2))
    return {
        "mse": mse,
        "mae": float(np.mean(np.abs(off))),
        "rmse": float(np.sqrt(mse)),
        "bias": float(np.mean(off)),
    }


def _divide(a: float, b: float) -> float:
    return a / b if b > 0 else float("nan")
