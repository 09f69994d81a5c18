"""Parses the framing of TFRecords and the `tf.train.Example` in each, byte by byte.

A record is its length (uint64), the masked CRC32C of that (uint32), the bytes and their masked
CRC32C, little-endian (tensorflow/core/lib/io/record_writer.h). An Example is a protocol buffer:
``Example{1: Features{1: map<string key = 1, Feature value = 2>}}`` with ``Feature{1: BytesList,
2: FloatList, 3: Int64List}``, each list's values being field 1
(tensorflow/core/example/*.proto).

A message of protocol buffers is a sequence of fields; the encoding is that of
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.files import COUNTS_RATIO, check_gzip_size
from hyperslab.formats.storage import read_strided, read_whole
from hyperslab.geometry import Box


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes lo to hi of an open file, given by its number; read when they are asked for."""

    file: int
    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    def __bytes__(self) -> bytes:
        return self.read().tobytes()

    def after(self, count: int) -> FileBytes:
        """Reads ``count`` bytes that come next in the file."""
        return FileBytes(self.file, self.hi, self.hi + count)

    def read(self) -> memoryview:
        """Reads all of the bytes into memory."""
        view = memoryview(bytearray(len(self)))
        read_whole(self.file, view, self.lo)
        return view

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> FileBytes: ...
    def __getitem__(self, place: int | slice) -> int | FileBytes:
        if isinstance(place, int):
            return bytes(FileBytes(self.file, self.lo + place, self.lo + place + 1))[0]
        start, stop, _ = place.indices(len(self))
        return FileBytes(self.file, self.lo + start, self.lo + stop)


MOST_FIELDS = 10_000
"""The most fields of a message: one with more is no sample, and would take hours."""

MessageBytes = memoryview | FileBytes
"""Bytes of a message, in memory or in its file."""


def message_fields(message: MessageBytes) -> Iterator[tuple[int, MessageBytes]]:
    """Yields the number and the bytes of every field; of those that are no bytes, the number's own.

    A message that ends within a field, or has one of a kind that is not in use, is a ValueError.
    """
    place = 0
    count = 0
    while place < len(message):
        count = count + 1
        if count > MOST_FIELDS:
            raise ValueError(f"tf.train.Example has more than {MOST_FIELDS} fields in one message")
        tag, place = _varint(message, place)
        start = place
        match tag & 7:
            case 0:
                _, place = _varint(message, place)
            case 1:
                place += 8
            case 2:
                size, start = _varint(message, place)
                place = start + size
            case 5:
                place += 4
            case kind:
                raise ValueError(f"field of wire type {kind} in tf.train.Example")
        if place > len(message):
            raise ValueError("tf.train.Example ends within a field")
        yield tag >> 3, message[start:place]


def _varint(message: MessageBytes, place: int) -> tuple[int, int]:
    """Returns a number in base 128, the lowest seven bits first, and the place after it."""
    value = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("tf.train.Example ends within a number")
        byte = message[place]
        value |= (byte & 127) << shift
        place = place + 1
        shift = shift + 7
        if byte < 128:
            return value, place


GZIP_MAGIC = b"\x1f\x8b"
FRAME = 16
"""Bytes of a record beside its data."""

MESSAGE_LIMIT = 2**31
"""A protocol buffer is shorter [B]."""


@dataclass(frozen=True, slots=True)
class Example:
    """The features of one example by name.

    ``body``: all of its bytes, if they are in a file, which has to be open; None if in memory.
    ``where`` names its file in errors, and its record where there are several.
    """

    where: str
    features: dict[str, MessageBytes]
    body: FileBytes | None = None

    def checked(self) -> Example:
        """Returns the example in memory, after its sum has been compared."""
        if self.body is None:
            return self
        body = self.body.read()
        _check_sum(self.where, _crc(body), self.body.after(4))
        return Example(self.where, _features(body))

    def box(
        self, name: str, stored: tuple[int, ...], dtype: np.dtype[Any], box: Box
    ) -> NDArray[Any]:
        """Returns a box of a feature whose bytes are an array of the shape ``stored``.

        Where that is all of it and lies in a file, the sum over the record is compared, too: of
        less than all it cannot tell anything.
        """
        data = (self.checked() if box == Box.whole(stored) else self).bytes(name)
        if len(data) != dtype.itemsize * math.prod(stored):
            raise DataError(
                f"{self.where}: {name!r} has {len(data)} bytes, not those of {dtype.name} {stored}"
            )
        if isinstance(data, FileBytes):
            return read_strided(data.file, data.lo, stored, dtype, box)
        values = np.frombuffer(data, dtype).reshape(stored)[box.slices()]
        return values if values.shape == stored else values.copy()

    def bytes(self, name: str) -> MessageBytes:
        """Returns the one value of a feature of bytes; none or several are refused."""
        values = [value for kind, value in self._values(name) if kind == 1]
        if len(values) != 1:
            raise DataError(f"{self.where}: {name!r} is not one string of bytes")
        return values[0]

    def floats(self, name: str) -> NDArray[np.float32]:
        """Returns the values of a feature of numbers; none where it holds something else."""
        values = [bytes(value) for kind, value in self._values(name) if kind == 2]
        parts = [np.frombuffer(value, "<f4") for value in values]
        return np.concatenate([np.empty(0, "<f4"), *parts])

    def _values(self, name: str) -> Iterator[tuple[int, MessageBytes]]:
        if name not in self.features:
            raise DataError(f"{self.where}: has no {name!r} but {sorted(self.features)}")
        for kind, values in message_fields(self.features[name]):
            yield from ((kind, value) for field, value in message_fields(values) if field == 1)


