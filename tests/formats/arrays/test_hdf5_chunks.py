"""Chunks that are unpacked without HDF5 against what h5py alone reads (tier: no process)."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.errors import DataError
from hyperslab.formats.arrays import hdf5
from hyperslab.formats.arrays.hdf5 import DEFLATE, FLETCHER32, SHUFFLE, Doubts, read_box
from hyperslab.geometry import Box

DTYPES = ("|u1", "<i2", ">i2", "<u4", ">i8", "<f2", "<f4", ">f8", "?")
ORDERS = (
    (DEFLATE,),
    (SHUFFLE, DEFLATE),
    (DEFLATE, FLETCHER32),
    (SHUFFLE, DEFLATE, FLETCHER32),
    (FLETCHER32, DEFLATE),
    (DEFLATE, SHUFFLE),
    (SHUFFLE,),
)
HERE = 4
"""So many of these, from the first on, are undone without HDF5."""


@pytest.fixture(autouse=True)
def _small_chunks_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "UNPACKED_FREELY", 0)
    monkeypatch.setattr(hdf5, "PACKED_LARGER", 8)


def create(
    file: h5py.File, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: Any, order: Any
) -> h5py.Dataset:
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_chunk(chunks)
    how.set_fill_value(np.array(1, dtype))
    for code in order:
        {DEFLATE: lambda: how.set_deflate(4), SHUFFLE: how.set_shuffle}.get(
            code, how.set_fletcher32
        )()
    space = h5py.h5s.create_simple(shape)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    return h5py.Dataset(h5py.h5d.create(file.id, b"full", kind, space, how))


def packed(block: Any, order: Any, mask: int) -> bytes:
    """A chunk packed by hand, but for the filters of the mask."""
    data = block.tobytes()
    for bit, code in enumerate(order):
        if mask & 1 << bit:
            continue
        if code == SHUFFLE:
            whole = len(data) - len(data) % block.itemsize
            bytes_of = np.frombuffer(data[:whole], "u1").reshape(-1, block.itemsize)
            data = bytes_of.T.tobytes() + data[whole:]
        elif code == DEFLATE:
            data = zlib.compress(data)
    return data


def places(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    ranges = (range(0, n, side) for n, side in zip(shape, chunks, strict=True))
    return itertools.product(*ranges)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_boxes_are_those_of_h5py(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Edge chunks, missing ones, and ones that leave filters out, among others."""
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * data.draw(st.integers(1, 4))))
    chunks = tuple(data.draw(st.integers(-(-n // 4), n)) for n in shape)
    order = data.draw(st.sampled_from(ORDERS))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    path = tmp_path_factory.getbasetemp() / "chunks.hdf5"
    with h5py.File(path, "w") as file:
        dataset = create(file, shape, chunks, dtype, order)
        for place in places(shape, chunks):
            block = rng.integers(0, 2 if dtype.kind == "b" else 99, chunks).astype(dtype)
            match rng.integers(4):
                case 0:  # never written
                    continue
                case 1 if FLETCHER32 not in order:
                    mask = int(rng.integers(1 << len(order)))
                    dataset.id.write_direct_chunk(place, packed(block, order, mask), mask)
                case _:
                    box = Box.whole(chunks).shift(place).intersect(Box.whole(shape))
                    dataset[box.slices()] = block[Box.whole(box.shape).slices()]
    with h5py.File(path) as file:
        dataset = file["full"]
        doubts: Doubts = {}
        for _ in range(3):
            ends = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
            box = Box.of([(lo, hi) for lo, hi in ends])
            found = read_box(path, "full", dataset, box, doubts)
            np.testing.assert_array_equal(found, dataset[box.slices()])
            assert found.dtype == dtype.newbyteorder("=")
            assert not hdf5._doubtful_in(path, "full", dataset, box, doubts)


@pytest.mark.parametrize("order", ORDERS)
def test_a_chunk_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    """And those that HDF5 has to undo are counted before."""
    inflated: list[int] = []
    inflate = hdf5._inflated
    monkeypatch.setattr(
        hdf5, "_inflated", lambda data, most: inflated.append(most) or inflate(data, most)
    )
    asked: list[Box] = []
    values = np.random.default_rng(0).integers(0, 99, (20, 12)).astype("<i2")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        create(file, (20, 12), (8, 12), "<i2", order)[...] = values
    with h5py.File(tmp_path / "a.hdf5") as file:
        whole: Any = file["full"]
        read = h5py.Dataset.read_direct
        monkeypatch.setattr(
            h5py.Dataset,
            "read_direct",
            lambda *args, **keys: asked.append(args) or read(*args, **keys),
        )
        doubts: Doubts = {}
        for lo, hi, doubted, by_hdf5 in ((2, 3, 1, 0), (0, 20, 2, 1), (0, 20, 0, 1)):
            inflated.clear()
            asked.clear()
            box = Box((lo, 1), (hi, 12))
            found = read_box(tmp_path / "a.hdf5", "full", whole, box, doubts)
            np.testing.assert_array_equal(found, values[box.slices()])
            assert len(inflated) == (doubted if DEFLATE in order else 0)
            assert len(asked) == (by_hdf5 if order in ORDERS[:HERE] else 1)


def cut(data: bytes) -> bytes:
    return data[:-6]


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def again(change: Any) -> Any:
    return lambda data: zlib.compress(change(zlib.decompress(data)))


LIES = {
    "one byte more": (
        again(lambda data: data + b"x"),
        "unpacks to more than the 1024 that it says",
    ),
    "one byte less": (again(lambda data: data[:-1]), "unpacks to 1023 bytes, less than the 1024"),
    "nothing": (again(lambda data: b""), "unpacks to 0 bytes, less than the 1024"),
    "cut": (cut, None),
    "flipped": (flipped, None),
    "no stream": (lambda data: bytes(len(data)), None),
}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_chunk_that_lies_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, shuffled: bool, pieces: bool
) -> None:
    """What deflate finds is HDF5's to say."""
    if pieces:
        monkeypatch.setattr(hdf5, "AT_ONCE", 0)
        monkeypatch.setattr(hdf5, "PIECE", 10)
    change, words = LIES[lie]
    order = (SHUFFLE, DEFLATE) if shuffled else (DEFLATE,)
    path = tmp_path / "a.hdf5"
    values = np.random.default_rng(0).integers(0, 99, (16, 8)).astype("<f8")
    with h5py.File(path, "w") as file:
        data = create(file, (32, 8), (16, 8), "<f8", order)
        data[:16] = values
        data.id.write_direct_chunk((16, 0), change(packed(values, order, 0)))
    with h5py.File(path) as file:
        first = read_box(path, "full", file["full"], Box((0, 0), (16, 8)), {})
        np.testing.assert_array_equal(first, values)
        refused: Any = (DataError, words) if words else (OSError, "filter returned failure")
        with pytest.raises(refused[0], match=refused[1]):
            read_box(path, "full", file["full"], Box((0, 0), (32, 8)), {})


@pytest.mark.parametrize("size", [0, 1, 2, 7, 65535, 65536, 200001])
def test_fletchers_sum_is_that_of_hdf5(tmp_path: Path, size: int) -> None:
    for data in (np.random.default_rng(size).bytes(size), bytes(size), b"\xff" * size):
        with h5py.File(tmp_path / "a.hdf5", "w") as file:
            if size:
                chunk = create(file, (size,), (size,), "u1", (FLETCHER32,))
                chunk[...] = np.frombuffer(data, "u1")
                _, stored = chunk.id.read_direct_chunk((0,))
                assert hdf5._fletcher32(data) == int.from_bytes(stored[-4:], "little")
            else:
                assert hdf5._fletcher32(data) == 0


def test_what_lies_takes_no_memory() -> None:
    """A stream of 64 MiB gives no more than one byte above what may come."""
    stream = zlib.compress(bytes(64 << 20))
    assert sum(map(len, hdf5._inflated(stream, 1000))) == 1001
