"""Errors of parameters against plain loops and numpy's own statistics (tier: no process)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from hyperslab.formats.targets import Parameters
from hyperslab.train.metrics import (
    Predictions,
    correlation,
    errors_of,
    errors_per_parameter,
    means_over_parameters,
)

NAMES = ("Omega_m", "H_0")


def predictions(samples: int = 7) -> Predictions:
    rng = np.random.default_rng(3)
    true = rng.uniform(-1, 1, (samples, 2))
    predicted = true + rng.normal(0.1, 0.3, true.shape)
    return Predictions(
        Parameters(NAMES, (0.3, 70.0), (0.03, 7.0)),
        tuple(map(str, range(samples))),
        true,
        predicted,
        np.array([0.2, -0.05]),
    )


@pytest.mark.parametrize("index", [0, 1])
def test_against_plain_loops(index: int) -> None:
    p = predictions()
    errors = errors_per_parameter(p)[NAMES[index]]
    t, q = p.true[:, index].tolist(), p.predicted[:, index].tolist()
    n, mean = len(t), float(p.training_mean[index])
    mse = sum((b - a) ** 2 for a, b in zip(t, q, strict=True)) / n
    of_mean = sum((mean - a) ** 2 for a in t) / n
    middle = sum(t) / n
    assert errors["mse"] == pytest.approx(mse)
    assert errors["rmse"] == pytest.approx(math.sqrt(mse))
    assert errors["mae"] == pytest.approx(sum(abs(b - a) for a, b in zip(t, q, strict=True)) / n)
    assert errors["bias"] == pytest.approx((sum(q) - sum(t)) / n)
    assert errors["mse_of_mean"] == pytest.approx(of_mean)
    assert errors["ratio"] == pytest.approx(mse / of_mean)
    assert errors["r2"] == pytest.approx(1 - n * mse / sum((a - middle) ** 2 for a in t))
    assert errors["correlation"] == pytest.approx(np.corrcoef(t, q)[0, 1])


def test_physical_errors_are_scaled_and_relative_to_the_truth() -> None:
    p = predictions()
    errors = errors_per_parameter(p)["H_0"]
    for key in ("mae", "rmse", "bias"):
        assert errors[f"{key}_physical"] == pytest.approx(7.0 * errors[key])
    assert errors["mse_physical"] == pytest.approx(49.0 * errors["mse"])
    relative = abs(p.predicted_physical[:, 1] / p.true_physical[:, 1] - 1).mean()
    assert errors["relative_error"] == pytest.approx(relative)


def test_relative_errors_of_the_paper_divide_by_the_prediction() -> None:
    p = predictions()
    mean = np.array([0.306, 69.65])
    for i, name in enumerate(NAMES):
        errors = errors_per_parameter(p)[name]
        true = p.true_physical[:, i].tolist()
        found = p.predicted_physical[:, i].tolist()
        expected = sum(abs(b - a) / b for a, b in zip(true, found, strict=True)) / len(true)
        assert errors["relative_error_sc18"] == pytest.approx(expected, rel=1e-12)
        assert errors["relative_error_sc18"] != pytest.approx(errors["relative_error"], rel=1e-6)
        of_mean = sum(abs(mean[i] - a) / mean[i] for a in true) / len(true)
        assert errors["relative_error_sc18_of_mean"] == pytest.approx(of_mean, rel=1e-12)


def test_a_relative_error_to_nothing_is_not_defined() -> None:
    ones = np.ones((2, 1))
    scaled = Parameters(("a",), (0.0,), (1.0,))
    p = Predictions(scaled, ("0", "1"), ones, np.array([[1.0], [0.0]]), np.zeros(1))
    errors = errors_of(p, 0)
    assert errors["relative_error"] == 0.5
    assert math.isnan(errors["relative_error_sc18"])
    assert math.isnan(errors["relative_error_sc18_of_mean"])


def test_the_mean_is_that_of_the_training_split() -> None:
    p = predictions()
    same = np.broadcast_to(p.training_mean, p.true.shape)
    shifted = errors_of(dataclasses.replace(p, predicted=same), 0)
    assert shifted["ratio"] == pytest.approx(1.0)
    assert shifted["r2"] < 0, "the mean of the test split would have been better"


def test_one_sample_and_constant_predictions_are_not_defined_rather_than_wrong() -> None:
    errors = errors_per_parameter(predictions(1))["Omega_m"]
    assert math.isnan(errors["r2"])
    assert math.isnan(errors["correlation"])
    assert math.isnan(correlation(np.full(9, 0.1), np.linspace(0, 1, 9)))
    assert errors["ratio"] >= 0


def test_means_weigh_all_parameters_alike() -> None:
    errors = errors_per_parameter(predictions())
    means = means_over_parameters(errors)
    a, b = (errors[name] for name in NAMES)
    assert means["mse"] == pytest.approx((a["mse"] + b["mse"]) / 2)
    assert means["ratio"] == pytest.approx(
        (a["mse"] + b["mse"]) / (a["mse_of_mean"] + b["mse_of_mean"])
    )
