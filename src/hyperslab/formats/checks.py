"""Checks values that were read, and turns errors of libraries into errors that name the file."""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, HyperslabError

ErrorKinds = tuple[type[Exception], ...]

OF_LIBRARIES: ErrorKinds = (
    OSError,
    EOFError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    zlib.error,
    csv.Error,
)
"""What a library raises about a file that is not what it should be."""

ANY: ErrorKinds = (Exception,)
"""Of libraries in which damaged bytes can raise anything."""


@contextmanager
def naming(where: Path | str, what: str, kinds: ErrorKinds = OF_LIBRARIES) -> Iterator[None]:
    """Turn what a library raises about a file of the format ``what`` into an error that names it.

    Raises:
        DataError: in place of one of these ``kinds``; errors of our own and want of memory pass.
    """
    try:
        yield
    except (HyperslabError, MemoryError):
        raise
    except kinds as error:
        raise DataError(
            f"{where}: cannot be read as {what}, truncated or foreign?: {error}"
        ) from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Say of which sample the system, or a library, has complained.

    Raises:
        DataError: in place of its OSError or EOFError; errors of our own pass.
    """
    try:
        yield
    except HyperslabError:
        raise
    except (OSError, EOFError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from error


def check_shape(values: NDArray[Any], shape: tuple[int, ...], where: str) -> None:
    """Nothing, if what was read as ``where`` has the shape of that.

    Raises:
        DataError: it has another one.
    """
    if values.shape != shape:
        raise DataError(f"{where} was read as {values.shape}")


def as_stored(values: NDArray[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """In the storage type, for boxes of one type have one size; a source may be generous.

    Raises:
        DataError: whole numbers that the storage type does not hold.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        stored = values.astype(dtype)
    if dtype.kind in "iu" and (stored != values).any():
        raise DataError(f"{where} was read as {values.dtype} with values that are no {dtype}")
    return stored


def check_finite(values: NDArray[Any], where: str) -> tuple[Any, Any]:
    """The least and the greatest of the values.

    Raises:
        DataError: they are NaN or infinite.
    """
    with np.errstate(invalid="ignore"):
        low = values.min()
        high = values.max()
    if values.dtype.kind == "f" and not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{where} holds NaN or infinite values")
    return low, high
