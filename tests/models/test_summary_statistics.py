"""Statistics of volumes, against sums over all modes, triangles and cells (tier: no process)."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from summary_statistics import EvenBins, bispectra, shells

from hyperslab.models import summary_statistics as measures
from hyperslab.models.summary_statistics import Modes, OctaveBins

Numbers = NDArray[np.float64]

EXTENTS = [(8, 8, 8), (5, 8, 6)]


def noise(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(0.3, 1, shape))


def slow_modes(field: Numbers) -> dict[tuple[int, ...], complex]:
    """All modes of a field (D, H, W) but its mean, by signed number, each by a sum over voxels."""
    places = np.meshgrid(*(np.arange(n) for n in field.shape), indexing="ij")
    found = {}
    for mode in product(*(range(-(n // 2), n - n // 2) for n in field.shape)):
        phase = sum(m * at / n for m, at, n in zip(mode, places, field.shape, strict=True))
        found[mode] = complex((field * np.exp(-2j * np.pi * phase)).mean())
    del found[0, 0, 0]
    return found


def wave_number(mode: tuple[int, ...], extents: tuple[int, ...], width: int) -> float:
    return width * math.hypot(*(m / n for m, n in zip(mode, extents, strict=True)))


def even(k: float) -> int:
    return max(0, round(k) - 1)


def by_octave(k: float) -> int:
    """Counts thirds of octaves below k; comparisons alone, no logarithm."""
    return sum(k**3 >= 2**third * (1 - 1e-6) for third in range(1, 40))


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize(("bins", "slow"), [(EvenBins, even), (OctaveBins, by_octave)])
def test_powers_are_means_over_modes(
    bins: type[OctaveBins], slow: object, extents: tuple[int, ...]
) -> None:
    fields = noise(2, 2, *extents)
    found = Modes.of(fields, 8).powers(bins(8))
    assert callable(slow)
    assert found.shape == (2, 3, bins(8).count)
    for sample in range(2):
        modes = [slow_modes(field.numpy()) for field in fields[sample]]
        for pair, (i, j) in enumerate([(0, 0), (0, 1), (1, 1)]):
            products: list[list[float]] = [[] for _ in range(bins(8).count)]
            for mode, value in modes[i].items():
                products[slow(wave_number(mode, extents, 8))].append(
                    (value * modes[j][mode].conjugate()).real
                )
            expected = [float(np.mean(values)) if values else 0.0 for values in products]
            np.testing.assert_allclose(found[sample, pair], expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_bispectra_are_sums_over_triangles(extents: tuple[int, ...]) -> None:
    field = noise(1, 1, *extents)
    field = field + 0.5 * field**2
    limits = [(1, 2), (2, 3), (2.5, 4)]
    found = bispectra(Modes.of(field, 8), limits)[0, 0]
    modes = slow_modes(field[0, 0].numpy())
    for n, (low, high) in enumerate(limits):
        inside = {
            tuple(np.mod(mode, extents)): value
            for mode, value in modes.items()
            if low <= wave_number(mode, extents, 8) < high
        }
        triangles = sum(
            a * b * inside.get(tuple(np.mod(np.negative(np.add(p, q)), extents)), 0)
            for (p, a), (q, b) in product(inside.items(), repeat=2)
        )
        power = sum(abs(value) ** 2 for value in inside.values())
        assert abs(complex(triangles).real) > 1e-6
        np.testing.assert_allclose(found[n], complex(triangles).real / power**2, rtol=1e-9)


def test_spectra_are_those_of_a_gaussian_field() -> None:
    """Its power by mode is k^-2; its channels share half of theirs, and it has no bispectrum."""
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(64, 3, 16, 16, 16, dtype=torch.float64, generator=generator)
    mode = np.fft.fftfreq(16, 1 / 16)
    square = sum(wave**2 for wave in np.meshgrid(mode, mode, mode, indexing="ij"))
    k = torch.from_numpy(np.sqrt(np.maximum(square, 1)))
    fields = torch.fft.ifftn(torch.fft.fftn(white, dim=(2, 3, 4)) / k, dim=(2, 3, 4)).real
    common = fields[:, :1] + fields[:, 1:]
    modes = Modes.of(common, 16)
    powers = modes.powers(EvenBins(16))
    spectra = modes.spectra(EvenBins(16)).mean(0)
    for n in range(12):
        inside = (np.sqrt(square).round() == n + 1) & (square > 0)
        number = inside.sum()
        expected = 2 * (1 / square[inside]).mean() / 16**3
        spread = 3.5 * math.sqrt(2 / (number * 64))
        assert powers[:, 0, n].mean() == pytest.approx(expected, rel=spread)
        assert spectra[1, n] == pytest.approx(0.5, abs=spread)
        assert spectra[0, n] == pytest.approx(math.log(expected), abs=2 * spread + 2 / number)
    found = bispectra(modes, shells(16))
    limit = 4 * found.std(0) / math.sqrt(64) + 1e-12
    assert (found.mean(0).abs() <= limit).all()
    skewed = common + common**2 / common.std()
    skew = bispectra(Modes.of(skewed, 16), shells(16)).mean(0)
    used = found.std(0) > 0
    assert (skew[used] > limit[used]).all()


@pytest.mark.parametrize("extents", [(8, 8, 8), (9, 4, 7), (3, 2, 5)], ids=str)
def test_distributions_are_counted(extents: tuple[int, ...]) -> None:
    counts = np.random.default_rng(1).poisson(2, (2, 3, *extents)).astype(float)
    counts[0, 0, 0, 0, 0] = 5000
    found = measures.distribution(torch.from_numpy(np.log1p(counts)))
    assert found.shape == (2, 3, 3, 28)
    for sample, channel, (n, side) in product(range(2), range(3), enumerate((1, 2, 4))):
        sides = [min(side, extent) for extent in extents]
        cells = [range(0, n - a + 1, a) for n, a in zip(extents, sides, strict=True)]
        number = np.zeros(28)
        for corner in product(*cells):
            box = tuple(slice(at, at + a) for at, a in zip(corner, sides, strict=True))
            part = counts[sample, channel][box]
            number[min(27, int(np.log1p(part.sum()) / 0.3))] += 1
        expected = np.log((number + 1) / number.sum())
        np.testing.assert_allclose(found[sample, channel, n], expected)


def test_shells_reach_from_one_to_the_nyquist_frequency() -> None:
    limits = shells(64)
    assert limits[0][0] == 1
    assert limits[-1][1] == 32
    assert [low for low, _ in limits[1:]] == [high for _, high in limits[:-1]]
    assert len(limits) == 9


@pytest.mark.parametrize("width", [5, 8, 64])
def test_every_bin_has_modes(width: int) -> None:
    mode = np.fft.fftfreq(width, 1 / width)
    square = sum(wave**2 for wave in np.meshgrid(mode, mode, mode, indexing="ij"))
    k = torch.from_numpy(np.sqrt(square[square > 0]))
    for bins in (EvenBins(width), OctaveBins(width)):
        assert set(bins.index(k).int().tolist()) == set(range(bins.count))


def test_channels_are_a_mean_and_their_growth() -> None:
    channels = torch.tensor([[[1.0, 2.0], [4.0, 2.5], [10.0, 6.0]]])
    found = measures.mean_and_steps(channels)
    torch.testing.assert_close(found, torch.tensor([[[5.0, 3.5], [3.0, 0.5], [6.0, 3.5]]]))
    assert measures.mean_and_steps(channels[:, :1]).equal(channels[:, :1])


def smooth(field: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """A field (B, C, 8, 8, 8) behind a periodic Gaussian, one dim after the other as a matrix.

    The Gaussian's transform is sampled at the modes, and so it is no sampled Gaussian.
    """
    modes = np.fft.fftfreq(8) * 2 * np.pi
    kernel = np.exp(-0.5 * (modes * scale) ** 2)
    places = np.arange(8)
    angles = (places[:, None] - places)[..., None] * modes
    matrix = (np.cos(angles) * kernel).mean(-1)
    return np.einsum("bcdhw,xd,yh,zw->bcxyz", field, matrix, matrix, matrix)


def test_smoothed_fields_keep_their_mean_and_know_the_scale() -> None:
    rng = np.random.default_rng(3)
    field = rng.poisson(2, (2, 3, 8, 8, 8)) * 1.0
    modes = Modes.of(torch.from_numpy(field), 8)
    for scale in (0.0, 0.7, 3.0):
        torch.testing.assert_close(modes.smoothed(scale, 8), torch.from_numpy(smooth(field, scale)))


def test_spectra_of_smoothed_fields_end_where_nothing_is_left() -> None:
    assert measures.smoothing_scales(64) == [0.7, 3.0]
    assert [measures.smoothed_bins(scale, 64) for scale in (0.5, 0.7, 3.0)] == [18, 17, 11]
    k = np.arange(1, 56)
    left = np.exp(-((k * 2 * np.pi / 64 * 3.0) ** 2))  # of the power of a mode
    bins = OctaveBins(64).index(torch.from_numpy(k).double()).numpy()
    assert left[bins < 11].min() > 1e-7
    assert left[bins >= 11].max() < 1e-5


def test_statistics_are_their_parts() -> None:
    x = torch.log1p(torch.from_numpy(np.random.default_rng(0).poisson(2, (2, 2, 8, 8, 8)) * 1.0))
    count = OctaveBins(8).count
    assert measures.smoothing_scales(8) == [0.5, 0.5]
    smoothed = [2 * 4, 2 * count] * 2
    sizes = [2 * 2, *smoothed, 2 * count, count, 2 * count, count, 2 * 3 * 28]
    found = measures.summary_statistics(x, 8).split(sizes, 1)
    shape, finer, fine, coarser, coarse, log, cross, log_contrast, cross_contrast, shares = found
    torch.testing.assert_close(shape.unflatten(1, (2, 2)), measures.moments(x)[..., 2:])
    counts = measures.contrast(x)
    fields = [torch.log(torch.from_numpy(smooth(counts.numpy(), s)) + 0.2) for s in (0.5, 0.5)]
    for field, own in zip(fields, (finer, coarser), strict=True):
        first, second = measures.moments(field).unbind(1)
        expected = torch.stack([(first + second) / 2, second - first], 1)
        torch.testing.assert_close(own, expected.flatten(1))
    for field, own, between in (
        (fields[0], fine, None),
        (fields[1], coarse, None),
        (x, log, cross),
        (counts, log_contrast, cross_contrast),
    ):
        first, both, second = Modes.of(field, 8).spectra(OctaveBins(8)).unbind(1)
        expected = torch.stack([(first + second) / 2, second - first], 1)
        torch.testing.assert_close(own, expected.flatten(1))
        if between is not None:
            torch.testing.assert_close(between, both)
    counted = measures.distribution(x)
    growth = counted[:, 1] - counted[:, 0]
    torch.testing.assert_close(shares.unflatten(1, (2, -1))[:, 1], growth.flatten(1))


def test_all_of_them_are_finite_and_know_no_place_or_direction() -> None:
    counts = torch.from_numpy(np.random.default_rng(0).poisson(1, (2, 3, 8, 8, 8))).double()
    x = torch.log1p(counts)
    found = measures.summary_statistics(x, 8)
    assert found.shape == (2, measures.summary_count(3, 8))
    turned = x.roll((4, -4), (2, 4)).flip(3).permute(0, 1, 4, 2, 3)
    torch.testing.assert_close(measures.summary_statistics(turned, 8), found)
    for flat in (torch.zeros_like(x), torch.ones_like(x)):
        assert measures.summary_statistics(flat, 8).isfinite().all()
    assert measures.summary_statistics(x.bfloat16(), 8).dtype == torch.float32
