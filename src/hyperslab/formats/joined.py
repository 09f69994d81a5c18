"""Several folders as one data set."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.formats.source import Array, Source, SourceView
from hyperslab.geometry import Box

SAME_LINE = 1e-6
"""The share of a parameter's range by which its line may differ: each folder has fitted one."""

_ALIKE = ("dtype", "classes", "label_bytes", "redshifts", "collective")


class Joined(SourceView):
    """The samples of several folders of one kind, one after the other.

    Names are the paths below the folders' common parent, so that two folders may have samples of
    one name.

    Raises:
        DataError: the folders differ in shape, type, classes or parameters; names both.
    """

    def __init__(self, parts: dict[Path, Source]) -> None:
        self.parts = parts
        self.root = common_parent(list(parts))
        (first, one), *others = parts.items()
        for folder, part in others:
            _check_alike(first, one, folder, part)
        self.take_after(one)
        self.order = one.order if len({part.order for part in parts.values()}) == 1 else None
        self.targets_apart = any(part.targets_apart for part in parts.values())
        self.summed_whole = all(part.summed_whole for part in parts.values())
        self.remark = "\n".join(part.remark for part in parts.values() if part.remark)
        self.places = [(part, i) for part in parts.values() for i in range(len(part.names))]
        self.prefixes = [
            _prefix(folder, self.root) for folder, part in parts.items() for _ in part.names
        ]
        names = zip(self.prefixes, self.places, strict=True)
        self.names = [prefix + part.names[i] for prefix, (part, i) in names]
        shapes = tuple(part.shape_of(i) for part, i in self.places)
        self.shape = max(shapes, key=math.prod)
        self.shapes = shapes if len(set(shapes)) > 1 else ()
        self.splits = {
            name: part.splits[part.names[i]]
            for name, (part, i) in zip(self.names, self.places, strict=True)
            if part.names[i] in part.splits
        }

    def origin(self, sample: int) -> tuple[Source, int]:
        return self.places[sample]

    def read(self, sample: int, box: Box) -> Array:
        part, own = self.places[sample]
        return part.read(own, box)

    def volume(self, sample: int) -> str:
        part, own = self.places[sample]
        return self.prefixes[sample] + part.volume(own)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.shapes else self.places[0][0].whole_shape

    def alone(self, sample: int) -> Source:
        part, own = self.places[sample]
        return part.alone(own)

    def read_together(self, driver: str, grid: Grid) -> Source:
        return Joined({at: part.read_together(driver, grid) for at, part in self.parts.items()})

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def joined(parts: dict[Path, Source]) -> Source:
    """One source of all folders; a single one as it is.

    Raises:
        DataError: there is no folder, or see `Joined`.
    """
    if not parts:
        raise DataError("no folder is given; give one at least")
    return next(iter(parts.values())) if len(parts) == 1 else Joined(parts)


def common_parent(folders: Sequence[Path]) -> Path:
    """The deepest folder that holds all of them."""
    return Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))


def _prefix(folder: Path, root: Path) -> str:
    """
    >>> _prefix(Path("/data/b/train"), Path("/data")), _prefix(Path("/data"), Path("/data"))
    ('b/train/', '')
    """
    relative = Path(os.path.relpath(folder, root)).as_posix()
    return "" if relative == "." else f"{relative}/"


def _check_alike(first: Path, one: Source, folder: Path, other: Source) -> None:
    scans = bool(one.classes) and one.shape[0] == other.shape[0]  # shown one by one
    for word in _ALIKE if scans else ("shape", *_ALIKE):
        ours = getattr(one, word)
        theirs = getattr(other, word)
        if ours != theirs:
            raise DataError(
                f"{folder}: {word} is {theirs} but {ours} in {first}; all folders of a data set "
                "are stored alike"
            )
    if one.classes:
        return
    ours = one.parameters
    theirs = other.parameters
    if ours.names != theirs.names:
        raise DataError(
            f"{folder}: has the targets {', '.join(theirs.names)} but {first} has "
            f"{', '.join(ours.names)}"
        )
    ends = [np.array(list(p.ranges.values())).reshape(-1, 2) for p in (ours, theirs)]
    size = np.abs(ends[0]).max(1, initial=0)
    if (np.abs(ends[0] - ends[1]).max(1, initial=0) > SAME_LINE * size).any():
        raise DataError(
            f"{folder}: -1 and 1 of its targets are {theirs.ranges} but those of {first} are "
            f"{ours.ranges}\n    give the ranges of all: data.ranges: {{name: [low, high]}}"
        )
