"""Calibration of predicted uncertainties, by hand and by SciPy (tier: no process)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from hyperslab.formats.targets import Parameters
from hyperslab.train.metrics import Predictions, averaged_over_volumes, calibration_of, recalibrated
from hyperslab.train.uncertainty import (
    binomial_band,
    distance_to_uniform,
    levels_of,
    moments_of,
    ranks_of,
    spread_columns,
    uncertainty_of,
    uniform_probability,
    wilson_interval,
)

NAMES = ("Omega_m", "sigma_8", "n_s")
PARAMETERS = Parameters(NAMES, (0.0, 0.0, 0.0), (0.03, 0.08, 7.0))


def drawn(samples: int, *, width: float = 1.0, shift: float = 0.0, parts: int = 1) -> Predictions:
    """Truths from normal distributions of a covariance each, which are predicted ``width`` wide.

    ``parts`` of a volume have one truth and one prediction.
    """
    random = np.random.default_rng(5)
    roots = np.tril(random.normal(0, 0.2, (samples, 3, 3)), -1) + 0.3 * np.eye(3)
    mean = random.uniform(-1, 1, (samples, 3))
    off = (roots @ random.standard_normal((samples, 3, 1)))[..., 0]
    covariance = width**2 * roots @ roots.transpose(0, 2, 1)
    true, predicted, covariance = (
        np.repeat(values, parts, axis=0) for values in (mean + off + shift, mean, covariance)
    )
    names = [str(i) for i in range(samples * parts)]
    return Predictions(
        PARAMETERS,
        tuple(names),
        true,
        predicted,
        np.zeros(3),
        tuple(str(int(name) // parts) for name in names),
        covariance=covariance,
    )


def test_a_calibrated_prediction_passes() -> None:
    found = uncertainty_of(drawn(400))
    assert found["volumes"] == 400
    for row in (*found["parameters"].values(), found["joint"]):
        for level in (68, 95):
            lower, upper = row[f"coverage_{level}_interval"]
            assert lower < level / 100 < upper
        assert row["ks_probability"] > 0.01
        assert row["mean_squared_residual"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(("width", "sure"), [(0.6, True), (1.7, False)])
def test_too_sure_and_too_unsure_predictions_fail(width: float, sure: bool) -> None:
    found = uncertainty_of(drawn(400, width=width))
    for row in (*found["parameters"].values(), found["joint"]):
        lower, upper = row["coverage_68_interval"]
        assert upper < 0.68 if sure else lower > 0.68
        assert row["ks_probability"] < 0.01
        assert row["mean_squared_residual"] == pytest.approx(width**-2, rel=0.2)


def test_scales_far_apart_are_no_degenerate_covariance() -> None:
    p = drawn(400)
    scale = np.array([1e-12, 1.0, 1e12])
    assert p.covariance is not None
    far = replace(
        p,
        true=p.true * scale,
        predicted=p.predicted * scale,
        covariance=p.covariance * np.outer(scale, scale),
    )
    found, expected = uncertainty_of(far)["joint"], uncertainty_of(p)["joint"]
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key


def test_one_degenerate_covariance_is_not_a_coverage_of_nothing() -> None:
    p = drawn(20)
    assert p.covariance is not None
    covariance = p.covariance.copy()
    covariance[3] = 1.0
    found = uncertainty_of(replace(p, covariance=covariance))
    assert np.isnan([found["joint"]["coverage_68"], *found["joint"]["coverage_68_interval"]]).all()
    assert found["parameters"]["n_s"]["coverage_95"] > 0.5


def test_a_bias_shows_in_ranks() -> None:
    found = uncertainty_of(drawn(400, shift=0.2))["parameters"]
    assert all(row["ks_probability"] < 1e-4 for row in found.values())


def test_wrong_correlations_show_in_all_parameters_together_alone() -> None:
    p = drawn(400)
    assert p.covariance is not None
    sign = np.array([1, -1, 1])
    found = uncertainty_of(replace(p, covariance=p.covariance * np.outer(sign, sign)))
    assert found["parameters"] == uncertainty_of(p)["parameters"]
    assert found["joint"]["mean_squared_residual"] > 1.2
    assert found["joint"]["ks_probability"] < 0.01


def test_parts_of_a_volume_count_once() -> None:
    one, parts = uncertainty_of(drawn(40)), uncertainty_of(drawn(40, parts=8))
    assert parts["volumes"] == one["volumes"] == 40
    for name in NAMES:
        for key, value in one["parameters"][name].items():
            assert parts["parameters"][name][key] == pytest.approx(value)


def test_averages_and_recalibrated_predictions_have_no_covariance() -> None:
    p = drawn(20, parts=2)
    averaged = averaged_over_volumes(p)
    line = recalibrated(p, calibration_of(p))
    for other in (averaged, line):
        assert other.covariance is None
        assert uncertainty_of(other) == {}


def test_ranks_and_levels_are_scipys() -> None:
    true, predicted = np.array([0.3, -1.0, 2.0]), np.array([0.1, 0.5, 2.0])
    deviation = np.array([0.2, 0.5, 3.0])
    ranks = ranks_of(true, predicted, deviation)
    np.testing.assert_allclose(ranks, scipy.stats.norm.cdf(true, predicted, deviation), rtol=1e-12)
    np.testing.assert_allclose(levels_of(ranks), [0.682689, 0.997300, 0], atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 819])
def test_the_test_of_uniformity_is_scipys(count: int) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).beta(1 + seed / 40, 1, count)
        expected = scipy.stats.ks_1samp(values, scipy.stats.uniform.cdf, method="exact")
        distance = distance_to_uniform(values)
        assert distance == pytest.approx(expected.statistic)
        found = uniform_probability(distance, count)
        assert expected.pvalue <= found * (1 + 1e-9)
        if expected.pvalue < 0.2:
            assert found == pytest.approx(expected.pvalue, rel=0.01)


def test_ends_of_the_test_of_uniformity() -> None:
    assert uniform_probability(0.0, 5) == 1
    assert uniform_probability(1.0, 5) == 0
    assert np.isnan(uniform_probability(float("nan"), 5))


@pytest.mark.parametrize("count", [1, 9, 200])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.68, 1.0])
def test_wilsons_interval_is_scipys_and_the_bands_other_side(count: int, share: float) -> None:
    seen = round(share * count)
    found = wilson_interval(seen / count, count)
    expected = scipy.stats.binomtest(seen, count).proportion_ci(method="wilson")
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    for true in found:
        lower, upper = binomial_band(np.array(true), count)
        inside = min(abs(float(lower) - seen / count), abs(float(upper) - seen / count))
        assert inside < 1e-9 or true in (0.0, 1.0)


def test_columns_are_deviations_and_the_lower_triangle() -> None:
    p = drawn(6)
    assert p.covariance is not None
    columns = spread_columns(PARAMETERS, p.covariance)
    assert list(columns) == [
        *(f"{kind}_{name}" for kind in ("std", "std_phys") for name in NAMES),
        "covariance_sigma_8_Omega_m",
        "covariance_n_s_Omega_m",
        "covariance_n_s_sigma_8",
    ]
    np.testing.assert_allclose(columns["std_n_s"] ** 2, p.covariance[:, 2, 2])
    np.testing.assert_allclose(columns["std_phys_n_s"], 7 * columns["std_n_s"])
    np.testing.assert_array_equal(columns["covariance_n_s_sigma_8"], p.covariance[:, 2, 1])
    assert spread_columns(PARAMETERS, None) == {}


def test_as_many_outputs_as_parameters_are_means_alone() -> None:
    outputs = np.random.default_rng(0).normal(size=(3, 14))
    means, covariance = moments_of(outputs, 14)
    assert covariance is None
    np.testing.assert_array_equal(means, outputs)
    means, covariance = moments_of(outputs, 4)
    assert covariance is not None
    assert means.shape == (3, 4)
    assert covariance.shape == (3, 4, 4)


def test_what_is_not_finite_or_not_invertible_is_no_number() -> None:
    p = drawn(6)
    assert p.covariance is not None
    flat = uncertainty_of(replace(p, covariance=np.ones_like(p.covariance)))
    assert np.isnan(flat["joint"]["mean_squared_residual"])
    assert np.isfinite(flat["parameters"]["n_s"]["ks_probability"])
    p.predicted[2, 1] = np.nan
    broken = uncertainty_of(p)["parameters"]
    assert np.isnan(broken["sigma_8"]["ks_probability"])
    assert np.isnan(broken["sigma_8"]["coverage_95"])
    assert np.isfinite(broken["n_s"]["ks_probability"])
