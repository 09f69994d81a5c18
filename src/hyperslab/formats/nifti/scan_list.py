"""The scans of a data set: found by their names, or listed in a dataset.json or a CSV file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from hyperslab.errors import DataError
from hyperslab.formats.nifti.pairs import Pair, find, stem
from hyperslab.formats.shared.labels import LIVER, MOST_CLASSES
from hyperslab.formats.shared.reach import Reach

NIFTI_ENDINGS = (".nii", ".nii.gz")

MOST_BYTES = 256 * 1024 * 1024
"""Of a list [B]: millions of scans."""


@dataclass(frozen=True, slots=True)
class ScanList:
    """Scans with their labels, and what is said of all of them.

    ``classes``: the names of the labels 0, 1, 2, ... ``channels``: what the channels are, none
    where nobody says so. ``splits``: by a pair's name, where the list deals them out.
    """

    pairs: tuple[Pair, ...]
    classes: tuple[str, ...] = LIVER
    channels: tuple[str, ...] = ()
    splits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def named_scans(folder: Path) -> ScanList:
    """Those of a folder without a list, by LiTS's and the Decathlon's names; raises as `find`."""
    return ScanList(tuple(find(folder)))


def scan_of(
    where: Path,
    images: Sequence[str],
    labels: str,
    reach: Reach,
    what: str,
) -> Pair:
    """The scan of an entry ``what`` of the list ``where``; paths are relative to the list.

    Raises:
        DataError: a path leaves the folder of the list, or is no NIfTI file that is there.
    """
    paths = [where.parent / path for path in (*images, labels)]
    for path in paths:
        if not path.name.endswith(NIFTI_ENDINGS):
            raise DataError(
                f"{where}: {what} refers to {path}, which is no NIfTI file: its name ends in "
                f"neither {' nor '.join(NIFTI_ENDINGS)}"
            )
        if not path.exists():
            raise DataError(f"{where}: {what} refers to {path}, which is not there")
        reach.check(where, what, path)
    first, *others, segmentation = paths
    return Pair(stem(first), first, segmentation, channels=tuple(others))


def distinct(where: Path, pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """The pairs by names that differ: where those of files are alike, with their folders.

    Raises:
        DataError: a file is listed twice.
    """
    count = Counter(pair.name for pair in pairs)
    renamed = []
    for pair in pairs:
        name = pair.name
        if count[name] > 1 and pair.image.is_relative_to(where.parent):
            name = (pair.image.relative_to(where.parent).parent / name).as_posix()
        renamed.append(replace(pair, name=name))
    again = Counter(pair.name for pair in renamed).most_common(1)
    if again and again[0][1] > 1:
        raise DataError(f"{where}: lists {again[0][0]} {again[0][1]} times")
    return tuple(renamed)


def check_class_names(where: Path, classes: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes, the background's first.

    Raises:
        DataError: they are not 2 to 256 different names.
    """
    if not 2 <= len(classes) <= MOST_CLASSES or len({*classes, ""}) != len(classes) + 1:
        raise DataError(
            f"{where}: the names of the classes are {', '.join(classes) or 'missing'}; needs 2 to "
            f"{MOST_CLASSES} different ones, the background's first"
        )
    return tuple(classes)
