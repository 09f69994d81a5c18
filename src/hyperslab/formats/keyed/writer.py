"""Files with keys, HDF5 or Zarr: universes as the public files have them, scans as LBANN's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hyperslab.formats.shared.chunking import Sides
from hyperslab.formats.shared.labels import KEYS
from hyperslab.formats.shared.slabs import Slabs
from hyperslab.formats.source import Array
from hyperslab.formats.writer import Part, Target

Order = tuple[int, int, int, int]

LAST: Order = (1, 2, 3, 0)
FIRST: Order = (0, 1, 2, 3)
REVERSED: Order = (0, 3, 2, 1)
"""Which of the dims C, D, H, W each dim of a file is."""


class KeyedTarget(Target):
    """Universes as the public files have them, channels last; scans as LBANN has them."""

    suffix: ClassVar[str]
    order: ClassVar[Order] = LAST
    chunked = True

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        return (name + self.suffix,)

    def write(self, folder: Path, name: str, part: Part) -> None:
        path = folder / (name + self.suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._created(path) as file:
            if part.source.classes:
                self._write_scan(file, part)
            else:
                self._write_universe(file, part)

    def _write_universe(self, file: Any, part: Part) -> None:
        extras, source = part.extras, part.source
        volume, target = self._keys(extras.keys)
        self._stream(file, volume, source.shape, source.dtype, self.order, part.values(), part)
        self._put(file, target, extras.target)
        for key, array in extras.arrays.items():
            self._put(file, key, array)
        self._put_names(file, "namePar", extras.names)
        # The shape of what is no cube would not tell.
        order = "last" if self.order == LAST else "first"
        self._describe(file, {**extras.attributes, "channels": order})

    def _write_scan(self, file: Any, part: Part) -> None:
        source, (volume, segmentation) = part.source, KEYS
        labels = ((lo, slab[None]) for lo, slab in part.labels())
        shape, uint8 = (1, *source.shape[1:]), np.dtype(np.uint8)
        self._stream(file, volume, source.shape, source.dtype, FIRST, part.values(), part)
        self._stream(file, segmentation, shape, uint8, FIRST, labels, part)
        affine = {} if part.extras.affine is None else {"affine": part.extras.affine}
        self._describe(file, {**affine, **part.extras.attributes, "classes": list(source.classes)})

    def _stream(
        self,
        file: Any,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        order: Order,
        slabs: Slabs,
        part: Part,
    ) -> None:
        """A data set of the volume (C, D, H, W) of which these are the slabs."""
        chunk = (shape[0], *part.chunk) if part.chunk else shape
        stored, chunks = (tuple(dims[dim] for dim in order) for dims in (shape, chunk))
        dataset = self._create(file, key, stored, dtype, chunks, part.compression)
        for lo, slab in slabs:
            hi = lo + slab.shape[1]
            where = tuple(slice(lo, hi) if dim == 1 else slice(None) for dim in order)
            dataset[where] = np.ascontiguousarray(slab.transpose(order))
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
