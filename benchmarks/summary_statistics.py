"""Numbers that say what a volume of counts looks like: moments and power spectra by channel.

Legend: N samples, C channels, W voxels per side, B bins of wave number.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

BINS_PER_OCTAVE = 3

LEAST = 1e-20
"""Of a variance or a power: a volume without structure has finite statistics, too."""


def summary_statistics(counts: NDArray[np.number]) -> FloatArray:
    """(N, C (4 + B)) of counts (N, C, W, W, W): moments and log power spectra of log(1 + count)."""
    field = np.log1p(counts.astype(np.float64))
    parts = [moments(field), np.log(np.maximum(power(field), LEAST))]
    return np.concatenate(parts, axis=-1).reshape(len(counts), -1)


def moments(field: FloatArray) -> FloatArray:
    """(N, C, 4) of (N, C, W, W, W): mean, log standard deviation, skewness, excess kurtosis.

    The last two of a field that is the same everywhere are 0 and -3.
    """
    mean = field.mean((2, 3, 4), keepdims=True)
    off = field - mean
    square = off * off
    second, third, fourth = (
        power.mean((2, 3, 4)) for power in (square, square * off, square * square)
    )
    spread = np.sqrt(np.maximum(second, LEAST))
    shape = [third / spread**3, fourth / spread**4 - 3]
    return np.stack([mean[..., 0, 0, 0], np.log(spread), *shape], axis=-1)


def power(field: FloatArray) -> FloatArray:
    """(N, C, B) of (N, C, W, W, W): the mean power of the modes in each bin of wave number.

    The power of a mode is its share of the field's variance, so that all modes but that of the mean
    sum up to it. A volume that is not periodic is taken as if it were.
    """
    width = field.shape[-1]
    shell, modes = shells(width)
    spectrum = np.abs(np.fft.rfftn(field, axes=(2, 3, 4), norm="forward")) ** 2
    weighted = spectrum.reshape(-1, shell.size) * weights(width)
    sums = np.stack([np.bincount(shell, row, modes.size + 1)[:-1] for row in weighted])
    return (sums / modes).reshape(*field.shape[:2], -1)


@functools.cache
def shells(width: int) -> tuple[NDArray[np.intp], FloatArray]:
    """The bin of each mode of `rfftn`, flattened, and how many modes are in each bin (B,).

    Bins are even in log k, from the longest wave to the shortest of the diagonal; those without a
    mode are left out. The mode of the mean has the bin B, which nobody reads.
    """
    whole = np.fft.fftfreq(width, 1 / width)
    waves = np.meshgrid(whole, whole, np.fft.rfftfreq(width, 1 / width), indexing="ij")
    k = np.sqrt(sum(wave**2 for wave in waves)).ravel()
    octaves = np.floor(np.log2(np.maximum(k, 1)) * BINS_PER_OCTAVE + 1e-9)
    shell = np.unique(octaves[1:], return_inverse=True)[1]
    shell = np.concatenate([[shell.max() + 1], shell])
    return shell, np.bincount(shell, weights(width))[:-1]


@functools.cache
def weights(width: int) -> FloatArray:
    """How many modes of the full transform each one of `rfftn` stands for, flattened."""
    last = np.fft.rfftfreq(width, 1 / width)
    twins = np.where((last == 0) | (2 * last == width), 1.0, 2.0)
    return np.broadcast_to(twins, (width, width, last.size)).ravel()
