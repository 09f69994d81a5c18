"""Intervals against distributions that are known (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hyperslab.train.metrics import bootstrap_means, ratio_interval

VOLUMES = 40


def made(
    random: np.random.Generator, ratio: float, seeds: int, spread: float, shape: float
) -> list[NDArray[np.float64]]:
    """Errors of two networks whose expectations differ by ``ratio``.

    Volumes are hard or easy for both alike; seeds are good or bad for all volumes, by ``spread``;
    and there is chance besides, less where ``shape`` is large.
    """
    hard = random.gamma(4, 1 / 4, VOLUMES)
    found = []
    for scale in (ratio, 1.0):
        of_seed = random.lognormal(-(spread**2) / 2, spread, (seeds, 1))
        found.append(scale * of_seed * hard * random.gamma(shape, 1 / shape, (seeds, VOLUMES)))
    return found


def share_that_holds(ratio: float, seeds: int, spread: float, shape: float) -> float:
    """Of 400 intervals, how many hold the true ratio."""
    random = np.random.default_rng(7)
    held = 0
    for _ in range(400):
        errors = made(random, ratio, seeds, spread, shape)
        found = ratio_interval(*errors, replicates=1000)
        held += found.lower <= ratio <= found.upper
    return held / 400


def test_nineteen_of_twenty_intervals_hold_the_true_ratio_of_two_networks() -> None:
    assert 0.91 <= share_that_holds(3.0, seeds=1, spread=0.0, shape=2) <= 0.98


@pytest.mark.long
def test_many_seeds_of_different_luck_are_counted() -> None:
    assert 0.91 <= share_that_holds(3.0, seeds=20, spread=0.4, shape=50) <= 0.98


def test_intervals_are_wide_rather_than_narrow_where_chance_is_of_both() -> None:
    assert share_that_holds(3.0, seeds=4, spread=0.02, shape=2) > 0.97


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    random = np.random.default_rng(3)
    errors = random.normal(5.0, 1.0, (1, 400))
    (means,) = bootstrap_means([errors])
    lower, upper = np.quantile(means, [0.025, 0.975])
    half = 1.96 * errors.std() / np.sqrt(400)
    assert means.mean() == pytest.approx(errors.mean(), abs=0.1 * half)
    assert lower == pytest.approx(errors.mean() - half, abs=0.1 * half)
    assert upper == pytest.approx(errors.mean() + half, abs=0.1 * half)


def test_seeds_alone_make_the_interval_where_all_volumes_are_alike() -> None:
    of_seeds = np.array([1.0, 2.0, 6.0])
    (means,) = bootstrap_means([np.repeat(of_seeds[:, None], 50, 1)])
    assert means.std() == pytest.approx(of_seeds.std() / np.sqrt(3), rel=0.03)


def test_volumes_that_are_drawn_together_cancel_in_a_ratio() -> None:
    hard = np.random.default_rng(1).gamma(0.5, 1, (1, 40))
    paired = ratio_interval(3 * hard, hard)
    assert (paired.lower, paired.upper) == pytest.approx((3.0, 3.0))
    lower, upper = np.quantile(bootstrap_means([hard]), [0.025, 0.975])
    assert upper / lower > 1.5


def test_the_means_are_those_of_plain_loops() -> None:
    random = np.random.default_rng(11)
    errors = [random.random((2, 3)), random.random((1, 3))]
    means = bootstrap_means(errors, replicates=20_000, seed=5)
    again = bootstrap_means(errors, replicates=20_000, seed=5)
    np.testing.assert_array_equal(means, again)
    loops = []
    for _ in range(5000):
        volumes = random.integers(0, 3, 3)
        loops.append([e[random.integers(0, len(e), len(e))][:, volumes].mean() for e in errors])
    expected = np.array(loops).T
    np.testing.assert_allclose(means.mean(1), expected.mean(1), rtol=0.02)
    np.testing.assert_allclose(np.cov(means), np.cov(expected), rtol=0.15, atol=2e-4)


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 4)], [(2, 0)], [(0, 3)]])
def test_what_cannot_be_compared(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="all of the same volumes"):
        bootstrap_means([np.ones(shape) for shape in shapes])
