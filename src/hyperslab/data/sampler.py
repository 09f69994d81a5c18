"""Chooses samples: splits, the order of an epoch and its mini-batches, the same on every grid.

Splits are drawn by volume, named by folders, dealt out by the data set's own list, or said by
a user: lists of samples (`Listed`) or folds of a cross-validation (`Folds`). Flips and permutations
of axes are drawn as well (`Symmetry`), applied to boxes first and to values read afterwards. Random
numbers are raw Philox output and hashes, whose values numpy and Python promise never to change, so
an epoch can be resumed by another version.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, printable
from hyperslab.formats import registry
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box

SPLITS = ("train", "validation", "test")

ORDER, SYMMETRY = range(2)
"""Streams of random numbers, one for each thing that is drawn."""


def random_bits(count: int, *key: int) -> NDArray[np.uint64]:
    """Draws ``count`` random 64-bit integers that depend on the key alone."""
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
    """Returns the samples of one of `SPLITS`, given the volume of each sample.

    Volumes are put in the order of a hash of seed and name and dealt out in that order. So adding
    files to a folder moves few of the others. Validation and test get at least one volume if their
    fraction is not zero.

    With ``counts``, which take the place of the fractions, every split gets exactly so many
    volumes: train the first ones, validation and test the last ones. So these two stay the same for
    any number of volumes to train on.

    Raises:
        DataError: the fractions or the counts make no sense, or nothing is left for this split.
    """
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
    """Sorts by a hash of seed and name, which adding volumes does not change."""
    return sorted(volumes, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())


FOLDERS = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
    "test": ("test",),
}
"""Sub-folders of each split, by any of these names."""


def samples_in(names: Sequence[str], which: str) -> list[int]:
    """Returns the samples of one split where the sub-folders of a data set are the splits."""
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
    """Returns the samples of one split where a list has dealt them out, by name."""
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
        """Returns the number of steps per epoch."""
        return -(-self.shown // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """Returns the samples in the order in which this epoch shows them."""
        first = epoch * self.repeat
        return [s for number in range(first, first + self.repeat) for s in self._pass(number)]

    def _pass(self, number: int) -> list[int]:
        if not self.shuffle:
            return list(self.samples)
        keys = random_bits(len(self.samples), ORDER, self.seed, number)
        return [self.samples[i] for i in np.argsort(keys, kind="stable")]

    def pass_of(self, epoch: int, step: int) -> int:
        """Returns the pass of a step's first sample, counted from the first epoch."""
        return epoch * self.repeat + step * self.batch_size // max(1, len(self.samples))

    def batches(self, epoch: int) -> list[list[int]]:
        """Returns the samples of every step."""
        order = self.order(epoch)
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]


def check_one_shape(source: Source, batch_size: int) -> None:
    """Refuses volumes of several shapes in mini-batches of several volumes."""
    if not source.shapes or batch_size == 1:
        return
    odd = next(i for i, shape in enumerate(source.shapes) if shape != source.shapes[0])
    first, other = (" x ".join(map(str, source.shapes[i][1:])) for i in (0, odd))
    raise DataError(
        f"{source.where(odd)}: has {other} voxels but {source.where(0)} has {first}, and the "
        f"volumes of a mini-batch have one shape, but {batch_size=}\n"
        "    use batch_size 1 (data.batch_size=1, and optimizer.accumulate=N for N a step), or "
        "bring them to one shape: hyperslab convert lits"
    )


POSITIONS = re.compile(r"(\d*):(\d*)")
"""Samples by their place in the data set, as Python counts: ``0:800`` are the first 800."""


class Splits(ABC):
    """Chooses the samples of a source to train, to validate and to test on."""

    @abstractmethod
    def samples(self, source: Source, which: str, seed: int) -> list[int]:
        """Lists the samples of one of `SPLITS`. ``seed``: of what is drawn.

        Raises:
            DataError: it has no sample, a word names none, or two splits share one.
        """


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """Chooses the samples that are shown: one split, or ``"all"``, and how it is dealt out.

    By ``splits`` where a user says them, by ``folders``, by what the data set itself says unless
    there are ``counts``, and else drawn by volume, by ``counts`` or ``fractions`` and ``seed``.
    """

    split: str = "train"
    splits: Splits | None = None
    fractions: Sequence[float] = (0.8, 0.1, 0.1)
    counts: SplitCounts | None = None
    folders: bool = False
    seed: int = 0

    def samples(self, source: Source) -> list[int]:
        """Lists the samples of the split; refuses one that there is not, or that has no sample."""
        if self.split == "all":
            return list(range(len(source.names)))
        if self.split not in SPLITS:
            raise DataError(f"no split {self.split!r}; choose from {', '.join(SPLITS)}, all")
        if self.splits is not None:
            return self.splits.samples(source, self.split, self.seed)
        if self.folders:
            return samples_in(source.names, self.split)
        if source.splits and self.counts is None:
            return samples_listed(source.names, source.splits, self.split)
        volumes = [source.volume(sample) for sample in range(len(source.names))]
        return samples_of(volumes, self.split, self.fractions, self.seed, self.counts)


