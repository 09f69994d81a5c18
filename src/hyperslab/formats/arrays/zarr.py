"""Checks what a Zarr group says of where its arrays are, before Zarr is asked for values.

The specification lets a chunk that is all fill value be missing, so one that was lost would be
read as that: all chunks of a volume have to be there. Those of other arrays need not: libraries
leave out a redshift of 0. Within a group links of the file system may lead out of the folder no
more than HDF5's may: a group comes as one thing, from the one who packed it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hyperslab.errors import DataError
from hyperslab.formats.files import ALLOW_MISSING, FileAccess

MOST_READ = 256 << 20
"""The largest chunk that is read; each box needs the whole of it [B]."""


def check_beside(path: Path, key: str, array: Any, reach: FileAccess) -> None:
    """Refuses an array whose chunks are too large to be read, or links that leave the folder."""
    for sides in (array.chunks, array.shards or array.chunks):
        if min(sides, default=1) < 1:
            raise DataError(f"{path}: {key!r} is stored in chunks of {tuple(sides)} values")
    size = math.prod(array.chunks) * max(1, array.dtype.itemsize)
    if size > MOST_READ:
        raise DataError(
            f"{path}: {key!r} is stored in chunks of {size >> 20} MiB, and any box needs a whole "
            f"one; at most {MOST_READ >> 20} MiB are read\n    write it again in smaller ones"
        )
    _check_links(path / key, path, key, reach)


def check_chunks(
    path: Path, key: str, array: Any, reach: FileAccess, selection: Sequence[slice]
) -> None:
    """Refuses a selection if a chunk that it meets is missing and need not be."""
    if reach.allowed.missing_chunks:
        return
    sides = array.shards or array.chunks
    places = [
        range(part.start // side, -(-part.stop // side))
        for part, side in zip(selection, sides, strict=True)
    ]
    folder = path / key
    for place in _in_turn(places):
        name = array.metadata.encode_chunk_key(place)
        if not os.path.exists(folder / name):
            raise DataError(
                f"{path}: {key!r} lacks the chunk {name} and would be read as "
                f"{array.fill_value} there: it was lost, or never written\n    put it back, or "
                f"write the array again with write_empty_chunks=True; {ALLOW_MISSING}"
            )


def _in_turn(places: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yields what `itertools.product` does, which first makes lists of all that there is."""
    if not places:
        yield ()
        return
    for first in places[0]:
        for rest in _in_turn(places[1:]):
            yield (first, *rest)


def _check_links(folder: Path, path: Path, key: str, reach: FileAccess) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                reach.check(path, f"the link {entry.path} in {key!r}", Path(entry.path))
            elif entry.is_dir(follow_symlinks=False):
                _check_links(Path(entry.path), path, key, reach)
