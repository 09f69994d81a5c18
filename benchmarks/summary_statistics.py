"""Numbers that say what a volume of counts looks like, in sets that a regression may choose from.

Legend: N samples, C channels, W voxels per side, F numbers of a set.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    thirds, even = measures.OctaveBins(width), measures.EvenBins(width)
    of_log = log_modes.spectra(thirds)
    pairs = measures.pairs_of(x.shape[1])
    auto = [n for n, (i, j) in enumerate(pairs) if i == j]
    cross = [n for n, (i, j) in enumerate(pairs) if i != j]
    limits = measures.shells(width)
    parts = {
        "moments": [measures.moments(x)],
        "power": [of_log[:, auto]],
        "cross": [of_log[:, cross]],
        "contrast": [contrast_modes.spectra(thirds)],
        "spectra by mode": [log_modes.spectra(even), contrast_modes.spectra(even)],
        "bispectra": [modes.bispectra(limits) for modes in (log_modes, contrast_modes)],
        "distribution": [measures.distribution(x)],
    }
    return {
        name: torch.cat([part.flatten(1) for part in found], 1).numpy()
        for name, found in parts.items()
    }
