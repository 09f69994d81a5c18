"""Unpacks chunks of HDF5 within bounds.

HDF5 takes memory for as much as comes out of deflate, whatever the chunk says that it holds. So
the chunks that may become large are unpacked here, up to what they say and no further: once, as
HDF5 reads what was found honest. Small ones, and chunks that are not there, are HDF5's, as is what
deflate finds to be damaged: it names that.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.files import DEFLATE_RATIO
from hyperslab.formats.source import Array
from hyperslab.geometry import Box

PACKED_LARGER = 64 << 10
"""Bytes that filters may add to a chunk which they cannot pack; HDF5's own leave it as it is."""

UNPACKED_FREELY = 192 << 20
"""The size of a chunk [B] that any may unpack to, whatever it says."""

PIECE = 64 << 10
"""Bytes that are given to deflate at a time, which makes at most 66 MiB of them [B]."""

AT_ONCE = 16 << 20
"""Limits what is unpacked in one piece [B]."""

DEFLATE = h5py.h5z.FILTER_DEFLATE
SHUFFLE = h5py.h5z.FILTER_SHUFFLE
FLETCHER32 = h5py.h5z.FILTER_FLETCHER32

WORDS = {DEFLATE: "gzip", h5py.h5z.FILTER_SZIP: "szip", h5py.h5z.FILTER_LZF: "lzf"}
"""Names filters that pack, as h5py does: its own words fail on a filter that lacks its options."""

UNDONE_HERE = tuple(
    (*before, DEFLATE, *behind) for before in ((), (SHUFFLE,)) for behind in ((), (FLETCHER32,))
)
"""Filters, in the order in which they pack, that are undone without HDF5."""

Doubts = dict[tuple[Path, str], set[tuple[int, ...]]]
"""Holds where the chunks of arrays begin that may unpack to much and have not been looked at."""


def filters_of(dataset: Any) -> tuple[int, ...]:
    """Lists the codes of the filters; the masks of chunks have a bit for each."""
    filters = dataset.id.get_create_plist()
    return tuple(filters.get_filter(i)[0] for i in range(filters.get_nfilters()))


def chunks_of(dataset: Any) -> list[Any]:
    """Lists what is known of each chunk that is stored."""
    chunks: list[Any] = []
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(chunks.append)
    else:  # HDF5 before 1.10.9 has to be asked one by one
        chunks = [dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks())]
    return chunks


def named_file(path: Path, name: str) -> Path:
    """Finds the file that HDF5 opens where the file ``path`` names another one.

    One that is named absolutely and has been moved it looks for by its last part. (H5F.c,
    H5F_prefix_open_file)
    """
    last = os.path.basename(name) if os.path.isabs(name) else name
    folders = (path.parent, Path(), Path(os.path.realpath(path)).parent)
    found = [Path(name)] if os.path.isabs(name) else []
    found += [folder / last for folder in folders]
    return next((file for file in found if file.is_file()), found[0])


def read_box(path: Path, key: str, dataset: Any, box: Box, doubts: Doubts) -> Array:
    """Reads a box of an array, with native bytes; ``doubts`` keep what is left to be looked at.

    A chunk that unpacks to more than it says, or to less, is refused.
    """
    values = np.empty(box.shape, dataset.dtype.newbyteorder("="))
    doubtful = _doubtful_in(path, key, dataset, box, doubts)
    if not doubtful or not _undone_here(dataset):
        check_unpacked(path, key, dataset, box, doubts)
        dataset.read_direct(values, source_sel=box.slices())
        return values
    for chunk in _chunks_in(dataset, box):
        part = chunk.intersect(box)
        found = _unpacked(path, key, dataset, chunk, part) if chunk.lo in doubtful else None
        if found is None:
            dataset.read_direct(values, part.slices(), part.slices(box))
        else:
            values[part.slices(box)] = found
            doubts[path, key].remove(chunk.lo)
    return values


def check_unpacked(path: Path, key: str, dataset: Any, box: Box, doubts: Doubts) -> None:
    """Refuses a chunk that a box of an array needs and that unpacks to more than it says.

    They are unpacked piece by piece, and the pieces thrown away; once, as ``doubts`` keep what is
    left.
    """
    if dataset.is_virtual:
        for source in dataset.virtual_sources():
            own = source.file_name == "."
            target = path if own else named_file(path, source.file_name.replace("%%", "%"))
            with h5py.File(target, "r", locking=False) as file:
                found = file[source.dset_name]
                check_unpacked(target, source.dset_name, found, Box.whole(found.shape), doubts)
        return
    for place in sorted(_doubtful_in(path, key, dataset, box, doubts)):
        most = _size_of_chunk(dataset) + PACKED_LARGER
        _, packed = dataset.id.read_direct_chunk(place)
        with suppress(zlib.error):
            if sum(map(len, _inflated(packed, most))) > most:
                raise _unpacks_to_more(path, key, dataset, place, packed)
        doubts[path, key].remove(place)


def _doubtful_in(
    path: Path, key: str, dataset: Any, box: Box, doubts: Doubts
) -> set[tuple[int, ...]]:
    """Finds the chunks that a box needs and that may unpack to more than is free of doubt."""
    if dataset.is_virtual or dataset.chunks is None:
        return set()
    if (path, key) not in doubts:
        doubts[path, key] = _doubtful_chunks(path, key, dataset)
    return {
        place for place in doubts[path, key] if not _chunk_at(dataset, place).intersect(box).empty
    }


