"""A folder of files with keys as a `Source`: a box of a volume is one selection in a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from hyperslab.comm import Grid, notice
from hyperslab.comm.agreement import from_main
from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import SUFFIXES, Catalog, scan, stamped
from hyperslab.formats.keyed.header import Channels, Part, kind_of
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.fingerprint import unchanged
from hyperslab.formats.shared.labels import KEYS, as_classes
from hyperslab.formats.shared.listing import Refuse
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box

Selection = tuple[slice, ...]


class KeyedFolder(Source):
    """The samples of a `Catalog`, one file each. Every process opens the files for itself."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

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

    @classmethod
    def scan(
        cls,
        path: str | Path,
        grid: Grid,
        channels: Channels | None = None,
        lbann: bool | None = None,
        refuse: Refuse | None = None,
    ) -> Self:
        """The folder as the main rank sees it. All ranks call this. Errors: see `catalog.scan`.

        ``lbann``: whether the spatial dims are stored reversed; ``None`` finds it out.
        """
        folder = Path(path)
        source = cls(from_main(lambda: scan(folder, channels, lbann, cls.suffixes, refuse)))
        if source.catalog.layout.reversed and lbann is None:
            notice(
                grid,
                f"{path}: sub-volumes of LBANN's by key, order and names; their reversed spatial "
                'dims (C, W, H, D) are read as (C, D, H, W); format="hdf5" takes them as they are',
            )
        return source

    def target(self, sample: int) -> Array:
        return self.catalog.unit[sample]

    def where(self, sample: int) -> str:
        return str(self.catalog.folder / self.catalog.files[sample])

    def volume(self, sample: int) -> str:
        """The sample itself, or the cube of which LBANN's splitter has made it a part."""
        name = self.names[sample]
        if name in self.volumes:
            return self.volumes[name]
        folder, slash, base = name.rpartition("/")
        part = Part.fullmatch(base) if self.catalog.layout.reversed else None
        return f"{folder}{slash}{part[1]}" if part else name

    def read(self, sample: int, box: Box) -> Array:
        """Read one hyperslab.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        layout = self.catalog.layout
        last = layout.channels == "last"
        channel, *spatial = box.slices()
        if layout.reversed:
            spatial.reverse()
        stored = (*spatial, channel) if last else (channel, *spatial)
        values = self._load(sample, layout.key, layout.stored, layout.dtype, stored)
        if layout.reversed:
            return values.transpose(0, 3, 2, 1)
        return np.moveaxis(values, -1, 0) if last else values

    def labels(self, sample: int, box: Box) -> Array:
        """Read one hyperslab of the labels; errors as `read`, and labels that are no classes."""
        layout = self.catalog.layout
        selection = (slice(0, layout.label_shape[0]), *box.slices())
        stored = self._load(sample, KEYS[1], layout.label_shape, layout.label_dtype, selection)
        return as_classes(stored, f"{self.where(sample)}: {box}")

    def _load(
        self, sample: int, key: str, shape: tuple[int, ...], dtype: str, selection: Selection
    ) -> Array:
        """What is selected of a data set that has to be of this shape and type."""
        with self._reading(sample, key):
            dataset = self._dataset(sample, key, shape, dtype)
            return self._fetch(dataset, selection, np.dtype(dtype))

    @abstractmethod
    def _file(self, name: str) -> Any:
        """The open file of this relative name: a mapping from keys to data sets."""

    @abstractmethod
    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        """The selected values of a data set, in the order of the file, as native ``dtype``."""

    @contextmanager
    def _reading(self, sample: int, key: str) -> Iterator[None]:
        """What goes wrong within names the file; that the file has changed is such a thing."""
        catalog, file = self.catalog, self.catalog.files[sample]
        path, name = catalog.folder / file, stamped(file, key)
        with (
            unchanged(catalog.folder / name, self.names[sample], catalog.stamps[name]),
            naming(path, kind_of(path)),
        ):
            yield

    def _dataset(self, sample: int, key: str, shape: tuple[int, ...], dtype: str) -> Any:
        stored = self._file(self.catalog.files[sample])[key]
        if stored.shape != shape or stored.dtype.name != dtype:
            raise DataError(
                f"{self.where(sample)}: {key!r} is {stored.dtype} {stored.shape} but was "
                f"{dtype} {shape} when the folder was scanned"
            )
        return stored
