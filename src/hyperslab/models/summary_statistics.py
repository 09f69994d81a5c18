"""Computes what cosmologists measure in a periodic volume of counts, in plain torch.

These are power spectra of channels and between them, of counts, of their logarithms and of those of
smoothed counts, and the distribution of counts. All of it runs on cut volumes: every rank sums over
its own modes and voxels, and these sums are added up.

Legend: B samples, C channels, P pairs of them, (D, H, W) voxels, K bins. Wave numbers k are in
units of the fundamental mode of a cube of ``width`` voxels, on which alone the bins depend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
import torch.nn.functional as F

SPACE = (2, 3, 4)

LEAST = 1e-20
"""The least power: volumes without structure have finite statistics, too."""

SMOOTHINGS = (1, 2, 4)
"""Sides [voxels] of the cells whose counts are distributed."""

GAUSSIANS = (0.7, 3.0)
"""Standard deviations [voxels] of the Gaussians that smooth counts before their logarithm.

None is longer than a sixteenth of the width: something has to be left of the longest modes.
"""

FARTHEST = 3.0
"""The wave number, in inverse standard deviations, at which spectra of smoothed fields end."""

FLOOR = 0.2
"""Added to a smoothed count / mean, whose logarithm is finite then and hears less of noise."""

COUNT_STEP = 0.3
COUNT_BINS = 28
"""Bins of log(1 + count) and their width; the last one has all counts from 3,294 on."""


def summary_statistics(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the statistics (B, `summary_count`) of x = log(1 + count) (B, C, D, H, W).

    In this order: skewness and kurtosis of each channel of x, moments and power spectra of the
    logarithm of counts behind each of `GAUSSIANS`, power spectra of x and of the contrast of
    counts, and the distribution of counts. Spectra have three bins an octave, those of x and of the
    contrast between channels, too. What channels have of their own is said by `mean_and_steps`.

    Where there is less than a count in a voxel, log(1 + count) hears little but noise in the
    smallest scales; the logarithm of counts that are smoothed first is nearly Gaussian, and its
    spectrum says most of what can be known (Neyrinck et al. 2009).
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    bins = OctaveBins(width)
    pairs = pairs_of(x.shape[1])
    auto = [n for n, (i, j) in enumerate(pairs) if i == j]
    cross = [n for n, (i, j) in enumerate(pairs) if i != j]
    parts = [moments(x)[..., 2:]]
    counts = Modes.of(contrast(x), width)
    for scale in smoothing_scales(width):
        field = torch.log(counts.smoothed(scale, width).clamp(min=0) + FLOOR)
        spectra = Modes.of(field, width).spectra(bins)[:, auto, : smoothed_bins(scale, width)]
        parts += [mean_and_steps(moments(field)), mean_and_steps(spectra)]
    for modes in (Modes.of(x, width), counts):
        spectra = modes.spectra(bins)
        parts.append(mean_and_steps(spectra[:, auto]))
        if cross:
            parts.append(spectra[:, cross])
    parts.append(mean_and_steps(distribution(x)))
    return torch.cat([part.flatten(1) for part in parts], 1)


def mean_and_steps(channels: torch.Tensor) -> torch.Tensor:
    """Return the mean of channels (B, C, ...), and what each has more than the one before it.

    Redshifts of one universe differ by its growth of structure alone, which varies far less between
    universes than structure does: a network that gets each number normalised by itself would have
    to learn the difference of two large ones.
    """
    return torch.cat([channels.mean(1, keepdim=True), channels.diff(dim=1)], 1)


def summary_count(channels: int, width: int) -> int:
    """Return how many numbers `summary_statistics` makes of a volume."""
    smoothed = channels * sum(4 + smoothed_bins(one, width) for one in smoothing_scales(width))
    spectra = 2 * len(pairs_of(channels)) * OctaveBins(width).count
    return 2 * channels + smoothed + spectra + channels * len(SMOOTHINGS) * COUNT_BINS


def smoothing_scales(width: int) -> list[float]:
    """Return the standard deviations [voxels] of the Gaussians of volumes of this width."""
    return [min(scale, width / 16) for scale in GAUSSIANS]


def smoothed_bins(scale: float, width: int) -> int:
    """Return how many of `OctaveBins` begin where a smoothed field still has power."""
    last = FARTHEST * width / (2 * math.pi * scale)
    return min(OctaveBins(width).count, 1 + math.floor(3 * math.log2(last)))


def moments(x: torch.Tensor) -> torch.Tensor:
    """Return (B, C, 4): mean, log standard deviation, skewness and excess kurtosis of channels.

    The last two of a field that is the same everywhere are 0 and -3.
    """
    mean = x.mean(SPACE, keepdim=True)
    off = x - mean
    square = off * off
    second, third, fourth = (power.mean(SPACE) for power in (square, square * off, square * square))
    spread = second.clamp(min=LEAST).sqrt()
    own = mean.mean(SPACE)  # of one number each
    shape = [third / spread**3, fourth / spread**4 - 3]
    return torch.stack([own, spread.log(), *shape], -1)


def contrast(x: torch.Tensor) -> torch.Tensor:
    """Return count / mean of each channel, whose modes but the mean are the contrast's."""
    counts = torch.expm1(x)
    return counts * counts.mean(SPACE, keepdim=True).clamp(min=LEAST).reciprocal()