def _doubtful_chunks(path: Path, key: str, dataset: Any) -> set[tuple[int, ...]]:
    """Finds the chunks that may unpack to more than is free of doubt, and than they say."""
    codes = filters_of(dataset)
    if codes.count(DEFLATE) > 1:
        raise DataError(
            f"{path}: {key!r} is packed twice\n    h5repack -f GZIP=4 OLD NEW repairs it"
        )
    if DEFLATE not in codes:
        return set()
    bit = 1 << codes.index(DEFLATE)
    believed = max(_size_of_chunk(dataset) + PACKED_LARGER, UNPACKED_FREELY) // DEFLATE_RATIO
    return {
        chunk.chunk_offset
        for chunk in chunks_of(dataset)
        if chunk.size > believed and not chunk.filter_mask & bit
    }


def _undone_here(dataset: Any) -> bool:
    """Tells if the filters are those that are undone here, of numbers that are numpy's."""
    dtype = dataset.dtype
    if dtype.kind not in "iuf" or h5py.h5t.py_create(dtype) != dataset.id.get_type():
        return False
    if filters_of(dataset) not in UNDONE_HERE:
        return False
    _, _, (*sides,), _ = dataset.id.get_create_plist().get_filter(0)
    return filters_of(dataset)[0] != SHUFFLE or sides == [dtype.itemsize]


def _unpacked(path: Path, key: str, dataset: Any, chunk: Box, part: Box) -> Array | None:
    """Returns a part of a chunk, with the bytes of the file; None for what is damaged."""
    codes = filters_of(dataset)
    mask, packed = dataset.id.read_direct_chunk(chunk.lo)
    done = {code for bit, code in enumerate(codes) if not mask & 1 << bit}
    if FLETCHER32 in done:
        packed, end = packed[:-4], packed[-4:]
        if _fletcher32(packed) != int.from_bytes(end, "little"):
            return None
    size = _size_of_chunk(dataset)
    try:
        unpacked = b"".join(_inflated(packed, size))
    except zlib.error:
        return None
    if len(unpacked) > size:
        raise _unpacks_to_more(path, key, dataset, chunk.lo, packed)
    if len(unpacked) < size:
        raise DataError(
            f"{path}: {key!r} has a chunk at {chunk.lo} that unpacks to {len(unpacked)} bytes, "
            f"less than the {size} that it says\n    get a fresh copy of the file"
        )
    raw = np.frombuffer(unpacked, np.uint8)
    inner = part.slices(chunk)
    if SHUFFLE not in done:
        return raw.view(dataset.dtype).reshape(chunk.shape)[inner]
    values = np.empty(part.shape, dataset.dtype)
    places = values.view(np.uint8).reshape(*part.shape, -1)
    for number, plane in enumerate(raw.reshape(-1, *chunk.shape)):  # the first bytes of all, ...
        places[..., number] = plane[inner]
    return values


def _inflated(packed: bytes, most: int) -> Iterator[bytes]:
    """Yields what deflate makes of it, piece by piece, and no more than one byte above ``most``.

    Damaged bytes, or too few, are a zlib.error.
    """
    stream = zlib.decompressobj()
    step = PIECE if most > AT_ONCE else max(1, len(packed))
    for at in range(0, len(packed), step):
        piece = stream.decompress(packed[at : at + step], most + 1)
        most -= len(piece)
        yield piece
        if stream.eof or most < 0:
            return
    raise zlib.error("it is cut short")


def _fletcher32(data: bytes) -> int:
    """Computes Fletcher's sum of 16-bit words, the first byte the higher, as HDF5 does."""
    first = second = 0
    for at in range(0, len(data), PIECE):
        piece = data[at : at + PIECE]
        words = np.frombuffer(piece + b"\0" * (len(piece) % 2), ">u2").astype(np.float64)  # exact
        second += len(words) * first + int(words @ np.arange(len(words), 0, -1.0))
        first += int(words.sum())
    first, second = ((total - 1) % 0xFFFF + 1 if total else 0 for total in (first, second))
    return second << 16 | first


def _chunks_in(dataset: Any, box: Box) -> Iterator[Box]:
    """Yields the chunks that a box meets, those beyond the last voxel whole."""
    edges = zip(box.lo, box.hi, dataset.chunks, strict=True)
    for place in itertools.product(*(range(lo - lo % side, hi, side) for lo, hi, side in edges)):
        yield _chunk_at(dataset, place)


def _chunk_at(dataset: Any, place: tuple[int, ...]) -> Box:
    return Box.whole(dataset.chunks).shift(place)


def _size_of_chunk(dataset: Any) -> int:
    return int(math.prod(dataset.chunks) * dataset.dtype.itemsize)


def _unpacks_to_more(
    path: Path, key: str, dataset: Any, place: tuple[int, ...], packed: bytes
) -> DataError:
    return DataError(
        f"{path}: {key!r} has a chunk at {place} of {len(packed)} bytes that unpacks to more than "
        f"the {_size_of_chunk(dataset)} that it says\n    get a fresh copy of the file"
    )
