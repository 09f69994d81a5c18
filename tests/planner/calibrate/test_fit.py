"""Regressions of times in bytes (tier: no process)."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hyperslab.planner.timing import (
    TURNS,
    _fit_pieces,
    fit_line,
    fit_power,
    geometric_series,
    residual_of,
)

SIZES = [64, 1000, 40_000, 10**6]


@given(st.floats(1e-7, 1e-2), st.floats(1e7, 1e12))
def test_points_on_a_line_are_met(latency: float, bandwidth: float) -> None:
    points = [(n, latency + n / bandwidth) for n in SIZES]
    line = fit_line(points)
    assert line.residual is not None
    assert line.residual.worst < 1e-6
    assert math.isclose(line.latency, latency, rel_tol=1e-3)


@given(st.floats(1e-9, 1e-3), st.floats(0.01, 1.5))
def test_points_of_a_power_are_met(scale: float, exponent: float) -> None:
    power = fit_power([(n, scale * n**exponent) for n in SIZES])
    assert math.isclose(power.scale, scale, rel_tol=1e-6)
    assert math.isclose(power.exponent, exponent, rel_tol=1e-6)


def test_a_latency_is_not_negative() -> None:
    line = fit_line([(100, 1e-6), (10_000, 2e-4)])
    assert line.latency == 0
    assert line.bandwidth > 0


def test_times_that_fall_give_a_flat_line() -> None:
    line = fit_line([(100, 2e-4), (10_000, 1e-4), (20_000, 1e-4)])
    assert 0 < line.seconds(10**6) < 1e-3


def test_residuals_are_shares() -> None:
    residual = residual_of(lambda nbytes: 2.0, [(1, 1.0), (2, 2.0), (3, 4.0)])
    assert residual.median == 0.5
    assert residual.worst == 1.0


def test_sizes_begin_and_end_as_asked() -> None:
    assert geometric_series(64, 1000) == [64, 256, 1000]
    assert geometric_series(64, 64) == [64]


def test_one_disturbed_measurement_changes_no_fit() -> None:
    asked: list[int] = []

    def seconds(nbytes: int) -> float:
        asked.append(nbytes)
        disturbed = asked.count(nbytes) == 2 and nbytes > 1000
        return 3.0 if disturbed else 1e-5 + nbytes / 1e9

    pieces = _fit_pieces(fit_line, seconds, [16384], 1 << 20)
    assert [piece.up_to for piece in pieces] == [16384, None]
    for piece in pieces:
        assert piece.residual is not None
        assert piece.residual.worst < 1e-6
    each = len(asked) // TURNS
    assert asked == TURNS * asked[:each]
    assert len(set(asked)) == each
