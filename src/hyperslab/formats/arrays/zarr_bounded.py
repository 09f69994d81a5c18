"""Reads Zarr groups within bounds, and checks what they say of where their arrays are.

The specification lets a chunk that is all fill value be missing, so one that was lost would be
read as that: all chunks of a volume have to be there. Those of other arrays need not: libraries
leave out a redshift of 0. Within a group links of the file system may lead out of the folder no
more than HDF5's may: a group comes as one thing, from the one who packed it.

Zarr's codecs take memory for whatever comes out of a chunk, its store for whatever a file holds,
and a selection has ten chunks unpacked at a time. A `BoundedArray` knows how many bytes each codec
has to make of a chunk, and how long a packed chunk can be at most; it refuses what is more, and
unpacks large chunks one by one. This module imports Zarr: import it where a group is opened.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    VLenBytesCodec,
    VLenUTF8Codec,
    ZstdCodec,
)
from zarr.storage import LocalStore, StorePath

from hyperslab.errors import DataError
from hyperslab.formats.files import ALLOW_MISSING, FileAccess
from hyperslab.geometry import Box

MOST_DIMS = 32
"""The most dims of an array; numpy before 2.0 has no more."""

AT_ONCE = 64 << 20
"""The size of the chunks that are unpacked side by side [B]; a larger one is alone."""

MOST_READ = 256 << 20
"""The largest chunk that is read; each box needs the whole of it [B]."""

MOST_OF_WORDS = 1 << 20
"""The largest chunk of words, whose length nothing says, that is unpacked [B]."""

INDEX_ENTRY = 16
"""An inner chunk's place and length in the index of a shard [B]."""

MOST_INDEX = 16 << 20
"""The largest index of a shard, which is read whole [B]."""

CHECKSUM = 4
"""The length of a CRC32C [B]."""

PLAIN = 64 << 10
"""Bytes that packing may add to a chunk that cannot be packed, besides a 64th of it [B]."""

LENGTH = 4
"""The length of a word, and the number of words before all of them [B]."""

ZSTD = b"\x28\xb5\x2f\xfd"

MOST_METADATA = 8 << 20
"""The largest file that says what a group or an array is [B]; its values take much more memory."""