def record_length(path: Path) -> int:
    """Returns the length of a file's record [B]; refuses a file that is not one whole TFRecord.

    The start of the file and its size are looked at.
    """
    packed = is_gzip(path)
    with gzip.open(path) if packed else path.open("rb") as file:
        length = _length(str(path), file.read(12))
    if packed:
        check_gzip_size(path, length + FRAME, most=COUNTS_RATIO)
    size = path.stat().st_size
    if not packed and size != length + FRAME:
        raise _not_one(path, f"{size} bytes", length)
    return length


def is_gzip(path: Path) -> bool:
    """Tells if the file starts as gzip does, whatever its name says."""
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


@contextmanager
def opened_example(path: Path) -> Iterator[Example]:
    """Gives the example of a file, which is open meanwhile; of gzip unpacked, its sum checked."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        if packed:
            yield _unpacked(path, file)
            return
        example, after = example_at(file, 0, str(path))
        size = os.fstat(file.fileno()).st_size
        if size != after:
            raise _not_one(path, f"{size} bytes", after - FRAME)
        yield example


def _unpacked(path: Path, file: IO[bytes]) -> Example:
    """Returns the example of a gzip file, of which no more is unpacked than its head says."""
    with gzip.open(file) as unpacked:
        head = unpacked.read(12)
        length = _length(str(path), head)
        check_gzip_size(path, length + FRAME, most=COUNTS_RATIO)
        data = bytearray(length + 4)
        got = unpacked.readinto(data)
        if got < len(data):
            raise _not_one(path, f"{got + 12} bytes unpacked", length)
        if unpacked.read(1):  # gzip compares its own sum where it finds the end
            raise _not_one(path, f"more than {length + FRAME} bytes unpacked", length)
    body = memoryview(data)[:length]
    _check_sum(str(path), _crc(body), memoryview(data)[length:])
    return Example(str(path), _features(body))


def _not_one(path: Path, has: str, length: int) -> DataError:
    return DataError(
        f"{path}: has {has} but its first record takes {length + FRAME}; needs one whole record"
    )


def _crc(data: memoryview) -> int:
    return int(google_crc32c.extend(0, np.frombuffer(data, np.uint8)))


def _check_sum(where: str, found: int, stored: MessageBytes) -> None:
    if masked_crc(found) != struct.unpack("<I", bytes(stored))[0]:
        raise DataError(f"{where}: is damaged: the sum of its record does not fit")


def examples_in(file: IO[bytes], path: Path) -> Iterator[tuple[int, Example]]:
    """Yields all examples of an open plain file, each with the place of its record [B].

    The sums of the lengths are checked.
    """
    end = os.fstat(file.fileno()).st_size
    place = number = 0
    while place < end or place == 0:
        example, after = example_at(file, place, f"{path}, record {number}")
        yield place, example
        place = after
        number = number + 1


def example_at(file: IO[bytes], place: int, where: str) -> tuple[Example, int]:
    """Returns the example whose record begins at a place [B] of a plain file, and its end."""
    end = os.fstat(file.fileno()).st_size
    head = FileBytes(file.fileno(), place, min(place + 12, end))
    body = head.after(_length(where, bytes(head)))
    if (after := place + len(body) + FRAME) > end:
        raise DataError(f"{where}: needs {after} bytes but its file has {end}: it is truncated")
    try:
        features = _features(body)
    except ValueError as error:
        raise DataError(f"{where}: is damaged: {error}") from error
    return Example(where, features, body), after


def _length(where: str, head: bytes) -> int:
    if len(head) < 12:
        raise DataError(f"{where}: is truncated: {len(head)} bytes")
    length, checked = struct.unpack("<QI", head)
    if masked_crc(google_crc32c.value(head[:8])) != checked:
        raise DataError(
            f"{where}: is not a TFRecord, or is damaged: the sum of its length does not fit"
        )
    if length >= MESSAGE_LIMIT:
        raise DataError(
            f"{where}: says {length} bytes of its record, which are not a tf.train.Example"
        )
    return int(length)


def masked_crc(crc: int) -> int:
    """Masks a CRC32C as TensorFlow does: the sum of bytes with their sum is no constant."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _features(example: MessageBytes) -> dict[str, MessageBytes]:
    found = {}
    for field, features in message_fields(example):
        for number, entry in message_fields(features) if field == 1 else ():
            pair = dict(message_fields(entry)) if number == 1 else {}
            if 1 in pair and 2 in pair:
                found[bytes(pair[1]).decode("utf-8", "replace")] = pair[2]
    return found
