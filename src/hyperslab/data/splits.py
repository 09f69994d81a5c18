"""Finds the samples of a user's splits: lists of samples, or folds of a cross-validation."""

from __future__ import annotations

import difflib
import fnmatch
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hyperslab.data.sampler import (
    SPLITS,
    SplitCounts,
    samples_in,
    samples_listed,
    samples_of,
    shuffled_volumes,
)
from hyperslab.errors import DataError, printable
from hyperslab.formats import registry
from hyperslab.formats.source import Source

POSITIONS = re.compile(r"(\d*):(\d*)")
"""Samples by their place in the data set, as Python counts: ``0:800`` are the first 800."""


class Splits(ABC):
    """Which samples of a source are those to train, to validate and to test on."""

    @abstractmethod
    def samples(self, source: Source, which: str, seed: int) -> list[int]:
        """Those of one split; ``"all"`` takes all of them. ``seed``: of what is drawn.

        Raises:
            DataError: there is no such split, a word names no sample, or two splits share one.
        """


def samples_shown(
    source: Source,
    which: str,
    splits: Splits | None,
    *,
    fractions: Sequence[float],
    counts: SplitCounts | None,
    folders: bool,
    seed: int,
) -> list[int]:
    """The samples of one split; ``"all"`` takes all of them.

    By ``splits`` where a user says them, by folder, by what the data set itself says unless there
    are ``counts``, and else dealt out by volume.

    Raises:
        DataError: as `Splits.samples`, `samples_in`, `samples_listed` and `samples_of`.
    """
    if splits is not None:
        return splits.samples(source, which, seed)
    if folders:
        return samples_in(source.names, which)
    if source.splits and counts is None:
        return samples_listed(source.names, source.splits, which)
    volumes = [source.volume(sample) for sample in range(len(source.names))]
    return samples_of(volumes, which, fractions, seed, counts)


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
        if which == "all":
            return list(range(len(source.names)))
        _check_name(which)
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
        """The splits that list something."""
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
        if which == "all":
            return list(everything)
        _check_name(which)
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
        suffixes = [suffix for one in registry.formats() for suffix in one.suffixes]
        self.suffixes = tuple(sorted(suffixes, key=len, reverse=True))

    def listed(self, split: str, words: Sequence[str]) -> list[int]:
        """The samples of a split, in the order of the data set.

        Raises:
            DataError: a word names none, or what another has named.
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
                f"data.{split}: {word!r} is no part of {self.count} samples, which are counted "
                f"from 0: give a:b with a < b <= {self.count}"
            )
        return range(first, end)


def _check_name(which: str) -> None:
    if which not in SPLITS:
        raise DataError(f"no split {which!r}; choose from {', '.join(SPLITS)}, all")


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
