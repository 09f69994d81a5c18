"""`DataMap`: what a user says of where volumes and targets are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperslab.errors import DataError

OWN_DATA = "docs/own-data.md"


@dataclass(frozen=True, slots=True)
class DataMap:
    """Where the volumes of a folder, or of one file, and their targets are.

    ``files``: a pattern of the files with volumes, relative to the folder; by default all arrays
    in it. ``volume``: the array's path in an HDF5 file, Zarr group or .npz. ``targets``: paths in
    the same file of arrays, or of attributes, ``group@name``. ``table``: a text or .npy file with
    a row of targets for each sample, in the folder or anywhere else. ``columns``: their names.
    ``labels``: the path in the same file of an array with the class of every voxel, whose names are
    ``classes``, in place of targets. ``fields``: several patterns, or several paths of arrays, of
    which each becomes a channel, or as many as it has; they take the place of ``files`` or
    ``volume``.
    ``ranges``: by name, the values that become -1 and 1; by default those of a published data set
    where its table is recognised, or the least and the greatest of all rows.

    Raises:
        DataError: targets are in two places, labels have no names of classes, or a range is none.
    """

    files: str = ""
    volume: str = ""
    targets: tuple[str, ...] = ()
    table: Path | None = None
    columns: tuple[str, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    labels: str = ""
    classes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    of_files: bool = True  # the fields are patterns of files, not paths of arrays

    def __post_init__(self) -> None:
        if self.targets and self.table is not None:
            raise DataError(
                "data.keys.targets and data.table are two places of targets; give one of them"
            )
        if self.labels and (self.targets or self.table is not None):
            raise DataError("data.keys.labels and targets: a network learns one of the two")
        names = len(set(self.classes))
        if bool(self.labels) != bool(names) or (names and not 2 <= names == len(self.classes)):
            raise DataError(
                "data.keys.labels and data.classes go together: two different names or more, by "
                "the labels' numbers, the background's first"
            )
        for name, (low, high) in self.ranges.items():
            if not (math.isfinite(high - low) and low < high):
                raise DataError(f"data.ranges.{name}={[low, high]}: give two numbers, low to high")

    @property
    def of_fields(self) -> list[DataMap]:
        """What is said of each field; of one, the map itself."""
        if not self.fields:
            return [self]
        alone = replace(self, fields=())
        if self.of_files:
            return [replace(alone, files=pattern) for pattern in self.fields]
        return [replace(alone, volume=array) for array in self.fields]

    @property
    def without_targets(self) -> DataMap:
        """Of volumes alone, as a trained network is shown them."""
        nothing: dict[str, Any] = {"targets": (), "table": None, "columns": (), "ranges": {}}
        return replace(self, labels="", classes=(), **nothing)