METADATA = (
    *("shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "attributes"),
    *("dimension_names", "storage_transformers", "extra_fields"),
)


def _check_metadata(folder: Path, *, of_children: bool = False) -> None:
    """Refuses a group or an array of which too much is said, and what is read with it."""
    files = [folder / "zarr.json", *(folder.glob("*/zarr.json") if of_children else ())]
    for file in files:
        if file.exists() and (size := file.stat().st_size) > MOST_METADATA:
            raise DataError(f"{file}: has {size} bytes; at most {MOST_METADATA} are read")


class BoundedGroup:
    """A Zarr group whose arrays are bounded; arrays and groups are found by their paths."""

    def __init__(self, path: Path) -> None:
        _check_metadata(path)
        if not (path / "zarr.json").exists() and any(path.glob(".z[ga]r*")):
            raise DataError(
                f"{path} is Zarr v2; only v3 is read\n    write it again with zarr_format=3, or by "
                "`zarr migrate v3`"
            )
        self.path = path
        self.group = zarr.open_group(path, mode="r", zarr_format=3)
        self.attrs = self.group.attrs

    def __iter__(self) -> Iterator[str]:
        _check_metadata(self.path, of_children=True)
        return iter(self.group)

    def __contains__(self, key: str) -> bool:
        _check_metadata(self.path / key)
        return key in self.group

    def __getitem__(self, key: str) -> Any:
        """Returns a group, or an array that can be read in bounded memory."""
        _check_metadata(self.path / key)
        found = self.group[key]
        return BoundedArray.of(self.path, key, found) if isinstance(found, zarr.Array) else found


class BoundedArray(zarr.Array[Any]):
    """A Zarr array, ``key`` of a ``group``, of which a few chunks are unpacked at a time."""

    group: Path
    key: str

    @classmethod
    def of(cls, path: Path, key: str, array: Any) -> BoundedArray:
        """Opens an array again so that no chunk unpacks to more than it says.

        Raises:
            DataError: it is packed by something else than gzip, zstd and blosc, more than once, or
                in shards of too many chunks; or it has too many dims, or storage transformers.
        """
        where = f"{path}: {key!r}"
        if array.ndim > MOST_DIMS:
            raise DataError(
                f"{where} has {array.ndim} dims; arrays of at most {MOST_DIMS} are read"
            )
        if array.metadata.storage_transformers:
            raise DataError(f"{where} has storage transformers, which are not read")
        sides = array.metadata.chunk_grid.chunk_shape
        codecs, most, part = _bounded(where, array.metadata.codecs, sides, array.dtype.itemsize)
        metadata = type(array.metadata)(
            **{name: getattr(array.metadata, name) for name in METADATA}, codecs=codecs
        )
        store = BoundedStore(array.store_path.store.root, where, most, part)
        place = StorePath(store, array.store_path.path)
        found = cls(zarr.AsyncArray(metadata=metadata, store_path=place))
        found.group, found.key = path, key
        return found

    @property
    def packing(self) -> str:
        """Names what chunks are packed with."""
        codecs = [getattr(codec, "codec", codec) for codec in self.compressors]
        return ", ".join(type(codec).__name__ for codec in codecs)

    def check(self, reach: FileAccess) -> None:
        """Refuses chunks that are too large to be read, and links that leave the folder."""
        for sides in (self.chunks, self.shards or self.chunks):
            if min(sides, default=1) < 1:
                raise self._refused(f"is stored in chunks of {tuple(sides)} values")
        size = math.prod(self.chunks) * max(1, self.dtype.itemsize)
        if size > MOST_READ:
            raise self._refused(
                f"is stored in chunks of {size >> 20} MiB, and any box needs a whole one; at most "
                f"{MOST_READ >> 20} MiB are read\n    write it again in smaller ones"
            )
        self._check_links(self.group / self.key, reach)

    def _check_links(self, folder: Path, reach: FileAccess) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    what = f"the link {entry.path} in {self.key!r}"
                    reach.check(self.group, what, Path(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    self._check_links(Path(entry.path), reach)

    def check_chunks(self, box: Box, reach: FileAccess) -> None:
        """Refuses a box if a chunk that it meets is missing and need not be."""
        if reach.allowed.missing_chunks:
            return
        sides = zip(box.lo, box.hi, self.shards or self.chunks, strict=True)
        for place in _in_turn([range(lo // side, -(-hi // side)) for lo, hi, side in sides]):
            name = self.metadata.encode_chunk_key(place)
            if not os.path.exists(self.group / self.key / name):
                raise self._refused(
                    f"lacks the chunk {name} and would be read as {self.fill_value} there: it was "
                    "lost, or never written\n    put it back, or write the array again with "
                    f"write_empty_chunks=True; {ALLOW_MISSING}"
                )

    def _refused(self, why: str) -> DataError:
        return DataError(f"{self.group}: {self.key!r} {why}")

    def read(self, box: Box, reach: FileAccess) -> NDArray[Any]:
        """Reads a box of which all chunks are there, or need not be, as native bytes."""
        self.check_chunks(box, reach)
        return np.asarray(self[box.slices()], self.dtype.newbyteorder("="))

    def __getitem__(self, selection: Any) -> Any:
        """Reads a box given by slices with both ends, or all for ``()`` and for an ellipsis.

        A chunk that unpacks to more or less than it says is refused.
        """
        box = Box.whole(self.shape)
        if selection not in ((), Ellipsis):
            box = Box.of([(part.start, part.stop) for part in selection])
        pieces = [*_pieces(box, self.chunks, AT_ONCE // max(1, self.dtype.itemsize))]
        if len(pieces) == 1:
            return super().__getitem__(box.slices())
        values = np.empty(box.shape, self.dtype)
        for piece in pieces:
            values[piece.slices(box)] = super().__getitem__(piece.slices())
        return values


def _in_turn(places: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yields what `itertools.product` does, which first makes lists of all that there is."""
    if not places:
        yield ()
        return
    for first in places[0]:
        for rest in _in_turn(places[1:]):
            yield (first, *rest)


def _pieces(box: Box, sides: Sequence[int], most: int) -> Iterator[Box]:
    """Yields parts of a box that meet chunks of ``most`` values together, or one chunk."""
    counts = [
        -(-hi // side) - lo // side for lo, hi, side in zip(box.lo, box.hi, sides, strict=True)
    ]
    if math.prod(counts) * math.prod(sides) <= most or max(counts, default=1) <= 1:
        yield box
        return
    dim = counts.index(max(counts))
    middle = (box.lo[dim] // sides[dim] + counts[dim] // 2) * sides[dim]
    for lo, hi in ((box.lo[dim], middle), (middle, box.hi[dim])):
        half = [box.interval(other) for other in range(box.ndim)]
        half[dim] = (lo, hi)
        yield from _pieces(Box.of(half), sides, most)


def _bounded(
    where: str, codecs: Sequence[Any], sides: Sequence[int], itemsize: int
) -> tuple[list[Any], int, int]:
    """Lists codecs that unpack no more than a chunk holds.

    Also returns how long a stored chunk, and a part of it that is read alone, can be [B]. ``size``
    follows the way in which a chunk is packed: the bytes that the next codec has to give back, None
    where nothing says it.
    """
    found: list[Any] = []
    size: int | None = math.prod(sides) * itemsize
    part = 0
    packed = False
    for codec in codecs:
        kept = codec
        if isinstance(codec, ShardingCodec):
            kept, size, part = _bounded_shards(where, codec, sides, itemsize)
        elif isinstance(codec, VLenUTF8Codec | VLenBytesCodec):
            size = None
        elif isinstance(codec, Crc32cCodec):
            size = None if size is None else size + CHECKSUM
        elif isinstance(codec, GzipCodec | ZstdCodec | BloscCodec):
            if packed:
                raise DataError(f"{where} is packed twice\n    write it again, packed once")
            packed = True
            kept = Bounded(codec, where, size)
            size = None if size is None else size + size // 64 + PLAIN
        elif not isinstance(codec, BytesCodec | TransposeCodec):
            raise DataError(
                f"{where} is stored by the codec {type(codec).__name__}; gzip, zstd, blosc and "
                "unpacked chunks are read\n    write it again by zarr.create_array(..., "
                "compressors=zarr.codecs.ZstdCodec(), filters=None)"
            )
        found.append(kept)
        if isinstance(codec, VLenUTF8Codec | VLenBytesCodec):
            found.append(CountedWords(where))
    return found, MOST_OF_WORDS if size is None else size, part


def _bounded_shards(
    where: str, codec: Any, sides: Sequence[int], itemsize: int
) -> tuple[Any, int, int]:
    """Returns a codec of shards whose chunks are bounded; how long a shard can be, and a part."""
    inner, most, _ = _bounded(where, codec.codecs, codec.chunk_shape, itemsize)
    if not all(isinstance(one, BytesCodec | Crc32cCodec) for one in codec.index_codecs):
        raise DataError(f"{where} is stored in shards whose index is packed\n    write it again")
    chunks = math.prod(sides) // math.prod(codec.chunk_shape)
    index = chunks * INDEX_ENTRY + CHECKSUM
    if index > MOST_INDEX:
        raise DataError(
            f"{where} is stored in shards of {chunks} chunks; at most {MOST_INDEX // INDEX_ENTRY} "
            "are read\n    write it again in smaller shards, or in larger chunks"
        )
    return replace(codec, codecs=tuple(inner)), chunks * most + index, max(most, index)


@dataclass(frozen=True)
class Bounded(BytesBytesCodec):
    """Unpacks a chunk to the bytes that it has to have, ``size``; None of words."""

    codec: Any
    where: str
    size: int | None
    is_fixed_size = False

    def to_dict(self) -> dict[str, Any]:
        return dict(self.codec.to_dict())

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return int(self.codec.compute_encoded_size(input_byte_length, chunk_spec))

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        packed = memoryview(chunk_data.as_numpy_array()).cast("B")
        unpacked = await asyncio.to_thread(self.unpack, packed)
        return chunk_spec.prototype.buffer.from_array_like(unpacked)

    def unpack(self, packed: memoryview) -> NDArray[np.uint8]:
        """Unpacks a chunk; refuses one that would be more than it has to be, or less."""
        least, most = (0, MOST_OF_WORDS) if self.size is None else (self.size, self.size)
        if isinstance(self.codec, GzipCodec):
            with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
                unpacked = np.frombuffer(stream.read(most + 1), np.uint8)
            self._check(len(packed), len(unpacked), least, most)
            return unpacked
        zstd = isinstance(self.codec, ZstdCodec)
        said = _size_in_zstd(packed) if zstd else int.from_bytes(packed[4:8], "little")
        if said is None and self.size is None:
            raise DataError(f"{self.where} has chunks of strings that do not say how long they are")
        self._check(len(packed), most if said is None else said, least, most)
        # Both refuse to write more than this many bytes; zstd, less where nothing is said.
        out = np.empty(most if said is None else said, np.uint8)
        (Zstd() if zstd else Blosc()).decode(packed, out)
        return out

    def _check(self, packed: int, unpacked: int, least: int, most: int) -> None:
        if not least <= unpacked <= most:
            word = "more" if unpacked > most else "less"
            raise DataError(
                f"{self.where} has a chunk of {packed} bytes that unpacks to {word} than the "
                f"{most} that it says\n    get a fresh copy of the file"
            )


@dataclass(frozen=True)
class CountedWords(BytesBytesCodec):
    """Refuses a chunk of words that says that it has more than fit into it."""

    where: str
    is_fixed_size = True

    def to_dict(self) -> dict[str, Any]:
        return {"name": "counted"}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return input_byte_length

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        data = chunk_data.to_bytes()
        count = int.from_bytes(data[:LENGTH], "little")
        if LENGTH * (count + 1) > len(data):
            raise DataError(f"{self.where} has a chunk of {len(data)} bytes for {count} words")
        return chunk_data


def _size_in_zstd(packed: memoryview) -> int | None:
    """Reads how much a frame of zstd says that it unpacks to; None where it does not say.

    (RFC 8878, 3.1.1.1)
    """
    if len(packed) < 5 or packed[:4] != ZSTD:
        raise ValueError("it is not zstd")
    descriptor = packed[4]
    single = descriptor >> 5 & 1
    length = (single, 2, 4, 8)[descriptor >> 6]
    if not length:
        return None
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(packed[start : start + length], "little")
    return size + 256 if length == 2 else size


class BoundedStore(LocalStore):
    """Reads files of one array that are no longer than ``most``, or parts no longer than ``part``.

    ``where`` names the array.
    """

    def __init__(self, root: Path, where: str = "", most: int = 0, part: int = 0) -> None:
        super().__init__(root, read_only=True)
        self.where = where
        self.most = most
        self.part = part

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Returns what is under a key, or a part; refuses what is longer than a chunk can be."""
        path = Path(self.root, key)
        if path.is_file():
            size = path.stat().st_size
            length, most = size, self.most
            if isinstance(byte_range, RangeByteRequest):
                length, most = min(size, byte_range.end) - byte_range.start, self.part
            elif isinstance(byte_range, SuffixByteRequest):
                length, most = min(size, byte_range.suffix), self.part
            if length > most:
                raise DataError(
                    f"{self.where} has a chunk of {length} bytes in {path}; none has more than "
                    f"{most}\n    get a fresh copy of the file"
                )
        return await super().get(key, prototype, byte_range)
