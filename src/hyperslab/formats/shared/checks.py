"""Errors that name the file, and values that cannot be right."""

from __future__ import annotations

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