@dataclass(frozen=True, slots=True)
class Listed(Splits):
    """Splits by words, each of which names samples of the source.

    A word is the path of a sample relative to the data set's folder, with or without suffix; a
    sub-folder, which stands for all below it; a pattern with ``*``, ``?`` or ``[``; or places in
    the data set, ``"0:800"``. Of volumes that are cut into sub-volumes it may name the volume.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()

    def samples(self, source: Source, which: str, seed: int) -> list[int]:
        if not getattr(self, which):
            raise DataError(
                f"no split {which!r}: data.{which} lists nothing\n"
                f"    list its samples, or use another split ({', '.join(self.given)}, all)"
            )
        names = _Names(source)
        found = {split: names.listed(split, getattr(self, split)) for split in self.given}
        _check_apart(source, found)
        return found[which]

    @property
    def given(self) -> list[str]:
        """Returns the splits that list something."""
        return [field.name for field in fields(self) if getattr(self, field.name)]


@dataclass(frozen=True, slots=True)
class Folds(Splits):
    """The ``fold``-th of ``folds`` parts validates and the others train; counted from 0.

    Whole volumes are dealt out, in the order of a hash of seed and name, so that folds differ by
    one volume at most. ``test``: words, as of `Listed`, of samples that are in no fold.

    Raises:
        DataError: there is no such fold, or fewer than two.
    """

    fold: int
    folds: int
    test: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.folds < 2 or not 0 <= self.fold < self.folds:
            raise DataError(
                f"data.fold={self.fold} of data.folds={self.folds}: folds are 2 or more, counted "
                f"from 0 to {max(self.folds, 2) - 1}"
            )

    def samples(self, source: Source, which: str, seed: int) -> list[int]:
        everything = range(len(source.names))
        test = _Names(source).listed("test", self.test) if self.test else []
        if which == "test":
            if not test:
                raise DataError(
                    f"no split 'test': {self.folds} folds are of training and validation\n"
                    "    list samples in data.test, or use another split (train, validation, all)"
                )
            return test
        kept = {source.volume(sample) for sample in test}
        volumes = shuffled_volumes({source.volume(s) for s in everything} - kept, seed)
        if len(volumes) < self.folds:
            raise DataError(
                f"data.folds={self.folds}, but there are {len(volumes)} volumes to deal out"
            )
        held_out = set(volumes[self.fold :: self.folds])
        validates = which == "validation"
        return [
            sample
            for sample in everything
            if source.volume(sample) not in kept
            and (source.volume(sample) in held_out) == validates
        ]


class _Names:
    """Finds the samples of a source that a word names."""

    def __init__(self, source: Source) -> None:
        self.where = source.where(0)
        self.count = len(source.names)
        self.known: dict[str, list[int]] = defaultdict(list)
        self.below: dict[str, list[int]] = defaultdict(list)
        for sample, name in enumerate(source.names):
            for word in {name, source.volume(sample)}:
                self.known[word].append(sample)
            folder = name.rpartition("/")[0]
            while folder:
                self.below[folder].append(sample)
                folder = folder.rpartition("/")[0]
        suffixes = [suffix for _, suffix in registry.suffixes_of_formats()]
        self.suffixes = tuple(sorted(suffixes, key=len, reverse=True))

    def listed(self, split: str, words: Sequence[str]) -> list[int]:
        """Returns the samples of a split, in the order of the data set.

        A word that names none, or what another has named, is refused.
        """
        found: dict[int, str] = {}
        for word in words:
            for sample in self._of(split, word):
                if sample in found:
                    raise DataError(
                        f"data.{split} lists a sample twice, by {printable(found[sample])!r} and "
                        f"by {printable(word)!r} ({self.where} and others)\n    list it once"
                    )
                found[sample] = word
        return sorted(found)

    def _of(self, split: str, word: str) -> Sequence[int]:
        if word == ".":
            return range(self.count)
        if match := POSITIONS.fullmatch(word):
            return self._between(split, word, match[1], match[2])
        plain = word.rstrip("/")
        bare = next((plain.removesuffix(s) for s in self.suffixes if plain.endswith(s)), plain)
        found = self.known.get(plain) or self.known.get(bare) or self.below.get(plain)
        if found:
            return found
        if set("*?[") & set(word):
            names = fnmatch.filter(self.known, plain) or fnmatch.filter(self.known, bare)
            found = sorted({sample for name in names for sample in self.known[name]})
        if not found:
            close = difflib.get_close_matches(bare, list(self.known)[:10_000], n=1, cutoff=0.3)
            raise DataError(
                f"data.{split}: {printable(word)!r} names no sample of the data set"
                + (f"; nearest: {printable(close[0])!r}" if close else "")
                + f"\n    its {self.count} samples are named by their paths, as {self.where}; "
                "see docs/own-data.md, splits"
            )
        return found

    def _between(self, split: str, word: str, lo: str, hi: str) -> Sequence[int]:
        first = int(lo or 0)
        end = int(hi or self.count)
        if not first < end <= self.count:
            raise DataError(
                f"data.{split}: {word!r} is not a range of {self.count} samples, which are counted "
                f"from 0: give a:b with a < b <= {self.count}"
            )
        return range(first, end)


def _check_apart(source: Source, found: dict[str, list[int]]) -> None:
    """Refuse a volume of which two splits have samples: what was trained on would be tested."""
    split_of: dict[str, str] = {}
    for split, samples in found.items():
        for sample in samples:
            volume = source.volume(sample)
            other = split_of.setdefault(volume, split)
            if other != split:
                raise DataError(
                    f"data.{other} and data.{split} overlap: both have {source.where(sample)}"
                    + ("" if source.names[sample] == volume else f", which is of volume {volume!r}")
                    + "\n    give every volume to one split"
                )


@dataclass(frozen=True, slots=True)
class Symmetry:
    """A map of a volume (C, D, H, W) to itself.

    Axis k of the augmented volume (0 depth, 1 height, 2 width) is axis ``order[k]`` of the stored
    one, backwards where ``flipped[k]``.

    >>> swap = Symmetry((1, 0, 2), (True, False, False))
    >>> swap.stored(Box((0, 0, 2, 0), (4, 1, 5, 6)), (4, 5, 5, 6))
    Box(lo=(0, 2, 4, 0), hi=(4, 5, 5, 6))
    """

    order: tuple[int, ...]
    flipped: tuple[bool, ...]

    @classmethod
    def draw(cls, shape: Sequence[int], *key: int, turns: bool = True) -> Symmetry:
        """Draw one of those that keep the shape (48 of a cube), evenly, by the key alone.

        Without ``turns`` it is one of the 8 flips: the axes of a scan are not interchangeable.
        """
        orders = [
            order
            for order in (itertools.permutations(range(3)) if turns else [(0, 1, 2)])
            if all(shape[1 + a] == shape[1 + k] for k, a in enumerate(order))
        ]
        numbers = [int(n) for n in random_bits(4, SYMMETRY, *key)]
        flipped = tuple(bool(n % 2) for n in numbers[1:])
        return cls(orders[numbers[0] % len(orders)], flipped)

    def stored(self, wanted: Box, shape: Sequence[int]) -> Box:
        """Returns the box of the stored volume that becomes ``wanted`` of the augmented one."""
        intervals = [wanted.interval(0)] * 4
        for k, (axis, flip) in enumerate(zip(self.order, self.flipped, strict=True), 1):
            lo, hi = wanted.interval(k)
            intervals[axis + 1] = (shape[k] - hi, shape[k] - lo) if flip else (lo, hi)
        return Box.of(intervals)

    def apply(self, values: Array) -> Array:
        """Returns the values (C, d, h, w) of a stored box, augmented; a view."""
        turned = values.transpose(0, *(axis + 1 for axis in self.order))
        return turned[(slice(None), *(slice(None, None, -1 if f else 1) for f in self.flipped))]


IDENTITY = Symmetry((0, 1, 2), (False, False, False))
"""The one that changes nothing."""

DrawSymmetry = Callable[[tuple[int, ...], int, int], Symmetry]
"""Draws the symmetry of a sample of a shape (C, D, H, W), given a pass and the sample's number."""
