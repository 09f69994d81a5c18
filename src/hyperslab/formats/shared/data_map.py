"""`DataMap`: what a user says of where volumes and targets are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hyperslab.errors import DataError

OWN_DATA = "docs/own-data.md"


@dataclass(frozen=True, slots=True)
class DataMap:
    """Where the volumes of a folder, or of one file, and their targets are.

    ``files``: a pattern of the files with volumes, relative to the folder; by default all arrays
    in it. ``volume``: the array's path in an HDF5 file, Zarr group or .npz. ``targets``: paths in
    the same file of arrays, or of attributes, ``group@name``. ``table``: a text or .npy file with
    a row of targets for each sample, in the folder or anywhere else. ``columns``: their names.
    ``ranges``: by name, the values that become -1 and 1; by default those of a published data set
    where its table is recognised, or the least and the greatest of all rows.

    Raises:
        DataError: targets are in two places, or a range is none.
    """

    files: str = ""
    volume: str = ""
    targets: tuple[str, ...] = ()
    table: Path | None = None
    columns: tuple[str, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.targets and self.table is not None:
            raise DataError(
                "data.keys.targets and data.table are two places of targets; give one of them"
            )
        for name, (low, high) in self.ranges.items():
            if not (math.isfinite(high - low) and low < high):
                raise DataError(f"data.ranges.{name}={[low, high]}: give two numbers, low to high")
