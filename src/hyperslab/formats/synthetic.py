"""Makes synthetic volumes: random counts, computed where they are read; there is no file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box

OF_VALUES, OF_LABELS, OF_TARGETS = range(3)
"""Streams of random numbers, one for each thing that is drawn."""

GOLDEN = 0x9E3779B9
"""2³² over the golden ratio: so many apart, neighbours have keys that look unlike each other."""


_CUMULATED = np.cumsum([math.exp(-1) / math.factorial(count) for count in range(16)])

POISSON = np.searchsorted(_CUMULATED, (np.arange(256) + 0.5) / 256).astype(np.int16)
"""Quantiles of counts with mean 1, as the universes' are: equally likely entries."""


def mix_bits(keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns a well-mixed 32-bit number for each key, in its place (the mixer "lowbias32")."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        keys ^= keys >> np.uint32(shift)
        keys *= np.uint32(factor)
    keys ^= keys >> np.uint32(16)
    return keys


class SyntheticVolumes(Source):
    """Samples (C, D, H, W) of counts, mean 1, as int16; targets in [-1, 1], or a class a voxel.

    A voxel's value depends on its sample and its place alone, so a rank makes its own box and
    nothing else, and every grid sees the same samples. No numpy version can change them. There is
    nothing to learn in them: they are for measuring how fast a network is (Oyama et al. 2020,
    section V-B).
    """

    concurrent = True

    def __init__(
        self, shape: Sequence[int], samples: int, *, targets: int = 4, classes: int = 0
    ) -> None:
        """Takes labels if there are ``classes``, else targets."""
        self.names = [f"synthetic-{sample:05}" for sample in range(samples)]
        self.shape = tuple(shape)
        self.dtype = np.dtype(np.int16)
        self.classes = ("background", *(f"class {i}" for i in range(1, classes)))[:classes]
        self.targets = targets

    def read(self, sample: int, box: Box) -> Array:
        values = np.empty(box.shape, self.dtype)
        for place in np.ndindex(box.shape[:2]):
            plane = (place[0] + box.lo[0], place[1] + box.lo[1])
            numbers = self._plane(OF_VALUES, sample, plane, Box(box.lo[2:], box.hi[2:]))
            np.take(POISSON, numbers >> np.uint32(24), out=values[place], mode="clip")
        return values

    def labels(self, sample: int, box: Box) -> Array:
        labels = np.empty(box.shape, np.uint8)
        for depth, plane in enumerate(labels):
            numbers = self._plane(
                OF_LABELS, sample, (0, depth + box.lo[0]), Box(box.lo[1:], box.hi[1:])
            )
            plane[...] = (numbers >> np.uint32(16)) * np.uint32(len(self.classes)) >> np.uint32(16)
        return labels

    def target(self, sample: int) -> Array:
        keys = np.arange(self.targets, dtype=np.uint32) * np.uint32(GOLDEN)
        return mix_bits(keys + _key(OF_TARGETS, sample)) / 2**31 - 1

    def where(self, sample: int) -> str:
        return f"synthetic sample {sample}"

    def _plane(
        self, stream: int, sample: int, place: tuple[int, int], box: Box
    ) -> NDArray[np.uint32]:
        """Returns the random numbers of ``box`` (h, w) in a plane; ``place``: channel and depth."""
        _, depths, heights, _ = self.shape
        first = (place[0] * depths + place[1]) * heights
        rows, columns = (np.arange(*box.interval(dim), dtype=np.uint32) for dim in range(2))
        rows = mix_bits(
            (rows + np.uint32(first % 2**32)) * np.uint32(GOLDEN) + _key(stream, sample)
        )
        return mix_bits(rows[:, None] + columns * np.uint32(GOLDEN))


def _key(stream: int, sample: int) -> np.uint32:
    """Returns the first key of a sample."""
    return mix_bits(np.array([(3 * sample + stream + 1) % 2**32], np.uint32))[0]
