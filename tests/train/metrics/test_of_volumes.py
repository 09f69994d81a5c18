"""Averages over volumes and lines that recalibrate them (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest

from hyperslab.formats.targets import Parameters
from hyperslab.train.metrics import (
    Predictions,
    averaged_over_volumes,
    calibration_of,
    errors_per_parameter,
    fit_calibration,
    means_of_volumes,
    recalibrated,
)

NAMES = ("Omega_m", "H_0")


def hedging(volumes: int, parts: int, seed: int) -> Predictions:
    """Parts that see the truth through noise and answer with the posterior mean."""
    random = np.random.default_rng(seed)
    true = np.repeat(random.uniform(-1, 1, (volumes, 2)), parts, 0)
    seen = true + random.normal(0, 1.5, true.shape)
    names = [f"u{volume}" for volume in range(volumes) for _ in range(parts)]
    shuffled = random.permutation(len(names))
    predicted = (0.13 * seen)[shuffled]
    true = true[shuffled]
    order = tuple(names[i] for i in shuffled)
    samples = tuple(f"{name}_{i}" for i, name in enumerate(order))
    scaled = Parameters(NAMES, (1.0, 1.0), (3.0, 3.0))
    return Predictions(scaled, samples, true, predicted, np.zeros(2), order)


def test_means_are_those_of_plain_loops() -> None:
    p = hedging(5, 3, 1)
    whole = averaged_over_volumes(p)
    assert whole.samples == whole.volumes == ("u0", "u1", "u2", "u3", "u4")
    for i, name in enumerate(whole.samples):
        rows = [k for k, volume in enumerate(p.volumes) if volume == name]
        assert len(rows) == 3
        for field in ("true", "predicted", "true_physical", "predicted_physical"):
            expected = sum(getattr(p, field)[k] for k in rows) / 3
            np.testing.assert_allclose(getattr(whole, field)[i], expected)


def test_volumes_may_have_another_number_of_samples() -> None:
    found = means_of_volumes(np.array([1.0, 5.0, 3.0]), ["b", "a", "b"])
    np.testing.assert_array_equal(found, [5.0, 2.0])


def test_lines_are_those_of_numpy() -> None:
    random = np.random.default_rng(2)
    predicted = random.normal(size=(30, 2))
    true = predicted * [2.0, -0.5] + [0.3, 1.0] + random.normal(0, 0.1, (30, 2))
    lines = fit_calibration(predicted, true)
    for i in range(2):
        slope, intercept = np.polyfit(predicted[:, i], true[:, i], 1)
        assert lines.slope[i] == pytest.approx(slope)
        assert lines.intercept[i] == pytest.approx(intercept)


def test_a_constant_prediction_becomes_the_mean_of_the_truths() -> None:
    lines = fit_calibration(np.full((4, 1), 0.1), np.array([[1.0], [2.0], [3.0], [6.0]]))
    np.testing.assert_allclose(lines(np.array([[0.1], [9.0]])), 3.0)


def test_averages_of_hedging_parts_need_recalibration() -> None:
    test = averaged_over_volumes(hedging(60, 64, 3))
    lines = calibration_of(hedging(60, 64, 4))
    better = recalibrated(test, lines)
    for name in NAMES:
        plain = errors_per_parameter(test)[name]["ratio"]
        assert plain > 0.6, "an average of cautious answers is cautious"
        assert errors_per_parameter(better)[name]["ratio"] < 0.2
    np.testing.assert_allclose(better.predicted_physical, 3 * better.predicted + 1)
