"""Files of gzip: what they can hold at most, and what their end says."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperslab.errors import DataError

DEFLATE = 1032
"""What deflate makes smaller at most: 258 bytes in two bits [zlib.net/zlib_tech.html]."""

MOST_RATIO = 100
"""What counts of particles are packed by at most; masks, of mostly one class, by more."""

FREE_OF_DOUBT = 64 << 20
"""So little may be packed as well as it can be [B]."""

AT_A_TIME = 1 << 20


def check_packed(path: Path, size: int, most: int = DEFLATE) -> None:
    """Nothing, if a gzip file may well hold ``size`` bytes.

    Raises:
        DataError: it is too small for that.
    """
    packed = path.stat().st_size
    if size > packed * DEFLATE or (size > FREE_OF_DOUBT and size > packed * most):
        raise DataError(
            f"{path}: has {packed} bytes and says that it unpacks to {size}, which no volume does"
            "\n    if it is one, unpack it with gunzip first"
        )


@contextmanager
def opened_to_end(path: Path) -> Iterator[gzip.GzipFile]:
    """A gzip file of which everything is read, what is left over too: so its sum is compared.

    Raises:
        DataError: there is much more in it than was read.
        OSError, EOFError, zlib.error: it is damaged or cut short.
    """
    with gzip.open(path) as file:
        yield file
        left = 0
        while piece := file.read(AT_A_TIME):
            left = left + len(piece)
            if left > FREE_OF_DOUBT:
                raise DataError(f"{path}: unpacks to more than its header says; at least {left} B")
