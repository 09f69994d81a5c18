"""The TFRecord framing and the `tf.train.Example` in it, byte by byte.

A record is its length (uint64), the masked CRC32C of that (uint32), the bytes and their masked
CRC32C, little-endian (tensorflow/core/lib/io/record_writer.h). An Example is a protocol buffer:
``Example{1: Features{1: map<string key = 1, Feature value = 2>}}`` with ``Feature{1: BytesList, 2:
FloatList, 3: Int64List}``, each list's values being field 1 (tensorflow/core/example/*.proto).
"""

from __future__ import annotations

import gzip
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError

MAGIC = b"\x1f\x8b"
FRAME = 16
"""Bytes of a record beside its data."""


@dataclass(frozen=True, slots=True)
class Example:
    """The features of one example by name, as slices of what was read."""

    path: Path
    features: dict[str, memoryview]
    unpacked: bool  # in memory, not mapped

    def bytes(self, name: str) -> memoryview:
        """The one value of a feature of bytes.

        Raises:
            DataError: there is none, or several.
        """
        values = [value for kind, value in self._values(name) if kind == 1]
        if len(values) != 1:
            raise DataError(f"{self.path}: {name!r} is not one string of bytes")
        return values[0]

    def floats(self, name: str) -> NDArray[np.float32]:
        """The values of a feature of numbers; none where it holds something else."""
        parts = [np.frombuffer(value, "<f4") for kind, value in self._values(name) if kind == 2]
        return np.concatenate([np.empty(0, "<f4"), *parts])

    def _values(self, name: str) -> Iterator[tuple[int, memoryview]]:
        if name not in self.features:
            raise DataError(f"{self.path}: has no {name!r} but {sorted(self.features)}")
        for kind, values in _fields(self.features[name]):
            yield from ((kind, value) for field, value in _fields(values) if field == 1)


def length_of(path: Path) -> int:
    """The length of a file's record [B]; what the start of the file and its size can tell is right.

    Raises:
        DataError: it is no TFRecord, or truncated, or holds more than one record.
    """
    packed = is_gzip(path)
    with gzip.open(path) if packed else path.open("rb") as file:
        length = _length(path, file.read(12))
    size = path.stat().st_size
    if not packed and size != length + FRAME:
        raise DataError(
            f"{path}: has {size} bytes but its first record takes {length + FRAME}; needs one "
            "whole record"
        )
    return length


def is_gzip(path: Path) -> bool:
    """Whether the file starts as gzip does, whatever its name says."""
    with path.open("rb") as file:
        return file.read(2) == MAGIC


def read(path: Path) -> Example:
    """The example of a file: unpacked and its sum checked, or mapped into memory.

    Raises:
        DataError: it is not what it should be; or gzip's or the system's own errors.
    """
    packed = is_gzip(path)
    if packed:
        with gzip.open(path) as file:
            data = memoryview(file.read())
    else:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    length = _length(path, bytes(data[:12]))
    if len(data) != length + FRAME:
        raise DataError(
            f"{path}: has {len(data)} bytes{' unpacked' * packed} but its first record takes "
            f"{length + FRAME}; needs one whole record"
        )
    body = data[12 : 12 + length]
    if packed and _masked(body) != struct.unpack("<I", data[-4:])[0]:
        raise DataError(f"{path}: is damaged: the sum of its record does not fit")
    return Example(path, _features(body), packed)


def _length(path: Path, head: bytes) -> int:
    if len(head) < 12:
        raise DataError(f"{path}: is truncated: {len(head)} bytes")
    length, checked = struct.unpack("<QI", head)
    if _masked(head[:8]) != checked:
        raise DataError(f"{path}: is no TFRecord, or damaged: the sum of its length does not fit")
    return int(length)


def _masked(data: bytes | memoryview) -> int:
    return masked(google_crc32c.value(bytes(data)))


def masked(crc: int) -> int:
    """A CRC32C as TensorFlow stores it, so that the sum of bytes with their sum is no constant."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _features(example: memoryview) -> dict[str, memoryview]:
    found = {}
    for field, features in _fields(example):
        for number, entry in _fields(features) if field == 1 else ():
            pair = dict(_fields(entry)) if number == 1 else {}
            if 1 in pair and 2 in pair:
                found[bytes(pair[1]).decode("utf-8", "replace")] = pair[2]
    return found


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The number and the bytes of every field; of those that are no bytes, the number's own.

    Raises:
        ValueError: the message ends within a field, or has one of a kind that is not in use.
    """
    place = 0
    while place < len(message):
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


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number in base 128, the lowest seven bits first, and the place after it."""
    value = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("tf.train.Example ends within a number")
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
