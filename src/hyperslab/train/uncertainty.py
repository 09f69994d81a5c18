"""Measures whether predicted uncertainties are right: rank statistics on samples never seen.

A prediction is a normal distribution of P parameters, means and covariance. The rank of a true
value is the probability that the distribution gives to smaller ones (the probability integral
transform, Dawid 1984): uniform from 0 to 1 over the samples if predictions are calibrated. The
level of a true value is that of the narrowest interval around the mean, or of the smallest
ellipsoid for all parameters together, which still holds it: the share of levels up to 0.68 is the
coverage of 68 % intervals, and levels are uniform as well.

Parts of a volume are not independent of each other: intervals and tests count volumes, as if all
parts of one said the same, and so are never too sure.

Legend: N samples, P parameters, V volumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyperslab.formats.targets import Parameters
from hyperslab.train.metrics import FloatArray, Predictions

LEVELS = (68, 95)  # [%] of the intervals whose coverage is measured
NORMAL_95 = 1.959963984540054  # standard deviations either side that hold 95 % of a normal


def moments_of(outputs: FloatArray, parameters: int) -> tuple[FloatArray, FloatArray | None]:
    """Return means (N, P) and covariances (N, P, P) of a network's outputs; None where it has none.

    Outputs are as many as the ``parameters``, or what `hyperslab.losses.gaussian_loss` takes.
    """
    if outputs.shape[1] == parameters:
        return outputs, None
    import torch

    from hyperslab.losses import gaussian_moments

    mean, covariance = gaussian_moments(torch.from_numpy(outputs))
    return mean.numpy(), covariance.numpy()


def standard_deviations(covariance: FloatArray) -> FloatArray:
    """Return the standard deviations (N, P) of covariances (N, P, P)."""
    found: FloatArray = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    return found


def spread_columns(parameters: Parameters, covariance: FloatArray | None) -> dict[str, FloatArray]:
    """Return columns (N,) of a table: deviations, normalised and physical, and covariances."""
    names = parameters.names
    physical = parameters.physical_covariance(covariance)
    if covariance is None or physical is None:
        return {}
    found: dict[str, FloatArray] = {}
    for kind, values in (("std", covariance), ("std_phys", physical)):
        deviations = standard_deviations(values).T
        found |= {f"{kind}_{name}": row for name, row in zip(names, deviations, strict=True)}
    for i, name in enumerate(names):
        for j, other in enumerate(names[:i]):
            found[f"covariance_{name}_{other}"] = covariance[:, i, j]
    return found


def ranks_of(true: FloatArray, predicted: FloatArray, deviation: FloatArray) -> FloatArray:
    """Return the rank of each true value in its normal distribution, all of one shape."""
    off = (predicted - true) / (deviation * math.sqrt(2))
    ranks: FloatArray = np.vectorize(math.erfc, otypes=[float])(off) / 2
    return ranks


def levels_of(ranks: FloatArray) -> FloatArray:
    """Return the levels of the narrowest central intervals that hold values of these ranks."""
    return np.abs(2 * ranks - 1)


def binomial_band(share: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """Return the ends between which 95 % of shares among ``count`` are, if ``share`` is true."""
    reach = NORMAL_95 * np.sqrt(share * (1 - share) / count)
    return np.clip(share - reach, 0, 1), np.clip(share + reach, 0, 1)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a binomial's probability (Wilson 1927).

    It holds what `binomial_band` finds compatible with a ``share`` seen among ``count``.
    """
    square = NORMAL_95**2 / count
    middle = share + square / 2
    if math.isnan(share):
        return share, share
    reach = math.sqrt(square * (share * (1 - share) + square / 4))
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


def distance_to_uniform(values: FloatArray) -> float:
    """Return Kolmogorov's and Smirnov's distance of values from 0 to 1 to the uniform ones."""
    ordered = np.sort(values)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def uniform_probability(distance: float, count: int) -> float:
    """Return the probability of such a distance or a larger one among uniform values.

    It is twice the exact one of the one-sided test (Birnbaum and Tingey 1951), which is never too
    small, and larger by at most a hundredth where it is below 0.2. NaN where the distance is.
    """
    if not 0 < distance < 1:
        return float("nan") if math.isnan(distance) else float(distance <= 0)
    total = 0.0
    for j in range(math.floor(count * (1 - distance)) + 1):
        rest = 1 - distance - j / count
        if rest > 0:
            ways = math.lgamma(count + 1) - math.lgamma(j + 1) - math.lgamma(count - j + 1)
            powers = (j - 1) * math.log(distance + j / count) + (count - j) * math.log(rest)
            total += math.exp(ways + powers)
    return min(1.0, 2 * distance * total)


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """Holds the ranks and levels (N,) of true values, of one parameter or of all together.

    ``square`` is the mean of (true - predicted) over its standard deviation, squared: 1 if
    calibrated, more if overconfident. All together have levels for ranks.
    """

    ranks: FloatArray
    levels: FloatArray
    square: float

    def coverage(self, level: FloatArray | float) -> FloatArray:
        """Return the shares of true values in intervals of a level; NaN if one is not known."""
        shares = (self.levels <= np.asarray(level)[..., None]).mean(-1)
        return np.where(np.isnan(self.levels).any(), np.nan, shares)

    def facts(self, volumes: int) -> dict[str, Any]:
        """Return plain numbers: coverage with its intervals, and a test of the ranks."""
        found: dict[str, Any] = {}
        for level in LEVELS:
            share = float(self.coverage(level / 100))
            found[f"coverage_{level}"] = share
            found[f"coverage_{level}_interval"] = list(wilson_interval(share, volumes))
        distance = distance_to_uniform(self.ranks)
        probability = uniform_probability(distance, volumes)
        square = {"mean_squared_residual": self.square}
        return found | square | {"ks_distance": distance, "ks_probability": probability}


@np.errstate(divide="ignore", invalid="ignore")
def rank_statistics(p: Predictions) -> tuple[dict[str, RankStatistics], RankStatistics]:
    """Return those of each parameter by name, and those of all together.

    The latter are NaN for samples whose covariance has no inverse.
    """
    import torch

    assert p.covariance is not None
    off = p.true - p.predicted
    count = off.shape[1]
    deviation = standard_deviations(p.covariance)
    ranks = ranks_of(p.true, p.predicted, deviation)
    squares = np.mean((off / deviation) ** 2, axis=0).tolist()
    each = zip(p.names, ranks.T, squares, strict=True)
    # Of correlations, whatever the scales: some deviations may be a billion times others.
    correlation = p.covariance / (deviation[:, :, None] * deviation[:, None, :])
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(correlation))
    scaled = torch.from_numpy(off / deviation).unsqueeze(-1)
    white = torch.linalg.solve_triangular(factor, scaled, upper=False)
    distances = white.square().sum((1, 2)).where(failed == 0, torch.nan).numpy()
    half = torch.from_numpy(distances / 2)
    levels = torch.special.gammainc(torch.full_like(half, count / 2), half).numpy()
    return (
        {name: RankStatistics(rank, levels_of(rank), square) for name, rank, square in each},
        RankStatistics(levels, levels, float(np.mean(distances)) / count),
    )


def uncertainty_of(p: Predictions) -> dict[str, Any]:
    """Return the facts of each parameter and of all together; empty without a covariance."""
    if p.covariance is None:
        return {}
    volumes = len(set(p.volumes or p.samples))
    each, joint = rank_statistics(p)
    return {
        "volumes": volumes,
        "parameters": {name: found.facts(volumes) for name, found in each.items()},
        "joint": joint.facts(volumes),
    }