def pairs_of(channels: int) -> list[tuple[int, int]]:
    """Return all pairs of channels, in the order of spectra."""
    return list(combinations_with_replacement(range(channels), 2))


@dataclass(frozen=True, slots=True)
class OctaveBins:
    """Counts thirds of octaves of wave numbers, from 1 to the corner of the cube of modes."""

    width: int

    @property
    def count(self) -> int:
        return 1 + math.floor(3 * math.log2(max(1, math.sqrt(3) * (self.width // 2))))

    def index(self, k: torch.Tensor) -> torch.Tensor:
        return (3 * k.log2() + 1e-5).floor()  # a power of two begins an octave, however rounded


@dataclass(frozen=True, slots=True)
class Modes:
    """Holds the Fourier modes of real fields; of two opposite ones it may hold one.

    Args:
        spectrum: (B, C, D, H, W // 2 + 1); squares are shares of the field's variance.
        k: (B, 1, D, H, W // 2 + 1), the modes' wave numbers.
        times: (W // 2 + 1,), how many modes each one stands for.
        extents: (D, H, W) of the fields.
    """

    spectrum: torch.Tensor
    k: torch.Tensor
    times: torch.Tensor
    extents: tuple[int, ...]

    @classmethod
    def of(cls, fields: torch.Tensor, width: int) -> Modes:
        """Make the modes of fields (B, C, D, H, W)."""
        extents = tuple(fields.shape[2:])
        spectrum = torch.fft.rfftn(fields, dim=SPACE, norm="forward")
        square = torch.zeros_like(spectrum.real[:, :1])  # cut as the modes are
        for dim, extent in enumerate(extents):
            place = torch.arange(spectrum.shape[2 + dim], device=square.device)
            mode = (place + extent // 2) % extent - extent // 2
            along = (mode * (width / extent)).to(square.dtype) ** 2
            square = square + along.reshape([-1 if d == dim else 1 for d in range(3)])
        last = torch.arange(spectrum.shape[-1], device=square.device)
        own_opposite = (last == 0) | (2 * last == extents[-1])
        times = torch.where(own_opposite, 1, 2).to(square.dtype)
        return cls(spectrum, square.sqrt(), times, extents)

    def smoothed(self, scale: float, width: int) -> torch.Tensor:
        """Return the fields (B, C, D, H, W) behind a Gaussian of standard deviation ``scale``."""
        kept = torch.exp(-0.5 * (self.k * (2 * math.pi / width * scale)) ** 2)
        return torch.fft.irfftn(self.spectrum * kept, s=self.extents, dim=SPACE, norm="forward")

    def powers(self, bins: OctaveBins) -> torch.Tensor:
        """Return (B, P, K): the mean product of the modes of two channels in each bin.

        Of a channel with itself it is the mean power of a mode. Bins without a mode have 0.
        """
        scale = self.times.sqrt()
        real, imag = self.spectrum.real * scale, self.spectrum.imag * scale
        products = [
            torch.addcmul(real[:, i] * real[:, j], imag[:, i], imag[:, j])
            for i, j in pairs_of(real.shape[1])
        ]
        products.append(torch.zeros_like(products[0]) + self.times)
        count = bins.count
        index = torch.where(self.k == 0, count, bins.index(self.k).clamp(0, count - 1)).long()
        sums = sums_by_index(torch.stack(products, 1), index, count + 1)[..., :count]
        return sums[:, :-1] / sums[:, -1:].clamp(min=1)

    def spectra(self, bins: OctaveBins) -> torch.Tensor:
        """Return (B, P, K): log power of a channel with itself, correlation of two channels."""
        powers = self.powers(bins)
        pairs = pairs_of(self.spectrum.shape[1])
        auto = {i: powers[:, n].clamp(min=LEAST) for n, (i, j) in enumerate(pairs) if i == j}
        found = [
            auto[i].log() if i == j else powers[:, n] / (auto[i].sqrt() * auto[j].sqrt())
            for n, (i, j) in enumerate(pairs)
        ]
        return torch.stack(found, 1)


def distribution(x: torch.Tensor) -> torch.Tensor:
    """Return (B, C, `SMOOTHINGS`, `COUNT_BINS`): the log share of cells with so many counts.

    Cells are cubes, no longer than the volume, and each bin has one more than there are.
    """
    found = []
    for side in SMOOTHINGS:
        sides = [min(side, extent) for extent in x.shape[2:]]
        cells = x
        if side > 1:
            cells = torch.log1p(F.avg_pool3d(torch.expm1(x), sides) * math.prod(sides))
        index = (cells * (1 / COUNT_STEP)).long().clamp(0, COUNT_BINS - 1)  # of NaN, too
        one = torch.ones((), dtype=x.dtype, device=x.device)
        number = sums_by_index(one.expand(index.shape), index, COUNT_BINS)
        found.append(torch.log((number + 1) / math.prod(cells.shape[2:])))
    return torch.stack(found, 2)


def sums_by_index(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Return (B, P, ``count``): the sums of values (B, P, D, H, W) with the same index.

    Rows of D stay apart at first, so that a volume that is cut along D and H stays so.
    """
    rows = torch.zeros((*values.shape[:3], count), dtype=values.dtype, device=values.device)
    places = index.expand(values.shape).flatten(3)
    return rows.scatter_add(3, places, values.flatten(3)).sum(2)
