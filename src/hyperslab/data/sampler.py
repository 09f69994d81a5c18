"""Draws splits, the order of an epoch and its mini-batches, the same on every grid.

Random numbers are raw Philox output and hashes, whose values numpy and Python promise never to
change, so an epoch can be resumed by another version.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
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


SplitCounts = tuple[int | None, int, int]
"""Volumes for train, validation and test; for train ``None`` is what the others leave."""


def samples_of(
    volumes: Sequence[str],
    which: str,
    fractions: Sequence[float],
    seed: int,
    counts: SplitCounts | None = None,
) -> list[int]:
    """The samples of one split, given the volume of each sample; ``"all"`` takes all of them.

    Volumes are put in the order of a hash of seed and name and dealt out in that order. So adding
    files to a folder moves few of the others. Validation and test get at least one volume if their
    fraction is not zero.

    With ``counts``, which take the place of the fractions, every split gets exactly so many
    volumes: train the first ones, validation and test the last ones. So these two stay the same for
    any number of volumes to train on.

    Raises:
        DataError: the split, the fractions or the counts make no sense, or nothing is left for
            this split.
    """
    if which == "all":
        return list(range(len(volumes)))
    if which not in SPLITS:
        raise DataError(f"no split {which!r}; choose from {', '.join(SPLITS)}, all")
    names = shuffled_volumes(set(volumes), seed)
    parts = _deal(len(names), fractions) if counts is None else _by_count(len(names), counts)
    chosen = set(names[slice(*parts[which])])
    if not chosen:
        words = ", ".join(f"{part} {hi - lo}" for part, (lo, hi) in parts.items())
        raise DataError(
            f"no volume for split {which!r}: {len(names)} volumes are dealt out as {words}; "
            'use more volumes, other fractions or counts, or split="all"'
        )
    return [sample for sample, volume in enumerate(volumes) if volume in chosen]


def shuffled_volumes(volumes: set[str], seed: int) -> list[str]:
    """In the order of a hash of seed and name, which adding volumes does not change."""
    return sorted(volumes, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())


FOLDERS = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
    "test": ("test",),
}
"""Of each split, by any of these names."""


def samples_in(names: Sequence[str], which: str) -> list[int]:
    """The samples of one split where the sub-folders of a data set are the splits.

    Raises:
        DataError: there is no such split, or no sample in its folder.
    """
    if which == "all":
        return list(range(len(names)))
    if which not in SPLITS:
        raise DataError(f"no split {which!r}; choose from {', '.join(SPLITS)}, all")
    tops = [name.partition("/")[0] if "/" in name else "" for name in names]
    found = [sample for sample, top in enumerate(tops) if top in FOLDERS[which]]
    if not found:
        there = ", ".join(sorted(set(filter(None, tops)))) or "none"
        raise DataError(
            f"no sample for split {which!r}: it would be in the sub-folder "
            f"{' or '.join(FOLDERS[which])}, but there are: {there}"
        )
    return found


def samples_listed(names: Sequence[str], splits: Mapping[str, str], which: str) -> list[int]:
    """The samples of one split where a list has dealt them out, by name.

    Raises:
        DataError: there is no such split, or it has no sample.
    """
    if which == "all":
        return list(range(len(names)))
    if which not in SPLITS:
        raise DataError(f"no split {which!r}; choose from {', '.join(SPLITS)}, all")
    found = [sample for sample, name in enumerate(names) if splits.get(name) == which]
    if not found:
        there = {split: sum(splits.get(name) == split for name in names) for split in SPLITS}
        words = ", ".join(f"{split} {count}" for split, count in there.items())
        raise DataError(f"no sample for split {which!r}: the data's own list has {words}")
    return found


def _deal(count: int, fractions: Sequence[float]) -> dict[str, tuple[int, int]]:
    """Train takes what validation and test leave."""
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise DataError(f"fractions {tuple(fractions)}: need three that add up to 1")
    later = [min(count, max(1, round(f * count))) if f > 0 else 0 for f in fractions[1:]]
    train = max(0, count - sum(later)) if fractions[0] > 0 else 0
    bounds = [0, train, min(count, train + later[0]), count if later[1] else train + later[0]]
    return dict(zip(SPLITS, itertools.pairwise(bounds), strict=True))


def _by_count(available: int, counts: SplitCounts) -> dict[str, tuple[int, int]]:
    """Train from the front, validation and test from the back."""
    asked, validation, test = counts
    if min(asked or 0, validation, test) < 0:
        raise DataError(f"counts {list(counts)}: no split has fewer than 0 volumes")
    rest = available - validation - test
    train = max(rest, 0) if asked is None else asked
    if train > rest or rest < 0:
        raise DataError(
            f"counts: train {train}, validation {validation} and test {test} are "
            f"{train + validation + test} volumes, but there are {available}"
        )
    bounds = {"train": (0, train), "validation": (rest, rest + validation)}
    return {**bounds, "test": (rest + validation, available)}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The samples of each step of each epoch, each ``repeat`` times; the last step may be short.

    An epoch is as many passes over all samples, each in an order of its own: so those that would be
    2n and 2n + 1 without repetition are the two of epoch n with it.
    """

    samples: tuple[int, ...]
    batch_size: int
    seed: int
    shuffle: bool
    repeat: int = 1

    @property
    def shown(self) -> int:
        """Samples per epoch."""
        return self.repeat * len(self.samples)

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return -(-self.shown // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """The samples in the order in which this epoch shows them."""
        first = epoch * self.repeat
        return [s for number in range(first, first + self.repeat) for s in self._pass(number)]

    def _pass(self, number: int) -> list[int]:
        if not self.shuffle:
            return list(self.samples)
        keys = random_bits(len(self.samples), ORDER, self.seed, number)
        return [self.samples[i] for i in np.argsort(keys, kind="stable")]

    def pass_of(self, epoch: int, step: int) -> int:
        """The pass to which the first sample of a step belongs, counted from the first epoch."""
        return epoch * self.repeat + step * self.batch_size // max(1, len(self.samples))

    def batches(self, epoch: int) -> list[list[int]]:
        """The samples of every step."""
        order = self.order(epoch)
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
