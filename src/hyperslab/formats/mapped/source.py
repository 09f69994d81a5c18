"""Arrays with keys, or many in one file, as a `Source`: of each a rank reads its box."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.formats.io_cost import Storage
from hyperslab.formats.keyed.hdf5 import Hdf5Opener
from hyperslab.formats.keyed.opener import KeyedOpener, StoredArray
from hyperslab.formats.keyed.zarr import ZarrOpener
from hyperslab.formats.mapped.published import recognised
from hyperslab.formats.mapped.scan import SHOWN_AS, MappedArrays, scan_arrays
from hyperslab.formats.mapped.stored import kind_of_file, read_box_of, stamped_file
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.fingerprint import unchanged
from hyperslab.formats.source import Array, ScanOptions, Source
from hyperslab.geometry import Box


class MappedFolder(Source):
    """The samples of `MappedArrays`: files of one volume each, or of many, with their targets."""

    targets_apart = True

    def __init__(self, arrays: MappedArrays) -> None:
        self.arrays = arrays
        first = arrays.arrays[0]
        self.stacked = arrays.places[0][1] is not None
        self.stored = first.shape[int(self.stacked) :]
        self.names = arrays.names
        self.order = arrays.order
        self.shape = arrays.order.volume_shape(self.stored)
        self.dtype = np.dtype(SHOWN_AS[np.dtype(first.dtype).name])
        self.parameters = arrays.parameters
        self.remark = arrays.remark
        self.openers: dict[str, KeyedOpener] = {"HDF5": Hdf5Opener(), "Zarr": ZarrOpener()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files for itself."""
        return MappedFolder, (self.arrays,)

    @classmethod
    def claims(cls, path: Path) -> bool:
        """Whether a folder, or a file, is such data by its names, whatever their suffixes say."""
        return recognised(path) is not None or (path.is_file() and kind_of_file(path) == "npy")

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> MappedFolder:
        return cls(scan_arrays(folder, options))

    def where(self, sample: int) -> str:
        row = self.arrays.places[sample][1]
        return str(self._path(sample)) + ("" if row is None else f", row {row}")

    def target(self, sample: int) -> Array:
        return self.arrays.targets[sample]

    def read(self, sample: int, box: Box) -> Array:
        """The box, in one selection of the array.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        arrays = self.arrays
        number, row = arrays.places[sample]
        file = arrays.files[number]
        path = arrays.folder / file
        array = arrays.arrays[number]
        stored = arrays.order.to_file(box)
        if row is not None:
            stored = Box((row, *stored.lo), (row + 1, *stored.hi))
        kind = kind_of_file(path)
        if kind in self.openers:
            wanted = StoredArray(
                path,
                kind,
                array.key,
                array.shape,
                np.dtype(array.dtype).name,
                self.names[sample],
                stamped_file(path, array.key),
                arrays.stamps[file],
                arrays.reach,
            )
            found = self.openers[kind].read(wanted, stored.slices())
        else:
            with unchanged(path, self.names[sample], arrays.stamps[file]), naming(path, kind):
                found = read_box_of(path, array, stored)
        if row is not None:
            found = found[0]
        return arrays.order.to_volume(found.astype(found.dtype.newbyteorder("="), copy=False))

    def storage(self, sample: int) -> Storage | None:
        """Known of .npy and .npz in C's order, whose samples lie in one piece each."""
        array = self.arrays.arrays[self.arrays.places[sample][0]]
        if kind_of_file(self._path(sample)) in self.openers or array.fortran:
            return None
        item = np.dtype(array.dtype).itemsize
        size = item * math.prod(self.stored)
        return Storage(self.arrays.order, self.stored, item, size, bridged=True)

    def files(self, sample: int) -> tuple[Path, ...]:
        """The volume's, and the table."""
        table = self.arrays.table
        return (self._path(sample), *(() if table is None else (table,)))

    def alone(self, sample: int) -> MappedFolder:
        one = slice(sample, sample + 1)
        arrays = self.arrays
        return MappedFolder(
            replace(
                arrays,
                places=arrays.places[one],
                names=arrays.names[one],
                targets=arrays.targets[one],
            )
        )

    def close(self) -> None:
        for opener in self.openers.values():
            opener.close()

    def _path(self, sample: int) -> Path:
        return self.arrays.folder / self.arrays.files[self.arrays.places[sample][0]]
