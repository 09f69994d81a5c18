"""Numbers that say what a volume of counts looks like, in sets that a regression may choose from.

Legend: N samples, C channels, W voxels per side, F numbers of a set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.models import summary_statistics as measures

FloatArray = NDArray[np.float64]

SETS: Mapping[str, tuple[str, ...]] = {
    "power": ("moments", "power"),
    "pairs": ("moments", "power", "cross"),
    "octaves": ("moments", "power", "cross", "contrast", "bispectra", "distribution"),
    "modes": ("moments", "spectra by mode", "bispectra", "distribution"),
}
"""Sets of statistics by the names of their parts, from few numbers to many."""


def summary_statistics(counts: NDArray[np.number]) -> dict[str, NDArray[np.float32]]:
    """Parts (N, F) of `SETS` by name, of counts (N, C, W, W, W)."""
    x = torch.log1p(torch.from_numpy(np.ascontiguousarray(counts)).float())
    width = x.shape[-1]
    log_modes, contrast_modes = (
        measures.Modes.of(field, width) for field in (x, measures.contrast(x))
    )
    thirds, even = measures.OctaveBins(width), EvenBins(width)
    of_log = log_modes.spectra(thirds)
    pairs = measures.pairs_of(x.shape[1])
    auto = [n for n, (i, j) in enumerate(pairs) if i == j]
    cross = [n for n, (i, j) in enumerate(pairs) if i != j]
    limits = shells(width)
    parts = {
        "moments": [measures.moments(x)],
        "power": [of_log[:, auto]],
        "cross": [of_log[:, cross]],
        "contrast": [contrast_modes.spectra(thirds)],
        "spectra by mode": [log_modes.spectra(even), contrast_modes.spectra(even)],
        "bispectra": [bispectra(modes, limits) for modes in (log_modes, contrast_modes)],
        "distribution": [measures.distribution(x)],
    }
    return {
        name: torch.cat([part.flatten(1) for part in found], 1).numpy()
        for name, found in parts.items()
    }


@dataclass(frozen=True, slots=True)
class EvenBins(measures.OctaveBins):
    """Counts bins around whole wave numbers, from 1 to the corner of the cube of modes."""

    @property
    def count(self) -> int:
        return max(1, round(math.sqrt(3) * (self.width // 2)))

    def index(self, k: torch.Tensor) -> torch.Tensor:
        return k.round() - 1


def bispectra(modes: measures.Modes, shells: Sequence[tuple[float, float]]) -> torch.Tensor:
    """Return (N, C, shells): the bispectrum of triangles with all three k in [low, high).

    It is the sum over all triangles of the product of their three modes, over the square of the sum
    of the modes' power: the reduced bispectrum but for the number of triangles. As in any
    homogeneous field on a grid, the corners of the cube of modes are neighbours: sides whose sum is
    a multiple of the extents make a triangle.
    """
    space = measures.SPACE
    found = []
    for low, high in shells:
        inside = modes.spectrum * ((modes.k >= low) & (modes.k < high))
        field = torch.fft.irfftn(inside, s=modes.extents, dim=space, norm="forward")
        square = field * field
        power = square.mean(space).clamp(min=measures.LEAST)
        found.append((square * field).mean(space) / (power * power).clamp(min=measures.LEAST))
    return torch.stack(found, 2)


SHELLS = 9
"""Shells of wave number whose bispectra are taken."""


def shells(width: int) -> list[tuple[float, float]]:
    """Return the limits of nine shells from 1 to the Nyquist frequency, the higher the wider."""
    steps = (step / SHELLS for step in range(SHELLS + 1))
    edges = [1 + round((width // 2 - 1) * (step + step * step) / 2) for step in steps]
    return list(pairwise(edges))
