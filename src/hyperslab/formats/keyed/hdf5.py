"""A folder of HDF5 files as a `Source`: a box of a volume is one hyperslab of a file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import h5py
import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import Catalog
from hyperslab.formats.keyed.source import KeyedFolder, Selection
from hyperslab.formats.source import Array
from hyperslab.geometry import Box

HANDLES = 4
"""Files kept open: enough for the sub-volumes of one cube and those of its neighbours."""


class Hdf5Folder(KeyedFolder):
    """HDF5 files of the layouts that `header` knows; the files used last stay open."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._open: OrderedDict[str, h5py.File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, sample: int, box: Box) -> Array:
        with self._lock:
            return super().read(sample, box)

    def labels(self, sample: int, box: Box) -> Array:
        with self._lock:
            return super().labels(sample, box)

    def _load(self, sample: int, *what: Any) -> Array:
        try:
            return super()._load(sample, *what)
        except DataError:
            if file := self._open.pop(self.catalog.files[sample], None):
                file.close()  # it may not be the file of this name any more
            raise

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        values = np.empty([s.stop - s.start for s in selection], dtype)
        dataset.read_direct(values, source_sel=selection)
        return values

    def _file(self, name: str) -> h5py.File:
        """An open file; the least recently used one makes room."""
        if name not in self._open:
            if len(self._open) >= HANDLES:
                self._open.popitem(last=False)[1].close()
            self._open[name] = h5py.File(self.catalog.folder / name, "r", locking=False)
        self._open.move_to_end(name)
        return self._open[name]
