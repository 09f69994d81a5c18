"""Protocol buffers as far as `tf.train.Example` needs them: a message is a sequence of fields.

The encoding is that of protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes lo to hi of an open file, given by its number; read when they are asked for."""

    file: int
    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    def __bytes__(self) -> bytes:
        data = os.pread(self.file, len(self), self.lo)
        if len(data) < len(self):
            raise EOFError(f"it ends at byte {self.lo + len(data)} but needs {self.hi}")
        return data

    def after(self, count: int) -> FileBytes:
        """So many bytes that come next in the file."""
        return FileBytes(self.file, self.hi, self.hi + count)

    def read(self) -> memoryview:
        """All of them, in memory.

        Raises:
            EOFError: the file ends too early.
        """
        data = bytearray(len(self))
        view = memoryview(data)
        place = 0
        while place < len(data):
            got = os.preadv(self.file, [view[place:]], self.lo + place)
            if not got:
                raise EOFError(f"it ends at byte {self.lo + place} but needs {self.hi}")
            place = place + got
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
"""Of a message: what has more is no sample, and would be looked through for hours."""

Bytes = memoryview | FileBytes
"""Bytes of a message, in memory or in its file."""


def fields(message: Bytes) -> Iterator[tuple[int, Bytes]]:
    """The number and the bytes of every field; of those that are no bytes, the number's own.

    Raises:
        ValueError: the message ends within a field, or has one of a kind that is not in use.
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


def _varint(message: Bytes, place: int) -> tuple[int, int]:
    """A number in base 128, the lowest seven bits first, and the place after it."""
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
