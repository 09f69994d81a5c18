"""Changes of a file's bytes, as accidents and as attackers make them."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable

HOSTILE = (0, 1, -1, 127, 128, 255, 2**15 - 1, 2**15, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63 - 1)

SIGNATURES = (b"TREE", b"SNOD", b"HEAP", b"OHDR", b"OCHK", b"FRHP", b"\x89HDF", b"GCOL", b"FADB")
"""Of HDF5's structures."""

WORDS = (
    *("null", "true", "[]", "{}", "NaN", "Infinity", "-1", "0", "1e999", "9" * 40, "0x7f", "''"),
    *("*a", "&a [*a]", "<<: *a", "!!python/name:os.system", "\x1b[2J\u202e", "\x00", "[" * 3000),
    *("{a: " * 3000, "- " * 3000, '"../../../etc/passwd"', "/etc/passwd", "é" * 70_000, "\ud7ff"),
)

Change = Callable[[bytearray, random.Random], None]


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 100, 5000)))


def remove(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 2, 4, 64, 1000))]


def swap(data: bytearray, rng: random.Random) -> None:
    size = min(rng.choice((4, 16, 64, 512)), len(data) // 2)
    one, other = (rng.randrange(len(data) - size + 1) for _ in range(2))
    data[one : one + size], data[other : other + size] = (
        data[other : other + size],
        data[one : one + size],
    )
    # Blocks that overlap may have changed the length by nothing, but the bytes.


def wipe(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    size = min(rng.choice((8, 64, 512, 4096)), len(data) - at)
    data[at : at + size] = bytes([rng.choice((0, 255))]) * size


def double(data: bytearray, rng: random.Random) -> None:
    data += bytes(data) if rng.random() < 0.5 else rng.randbytes(3000)


def number(data: bytearray, rng: random.Random) -> None:
    """A hostile number in place of what is there."""
    kind = rng.choice(["<h", "<i", "<q", ">i", ">q"])
    _put(data, rng.randrange(len(data)), kind, rng)


def early(data: bytearray, rng: random.Random) -> None:
    """A hostile number in a header."""
    _put(data, rng.randrange(min(len(data), 400)), rng.choice(["<h", "<i", "<q"]), rng)


def structure(data: bytearray, rng: random.Random) -> None:
    """A hostile number within a structure of HDF5's."""
    mark = rng.choice(SIGNATURES)
    found = [match.start() for match in re.finditer(re.escape(mark), data)]
    if not found:
        return early(data, rng)
    place = rng.choice(found) + rng.randrange(4, 120)
    _put(data, min(place, len(data) - 1), rng.choice(["<h", "<i", "<q"]), rng)
    return None


def pointer(data: bytearray, rng: random.Random) -> None:
    """An address in place of another, so that structures share parts or go round in circles."""
    found = [
        match.start() for mark in SIGNATURES for match in re.finditer(re.escape(mark), data)
    ] or [0]
    place = min(rng.choice(found) + 8 * rng.randrange(1, 12), max(0, len(data) - 8))
    data[place : place + 8] = struct.pack("<q", rng.choice(found))


def word(data: bytearray, rng: random.Random) -> None:
    """A hostile word in place of one."""
    tokens = list(re.finditer(rb"[\w.+-]+", data))
    if tokens:
        token = rng.choice(tokens)
        data[token.start() : token.end()] = rng.choice(WORDS).encode("utf-8", "surrogatepass")


def line(data: bytearray, rng: random.Random) -> None:
    """Lines twice, gone, in another order, or with a hostile word."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines.insert(at, lines[at])
        case 1:
            del lines[at]
        case 2:
            rng.shuffle(lines)
        case 3:
            lines[at] = rng.choice(WORDS).encode("utf-8", "surrogatepass")
    data[:] = b"\n".join(lines)


def _put(data: bytearray, at: int, kind: str, rng: random.Random) -> None:
    size = struct.calcsize(kind)
    value = rng.choice(HOSTILE) & (256**size - 1)
    data[at : at + size] = value.to_bytes(size, "little" if kind[0] == "<" else "big")


ANY: tuple[Change, ...] = (flip, flip, cut, insert, remove, swap, wipe, double, number)
BINARY: tuple[Change, ...] = (*ANY, early, early)
HDF5: tuple[Change, ...] = (*ANY, early, structure, structure, pointer)
TEXT: tuple[Change, ...] = (flip, cut, insert, remove, word, word, word, line, line)


def mutate(data: bytes, changes: tuple[Change, ...], rng: random.Random) -> tuple[bytes, str]:
    """The bytes after one change or several, and their names."""
    found = bytearray(data)
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = rng.choice(changes)
        if found:
            change(found, rng)
            names.append(change.__name__)
    return bytes(found), "+".join(names)
