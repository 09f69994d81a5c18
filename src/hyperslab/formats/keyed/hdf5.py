"""A folder of HDF5 files as a `Source`: a box of a volume is one hyperslab of a file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import Catalog
from hyperslab.formats.keyed.hdf5_mpio import MpioOpener, replica_of
from hyperslab.formats.keyed.hdf5_storage import check_storage
from hyperslab.formats.keyed.header import lbann_of
from hyperslab.formats.keyed.opener import KeyedOpener, Selection, StoredArray
from hyperslab.formats.keyed.source import KeyedFolder
from hyperslab.formats.source import Array, ScanOptions

HANDLES = 4
"""Files kept open: enough for the sub-volumes of one cube and those of its neighbours."""


class Hdf5Folder(KeyedFolder):
    """HDF5 files of the layouts that `header` knows, read by this rank alone or by MPI-IO."""

    def __init__(self, catalog: Catalog, opener: KeyedOpener | None = None) -> None:
        super().__init__(catalog, Hdf5Opener() if opener is None else opener)

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Self:
        return cls.scanned(folder, options, lbann_of(options.format))

    def read_together(self, driver: str, grid: Grid) -> Hdf5Folder:
        return Hdf5Folder(self.catalog, MpioOpener(replica_of(grid)))


class Hdf5Opener(KeyedOpener):
    """Opens HDF5 files for one rank; the files used last stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, h5py.File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, array: StoredArray, selection: Selection) -> Array:
        with self._lock:
            try:
                with array.as_scanned():
                    dataset = array.of(self._file(array.path))
                    if dataset.is_virtual or dataset.external:  # the other files have no stamps
                        check_storage(array.path, array.key, dataset, array.reach)
                    return self._fetch(dataset, selection, np.dtype(array.dtype))
            except DataError:
                if file := self._open.pop(array.path, None):
                    file.close()  # it may not be the file of this name any more
                raise

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _file(self, path: Path) -> h5py.File:
        """An open file; the least recently used one makes room."""
        if path not in self._open:
            if len(self._open) >= HANDLES:
                self._open.popitem(last=False)[1].close()
            self._open[path] = h5py.File(path, "r", locking=False)
        self._open.move_to_end(path)
        return self._open[path]

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        values = np.empty([s.stop - s.start for s in selection], dtype)
        dataset.read_direct(values, source_sel=selection)
        return values
