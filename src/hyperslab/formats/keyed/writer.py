"""Files with keys, HDF5 or Zarr: universes as the public files have them, scans as LBANN's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hyperslab.formats.shared.chunking import Sides
from hyperslab.formats.shared.labels import SCAN_KEYS
from hyperslab.formats.shared.storage_order import CDHW, DHWC, StorageOrder
from hyperslab.formats.slabs import Slabs
from hyperslab.formats.source import Array
from hyperslab.formats.writer import SampleToWrite, Writer
from hyperslab.geometry import Box


@dataclass(frozen=True, slots=True)
class ArrayToWrite:
    """The array ``key`` of a volume of ``shape`` (C, D, H, W), stored in an ``order``."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: StorageOrder


class KeyedWriter(Writer):
    """Universes as the public files have them, channels last; scans as LBANN has them."""

    suffix: ClassVar[str]
    order: ClassVar[StorageOrder] = DHWC
    compressions: ClassVar[tuple[str, ...]] = ("none", "gzip")
    labels = True
    chunked = True

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        return (name + self.suffix,)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        with self._created(folder / (name + self.suffix)) as file:
            if sample.source.classes:
                self._write_scan(file, sample)
            else:
                self._write_universe(file, sample)

    def _write_universe(self, file: Any, sample: SampleToWrite) -> None:
        extras = sample.extras
        source = sample.source
        volume, target = self._keys(extras.keys)
        whole = ArrayToWrite(volume, source.shape, source.dtype, self.order)
        self._stream(file, whole, sample.values(), sample)
        self._put(file, target, extras.target)
        for key, array in extras.arrays.items():
            self._put(file, key, array)
        self._put_names(file, "namePar", extras.names)
        # The shape of what is no cube would not tell.
        order = "last" if self.order == DHWC else "first"
        self._describe(file, {**extras.attributes, "channels": order})

    def _write_scan(self, file: Any, sample: SampleToWrite) -> None:
        source = sample.source
        extras = sample.extras
        volume, segmentation = SCAN_KEYS
        whole = ArrayToWrite(volume, source.shape, source.dtype, CDHW)
        self._stream(file, whole, sample.values(), sample)
        shape = (1, *source.shape[1:])
        classes = ArrayToWrite(segmentation, shape, np.dtype(np.uint8), CDHW)
        labels = ((lo, slab[None]) for lo, slab in sample.labels())
        self._stream(file, classes, labels, sample)
        affine = {} if extras.affine is None else {"affine": extras.affine}
        self._describe(file, {**affine, **extras.attributes, "classes": list(source.classes)})

    def _stream(self, file: Any, array: ArrayToWrite, slabs: Slabs, sample: SampleToWrite) -> None:
        """Create the array of which these are the slabs, and fill it."""
        order = array.order
        shape = array.shape
        chunk = (shape[0], *sample.chunk) if sample.chunk else shape
        stored = order.stored_shape(shape)
        chunks = order.stored_shape(chunk)
        dataset = self._create(file, array.key, stored, array.dtype, chunks, sample.compression)
        for lo, slab in slabs:
            box = Box((0, lo, 0, 0), (shape[0], lo + slab.shape[1], *shape[2:]))
            where = order.to_file(box).slices()
            dataset[where] = np.ascontiguousarray(order.from_volume(slab))
            self._check(file)

    def _keys(self, keys: tuple[str, str]) -> tuple[str, str]:
        return keys

    @abstractmethod
    def _created(self, path: Path) -> AbstractContextManager[Any]:
        """A new file."""

    @abstractmethod
    def _create(
        self,
        file: Any,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sides,
        compression: str,
    ) -> Any:
        """A new data set to be filled."""

    def _check(self, file: Any) -> None:
        """Raise what went wrong in writing, where the format does not do so itself."""

    @abstractmethod
    def _put(self, file: Any, key: str, array: Array | None) -> None:
        """A small data set."""

    @abstractmethod
    def _put_names(self, file: Any, key: str, names: tuple[str, ...]) -> None:
        """A data set of words."""

    @abstractmethod
    def _describe(self, file: Any, attributes: Mapping[str, Any]) -> None:
        """Attributes of the file, as far as the format has such."""
