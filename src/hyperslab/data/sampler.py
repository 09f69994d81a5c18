"""Splits, the order of an epoch and its mini-batches: the same on every grid.

Random numbers are raw Philox output and hashes, whose values numpy and Python promise never to
change, so an epoch can be resumed by another version.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError

SPLITS = ("train", "validation", "test")

ORDER, SYMMETRY = range(2)
"""What is drawn: each has its own stream of random numbers."""


def random_bits(count: int, *key: int) -> NDArray[np.uint64]:
    """``count`` random 64-bit integers that depend on the key alone."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def samples_of(
    volumes: Sequence[str], which: str, fractions: Sequence[float], seed: int
) -> list[int]:
    """The samples of one split, given the volume of each sample; ``"all"`` takes all of them.

    Volumes are put in the order of a hash of seed and name and dealt out in that order. So adding
    files to a folder moves few of the others. Validation and test get at least one volume if their
    fraction is not zero.

    Raises:
        DataError: the split or the fractions make no sense, or nothing is left for this split.
    """
    if which == "all":
        return list(range(len(volumes)))
    if which not in SPLITS:
        raise DataError(f"no split {which!r}; choose from {', '.join(SPLITS)}, all")
    names = sorted(
        set(volumes), key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest()
    )
    parts = _deal(len(names), fractions)
    chosen = set(names[slice(*parts[which])])
    if not chosen:
        counts = ", ".join(f"{part} {hi - lo}" for part, (lo, hi) in parts.items())
        raise DataError(
            f"no volume for split {which!r}: {len(names)} volumes are dealt out as {counts}; "
            'use more volumes, other fractions, or split="all"'
        )
    return [sample for sample, volume in enumerate(volumes) if volume in chosen]


def _deal(count: int, fractions: Sequence[float]) -> dict[str, tuple[int, int]]:
    """Train takes what validation and test leave."""
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise DataError(f"fractions {tuple(fractions)}: need three that add up to 1")
    later = [min(count, max(1, round(f * count))) if f > 0 else 0 for f in fractions[1:]]
    train = max(0, count - sum(later)) if fractions[0] > 0 else 0
    bounds = [0, train, min(count, train + later[0]), count if later[1] else train + later[0]]
    return dict(zip(SPLITS, itertools.pairwise(bounds), strict=True))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The samples of each step of each epoch; every sample once, the last step may be short."""

    samples: tuple[int, ...]
    batch_size: int
    seed: int
    shuffle: bool

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return -(-len(self.samples) // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """The samples in the order in which this epoch shows them."""
        if not self.shuffle:
            return list(self.samples)
        keys = random_bits(len(self.samples), ORDER, self.seed, epoch)
        return [self.samples[i] for i in np.argsort(keys, kind="stable")]

    def batches(self, epoch: int) -> list[list[int]]:
        """The samples of every step."""
        order = self.order(epoch)
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
