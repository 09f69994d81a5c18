"""The draw of the parameters (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.simulate.parameters import NAMES, PARAMETERS, check_names, draw_universe


def test_fiducial_and_order() -> None:
    assert NAMES == ("Omega_m", "sigma_8", "n_s", "H_0")
    assert [p.fiducial for p in PARAMETERS] == [0.3, 0.8, 0.96, 70.0]


def test_draws_fill_the_ranges_evenly() -> None:
    units = np.array([draw_universe(3, index).unit for index in range(2000)])
    for column in units.T:
        counts, _ = np.histogram(column, 8, (-1.0, 1.0))
        assert counts.sum() == 2000  # none outside
        assert np.all(np.abs(counts - 250) < 75)  # five standard deviations
    assert np.abs(np.corrcoef(units.T) - np.eye(4)).max() < 0.1


def test_physical_is_the_position_in_the_range() -> None:
    one = draw_universe(0, 5)
    low = np.array([0.24, 0.64, 0.90, 63.0])
    high = np.array([0.36, 0.96, 1.02, 77.0])
    np.testing.assert_allclose(one.physical, low + (high - low) * (one.unit + 1) / 2, rtol=1e-12)


def test_what_does_not_vary_is_fiducial_and_changes_nothing_else() -> None:
    one, all_four = draw_universe(2, 7, ["sigma_8"]), draw_universe(2, 7)
    assert list(one.unit) == [0, all_four.unit[1], 0, 0]
    assert list(one.physical) == [0.3, all_four.physical[1], 0.96, 70.0]
    assert list(one.noise) == list(all_four.noise)


def test_universes_differ_by_index_and_by_seed() -> None:
    drawn = [draw_universe(seed, index) for seed in range(4) for index in range(50)]
    assert len({tuple(d.noise) for d in drawn}) == 200
    assert len({tuple(d.unit) for d in drawn}) == 200


def test_names_are_put_in_order() -> None:
    assert check_names(["H_0", "sigma_8", "H_0"]) == ("sigma_8", "H_0")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("sigma8", "sigma_8"), ("omega_M", "Omega_m"), ("h0", "H_0"), ("ns", "n_s")],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(DataError, match=f"{wrong}.*did you mean '{meant}'"):
        check_names(["n_s", wrong])


def test_no_name_at_all_is_refused() -> None:
    with pytest.raises(DataError, match="Omega_m"):
        check_names([])
