"""Regressions of times in bytes, with what they leave over."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from hyperslab.machine.links import Line, Power, Residual

Point = tuple[int, float]
"""Bytes and seconds."""

LEAST = 1e-12  # [s/B] of a line that does not rise


def fit_line(points: Sequence[Point], up_to: int | None = None) -> Line:
    """Latency and bandwidth with the least squares of relative errors."""
    nbytes = np.array([n for n, _ in points], float)
    seconds = np.array([s for _, s in points])
    columns = np.stack([1 / seconds, nbytes / seconds], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
    if latency < 0:  # then through zero
        latency = 0.0
        slope = float(np.sum(nbytes / seconds) / np.sum((nbytes / seconds) ** 2))
    line = Line(up_to=up_to, latency=float(latency), bandwidth=1 / max(float(slope), LEAST))
    return line.model_copy(update={"residual": residual_of(line.seconds, points)})


def fit_power(points: Sequence[Point], up_to: int | None = None) -> Power:
    """Scale and exponent with the least squares of logarithms."""
    logs = np.log([[n, s] for n, s in points])
    exponent, shift = np.polyfit(logs[:, 0], logs[:, 1], 1)
    power = Power(up_to=up_to, scale=float(np.exp(shift)), exponent=float(exponent))
    return power.model_copy(update={"residual": residual_of(power.seconds, points)})


def residual_of(fit: Callable[[float], float], points: Sequence[Point]) -> Residual:
    """How far the points are from a fit, as a share of their times."""
    shares = [abs(fit(nbytes) - seconds) / seconds for nbytes, seconds in points]
    return Residual(median=statistics.median(shares), worst=max(shares))


def sizes(first: int, last: int, factor: int = 4) -> list[int]:
    """[B] from ``first`` to ``last``, both included."""
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return [*found, last] if last > first else found
