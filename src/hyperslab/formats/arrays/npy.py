"""Reads numpy's .npy files: their headers, small arrays whole, and boxes piece by piece."""

from __future__ import annotations

import math
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.storage import read_strided
from hyperslab.geometry import Box

MOST_VECTOR = 1 << 20
"""The largest array of targets [B]."""


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """Describes the array of a file, which begins at ``start`` [B].

    ``fortran``: neighbours along the first dim lie beside each other, not those along the last.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def array_header(path: Path, at: int = 0) -> NpyHeader:
    """Reads the header of an array, which begins at byte ``at``: in an .npz after 0.

    Raises:
        OSError, EOFError, ValueError: it cannot be read, is cut short or is no .npy.
    """
    with path.open("rb") as file:
        file.seek(at)
        header = _read(file)
        _check_size(path, header)
    return header


def _check_size(path: Path, header: NpyHeader) -> int:
    """Counts the bytes of the array, which the file has to have."""
    size = math.prod(header.shape) * header.dtype.itemsize
    if any(extent < 0 for extent in header.shape):
        raise ValueError(f"its shape is {header.shape}")
    if path.stat().st_size < header.start + size and not header.dtype.hasobject:
        raise EOFError(f"it has {path.stat().st_size} of {header.start + size} bytes")
    return size


def read_vector(path: Path, most: int = MOST_VECTOR) -> NDArray[Any]:
    """Reads a small array of at most ``most`` bytes whole.

    Raises:
        DataError: it is not small.
        OSError, EOFError, ValueError: it cannot be read, is cut short or is no .npy.
    """
    with path.open("rb") as file:
        header = _read(file)
        if _check_size(path, header) > most:
            raise DataError(f"{path}: is {header.dtype} {header.shape}; needs a few numbers")
        file.seek(0)
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def read_values(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], box: Box, at: int = 0
) -> NDArray[Any]:
    """Reads a box of the array that begins at byte ``at``, if it has this shape and type.

    Raises:
        DataError: it is not.
        OSError, EOFError, ValueError: the file has gone, is cut short or is no .npy.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        header = _read(file)
        if header.shape != shape or header.dtype != dtype:
            raise DataError(
                f"{path}: is {header.dtype} {header.shape} but was {dtype} {shape} when the "
                "folder was scanned"
            )
        if not header.fortran:
            return read_strided(file.fileno(), header.start, shape, dtype, box)
        turned = Box(box.lo[::-1], box.hi[::-1])
        return read_strided(file.fileno(), header.start, shape[::-1], dtype, turned).T


def _read(file: IO[bytes]) -> NpyHeader:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format is for arrays of records")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except (tokenize.TokenError, SyntaxError, RecursionError) as error:  # it is Python's syntax
        raise ValueError(f"its header is no dictionary: {error}") from None
    return NpyHeader(shape, dtype, fortran, file.tell())
