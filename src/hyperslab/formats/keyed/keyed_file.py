"""`KeyedFile`: an open HDF5 file or Zarr group, of which arrays are looked up by their keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from hyperslab.errors import DataError
from hyperslab.formats.keyed import hdf5_storage, zarr_storage
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.reach import Reach

MOST_BESIDE = 1 << 20
"""Of an array beside the volume, such as targets [B]."""


def kind_of(path: Path) -> str:
    """``"Zarr"`` or ``"HDF5"``, by the name."""
    return "Zarr" if path.suffix == ".zarr" else "HDF5"


@contextmanager
def opened(path: Path, reach: Reach) -> Iterator[KeyedFile]:
    """The file or Zarr group; ``reach``: how far it may refer to others."""
    if kind_of(path) == "Zarr":
        yield KeyedFile(path, optional.zarr().open_group(path, mode="r", zarr_format=3), reach)
        return
    with h5py.File(path, "r", locking=False) as file:
        yield KeyedFile(path, file, reach)


class KeyedFile:
    """What is open under ``path``. Arrays are given when it is clear that they can be read.

    Links that leave the reach are refused before they are followed.
    """

    def __init__(self, path: Path, file: Any, reach: Reach) -> None:
        self.path = path
        self.file = file
        self.reach = reach
        self.zarr = kind_of(path) == "Zarr"

    @property
    def attrs(self) -> Any:
        return self.file.attrs

    def keys(self) -> list[str]:
        """All that there are, sorted; of a group too."""
        return sorted(self.file)

    def has(self, key: str) -> bool:
        """Whether there is something under a key."""
        if self.zarr:
            return key in self.file
        return self.file.get(key, getlink=True) is not None

    def find(self, key: str) -> Any | None:
        """The array under a key, of which nothing but shape and type is read; None without one.

        Raises:
            DataError: a link leaves the reach.
        """
        if not self.has(key):
            return None
        if self.zarr:
            found = self.file[key]
        else:
            found = hdf5_storage.linked(self.path, self.file, key, self.reach)
        return found if hasattr(found, "ndim") else None

    def check_volume(self, key: str, volume: Any) -> None:
        """Nothing, if all values of a volume are there.

        Raises:
            DataError: they are not, or not to be read in reasonable memory.
        """
        check = zarr_storage.check_array if self.zarr else hdf5_storage.check_volume
        check(self.path, key, volume, self.reach)

    def check_labels(self, key: str, labels: Any) -> None:
        """As `check_volume`, of what may well be all zeros."""
        check = zarr_storage.check_array if self.zarr else hdf5_storage.check_storage
        check(self.path, key, labels, self.reach)

    def small(self, key: str) -> Any | None:
        """An array beside the volume, which can be read whole; None where there is none.

        Raises:
            DataError: it is not small, was never written, or a link leaves the reach.
        """
        found = self.find(key)
        if found is not None:
            if found.size * max(1, found.dtype.itemsize) > MOST_BESIDE:
                raise DataError(f"{self.path}: {key!r} has {found.size} values; needs a few")
            check = zarr_storage.check_beside if self.zarr else hdf5_storage.check_storage
            check(self.path, key, found, self.reach)
        return found
