"""`KeyedOpener`: how the files of a `KeyedFolder` are opened and read, by one library each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperslab.errors import DataError
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.fingerprint import Stamp, unchanged
from hyperslab.formats.shared.reach import Reach
from hyperslab.formats.source import Array

Selection = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, as both were when the folder was scanned.

    ``kind``: of the file, ``"HDF5"`` or ``"Zarr"``. ``stamped``: the file that had the ``stamp``.
    ``reach``: the files that this one may refer to.
    """

    path: Path
    kind: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    sample: str
    stamped: Path
    stamp: Stamp
    reach: Reach

    @contextmanager
    def as_scanned(self) -> Iterator[None]:
        """What goes wrong within names the file; that the file has changed is such a thing.

        Raises:
            DataError: in place of what the library raises.
        """
        with unchanged(self.stamped, self.sample, self.stamp), naming(self.path, self.kind):
            yield

    def of(self, file: Any) -> Any:
        """The array in the open file.

        Raises:
            DataError: it has another shape or type than it had.
        """
        stored = file[self.key]
        if stored.shape != self.shape or stored.dtype.name != self.dtype:
            raise DataError(
                f"{self.path}: {self.key!r} is {stored.dtype} {stored.shape} but was "
                f"{self.dtype} {self.shape} when the folder was scanned"
            )
        return stored


class KeyedOpener(ABC):
    """Opens files with keys. Every process has one of its own.

    ``collective``: the ranks of a replica read together.
    """

    collective: bool = False

    @abstractmethod
    def read(self, array: StoredArray, selection: Selection) -> Array:
        """The selected values, in the order of the file and native byte order.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """

    def close(self) -> None:  # noqa: B027 - some hold nothing open
        """Let go of what is open."""
