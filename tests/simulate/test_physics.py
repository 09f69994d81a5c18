"""Universes against linear theory that shares no code with them (tier: no process).

Their 20 seconds are spent where something of the simulation has changed: see .ci/run.
"""

from __future__ import annotations

import numpy as np
import pytest

from hyperslab.simulate.nbody import FIRST_A, REDSHIFTS, Nbody, scale_factors
from hyperslab.simulate.parameters import UniverseSettings, draw_universe
from tests.simulate import theory

PARTICLES, SIZE, BOX = 64, 32, 256.0  # [Mpc/h]: modes down to k = 0.025 h/Mpc
FIDUCIAL = (0.3, 0.8, 0.96, 70.0)
SEEDS = 3

Counts = np.ndarray


@pytest.fixture(scope="module")
def nbody() -> Nbody:
    return Nbody(size=SIZE, particles=PARTICLES, steps=10)


@pytest.fixture(scope="module")
def universes(nbody: Nbody) -> list[Counts]:
    return [run(nbody, FIDUCIAL, seed) for seed in range(SEEDS)]


def run(nbody: Nbody, parameters: tuple[float, ...], seed: int) -> Counts:
    return nbody(np.array(parameters), BOX, draw_universe(seed, 0).noise)


@pytest.mark.long
def test_every_particle_is_counted_once(universes: list[Counts]) -> None:
    for counts in universes:
        assert list(counts.sum((0, 1, 2))) == [PARTICLES**3] * 4
        assert counts.mean() == (PARTICLES / SIZE) ** 3


@pytest.mark.long
@pytest.mark.parametrize("channel", [1, 2, 3])
def test_large_scales_grow_as_linear_theory_says(universes: list[Counts], channel: int) -> None:
    """Within 3 %: the same modes at two redshifts, so that their chance amplitude drops out."""
    now, then = 0.0, 0.0
    for counts in universes:
        k, today = theory.modes(counts[..., 0], BOX)
        _, early = theory.modes(counts[..., channel], BOX)
        largest = (k > 0) & (k < 0.08)
        now += float((np.abs(today[largest]) ** 2).sum())
        then += float((today[largest].conj() * early[largest]).real.sum())
    expected = theory.growth(1 / (1 + REDSHIFTS[channel]), FIDUCIAL[0])
    assert then / now == pytest.approx(expected, rel=0.03)


@pytest.mark.long
def test_growth_slows_with_less_matter(nbody: Nbody, universes: list[Counts]) -> None:
    """The reference is not flat in Omega_m, so that the test above can tell two universes apart."""
    light = run(nbody, (0.24, *FIDUCIAL[1:]), 0)
    k, today = theory.modes(light[..., 0], BOX)
    _, early = theory.modes(light[..., 3], BOX)
    largest = (k > 0) & (k < 0.08)
    ratio = (today[largest].conj() * early[largest]).real.sum() / (abs(today[largest]) ** 2).sum()
    assert ratio == pytest.approx(theory.growth(0.25, 0.24), rel=0.03)
    assert theory.growth(0.25, 0.24) / theory.growth(0.25, 0.3) > 1.03


@pytest.mark.long
def test_power_today_is_linear_at_large_scales(universes: list[Counts]) -> None:
    """Within 15 %: chance is 5 % in three boxes, nonlinear growth and wiggles a few per cent."""
    ratios = []
    for counts in universes:
        measured, k = theory.power(counts[..., 0], BOX, 0.05, 0.15)
        linear = theory.linear_power(k, 0.3, 0.8, 0.96, 0.7).mean()
        ratios.append(measured / linear)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.15)


@pytest.mark.long
def test_power_rises_with_sigma_8(nbody: Nbody, universes: list[Counts]) -> None:
    high = run(nbody, (0.3, 0.96, 0.96, 70.0), 0)
    low = run(nbody, (0.3, 0.64, 0.96, 70.0), 0)
    for channel in range(4):
        for band in ((0.02, 0.08), (0.08, 0.2), (0.2, 0.39)):
            powers = [
                theory.power(counts[..., channel], BOX, *band)[0]
                for counts in (low, universes[0], high)
            ]
            assert powers == sorted(powers)
    large = [theory.power(counts[..., 0], BOX, 0.02, 0.08)[0] for counts in (low, high)]
    assert large[1] / large[0] == pytest.approx((0.96 / 0.64) ** 2, rel=0.05)


@pytest.mark.long
def test_the_same_noise_gives_the_same_counts(nbody: Nbody, universes: list[Counts]) -> None:
    np.testing.assert_array_equal(run(nbody, FIDUCIAL, 0), universes[0])
    assert (universes[1] != universes[0]).mean() > 0.3


def test_all_universes_have_the_same_side_in_megaparsecs() -> None:
    settings = UniverseSettings(
        size=8, box_size=512.0, seed=0, parameters=("H_0",), particles=8, steps=10
    )
    assert settings.side(70.0) == 512.0
    assert settings.side(77.0) / 0.77 == pytest.approx(settings.side(63.0) / 0.63)


@pytest.mark.parametrize("steps", [1, 4, 10, 37])
def test_steps_meet_the_redshifts(steps: int) -> None:
    segments = scale_factors(steps)
    assert [s[-1] for s in segments] == pytest.approx([0.25, 0.4, 1 / 1.5, 1.0])
    edges = np.concatenate([[FIRST_A], *[s[1:] for s in segments]])
    assert np.all(np.diff(edges) > 0)
    assert np.diff(edges).max() <= 0.9 / steps + 1e-12
