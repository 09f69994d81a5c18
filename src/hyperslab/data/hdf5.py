"""A folder of HDF5 files as a `Source`: a box of a volume is one hyperslab of a file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hyperslab.comm import Grid
from hyperslab.data.catalog import Catalog, from_main, scan
from hyperslab.data.header import Channels, naming
from hyperslab.data.labels import KEYS, as_classes
from hyperslab.data.source import Array, Source
from hyperslab.errors import DataError
from hyperslab.geometry import Box

HANDLES = 4
"""Files kept open: enough for the sub-volumes of one cube and those of its neighbours."""


class Hdf5Folder(Source):
    """The samples of a `Catalog`, one file each. Every process opens the files for itself."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.names = catalog.names
        self.shape = catalog.layout.shape
        self.dtype = np.dtype(catalog.layout.dtype)
        self.parameters = catalog.parameters
        self.classes = catalog.layout.classes
        if self.classes:
            channels, itemsize = catalog.layout.label_shape[0], catalog.layout.label_dtype
            self.label_bytes = channels * np.dtype(itemsize).itemsize
        self._open: OrderedDict[str, h5py.File] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def scan(cls, path: str | Path, grid: Grid, channels: Channels | None = None) -> Hdf5Folder:
        """The folder as the main rank sees it. All ranks call this. Errors: see `catalog.scan`."""
        return cls(from_main(grid, lambda: scan(Path(path), channels)))

    def target(self, sample: int) -> Array:
        return self.catalog.unit[sample]

    def where(self, sample: int) -> str:
        return str(self.catalog.folder / self.catalog.files[sample])

    def read(self, sample: int, box: Box) -> Array:
        """Read one hyperslab.

        Raises:
            DataError: the file has gone, is damaged, or has changed since it was catalogued.
        """
        last = self.catalog.layout.channels == "last"
        stored = Box(box.lo[1:] + box.lo[:1], box.hi[1:] + box.hi[:1]) if last else box
        values = np.empty(stored.shape, self.dtype)
        with naming(self.catalog.folder / self.catalog.files[sample]), self._lock:
            layout = self.catalog.layout
            volume = self._stored(sample, layout.key, layout.stored, layout.dtype)
            volume.read_direct(values, source_sel=stored.slices())
        return np.moveaxis(values, -1, 0) if last else values

    def labels(self, sample: int, box: Box) -> Array:
        """Read one hyperslab of the labels; errors as `read`, and labels that are no classes."""
        layout = self.catalog.layout
        stored = np.empty((layout.label_shape[0], *box.shape), layout.label_dtype)
        with naming(self.catalog.folder / self.catalog.files[sample]), self._lock:
            labels = self._stored(sample, KEYS[1], layout.label_shape, layout.label_dtype)
            labels.read_direct(stored, source_sel=(slice(None), *box.slices()))
        return as_classes(stored, f"{self.where(sample)}: {box}")

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _stored(self, sample: int, key: str, shape: tuple[int, ...], dtype: str) -> Any:
        stored = self._file(self.catalog.files[sample])[key]
        if stored.shape != shape or stored.dtype.name != dtype:
            raise DataError(
                f"{self.where(sample)}: {key!r} is {stored.dtype} {stored.shape} but was "
                f"{dtype} {shape} when the folder was scanned"
            )
        return stored

    def _file(self, name: str) -> h5py.File:
        """An open file; the least recently used one makes room."""
        if name not in self._open:
            if len(self._open) >= HANDLES:
                self._open.popitem(last=False)[1].close()
            self._open[name] = h5py.File(self.catalog.folder / name, "r", locking=False)
        self._open.move_to_end(name)
        return self._open[name]
