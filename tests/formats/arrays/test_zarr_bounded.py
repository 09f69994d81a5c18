"""Chunks of Zarr that unpack to more than they say, and files longer than a chunk (tier: no
process)."""

from __future__ import annotations

import gzip
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.test_bounded import in_little_memory
from tests.formats.universes import Seat
from tests.selection import by_rotation

zarr = pytest.importorskip("zarr")
bounded = pytest.importorskip("hyperslab.formats.arrays.zarr_bounded")
codecs = zarr.codecs

SHAPE = (9, 9, 9, 3)
CHUNK = (4, 4, 4, 3)
LONG = 320 << 20  # more than may be taken (`in_little_memory`)
WHOLE = Box((0, 0, 0, 0), (3, 9, 9, 9))


def group(path: Path, shape: tuple[int, ...] = SHAPE, **how: Any) -> Any:
    made = zarr.create_group(path, zarr_format=3)
    array = made.create_array("full", shape=shape, dtype="i2", **{"chunks": CHUNK} | how)
    made.create_array("unitPar", data=np.array([0.5, -0.5]))
    return array


def values(shape: tuple[int, ...] = SHAPE) -> Any:
    return np.random.default_rng(0).integers(1, 1000, shape).astype("i2")


PACKINGS = [
    [],
    [codecs.GzipCodec()],
    [codecs.ZstdCodec(checksum=True)],
    [codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")],
    [codecs.Crc32cCodec(), codecs.ZstdCodec(), codecs.Crc32cCodec()],
]
# Shards, and bytes that are unpacked at once: with 300 it is chunk by chunk.
WAYS = itertools.product((None, (8, 8, 8, 3)), (64 << 20, 300))


@pytest.mark.parametrize(("packing", "way"), by_rotation(PACKINGS, WAYS), ids=str)
def test_what_is_honest_is_read(
    tmp_path: Path, packing: Any, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, at_once = way
    monkeypatch.setattr(bounded, "AT_ONCE", at_once)
    array = group(tmp_path / "a.zarr", compressors=packing, shards=shards)
    array[...] = values()
    source = source_of(tmp_path, Seat())
    wanted = np.moveaxis(values(), -1, 0)
    for box in (WHOLE, Box((1, 3, 2, 5), (2, 9, 8, 6))):
        np.testing.assert_array_equal(source.read(0, box), wanted[box.slices()])


def rle(size: int) -> bytes:
    """A frame of zstd that does not say how many zeros it unpacks to."""
    blocks = [min(100_000, size - at) for at in range(0, size, 100_000)]
    last = [0] * (len(blocks) - 1) + [1]
    data = (
        (n << 3 | 2 | end).to_bytes(3, "little") + b"\0"
        for n, end in zip(blocks, last, strict=True)
    )
    return bytes.fromhex("28b52ffd0058") + b"".join(data)


def blosc(size: int) -> bytes:
    packed = bytearray(bounded.Blosc().encode(bytes(1 << 20)))
    packed[4:8] = struct.pack("<I", size)
    return bytes(packed)


LIES: dict[str, tuple[Any, Callable[[], bytes], str]] = {
    "gzip": (
        codecs.GzipCodec(),
        lambda: gzip.compress(bytes(60 << 20)),
        "unpacks to more than the 384",
    ),
    "zstd": (
        codecs.ZstdCodec(),
        lambda: bounded.Zstd().encode(bytes(LONG)),
        "unpacks to more than the 384",
    ),
    "zstd that says less": (
        codecs.ZstdCodec(),
        lambda: bounded.Zstd().encode(bytes(100)),
        "unpacks to less than the 384",
    ),
    "zstd that says nothing": (
        codecs.ZstdCodec(),
        lambda: rle(LONG),
        "cannot be read as Zarr",
    ),
    "zstd, then more": (
        codecs.ZstdCodec(),
        lambda: bounded.Zstd().encode(bytes(384)) * 2,
        "cannot be read as Zarr",
    ),
    "no zstd": (codecs.ZstdCodec(), lambda: b"x" * 100, "cannot be read as Zarr"),
    "blosc": (codecs.BloscCodec(), lambda: blosc(2**31 - 1), "unpacks to more than the 384"),
    "no packing": (codecs.ZstdCodec(), lambda: bytes(LONG), "has a chunk of 335544320 bytes"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_chunk_that_unpacks_to_more_than_it_says(tmp_path: Path, kind: str) -> None:
    packing, lie, words = LIES[kind]
    array = group(tmp_path / "a.zarr", compressors=[packing])
    array[...] = values()
    (tmp_path / "a.zarr/full/c/1/1/1/0").write_bytes(lie())
    source = source_of(tmp_path, Seat())
    source.read(0, Box((0, 0, 0, 0), (3, 4, 4, 4)))
    with pytest.raises(DataError, match=rf"a\.zarr.*{words}"), in_little_memory():
        source.read(0, WHOLE)


def test_a_part_of_a_shard_that_is_longer_than_its_chunk(tmp_path: Path) -> None:
    shape = (64, 64, 64, 4)
    array = group(tmp_path / "a.zarr", shape, chunks=(32, 32, 32, 4), shards=shape)
    array[...] = 1
    path = tmp_path / "a.zarr/full/c/0/0/0/0"
    index = path.read_bytes()[-8 * 16 - 4 :]
    entries = np.frombuffer(index[:-4], "<u8").reshape(-1, 2).copy()
    entries[0] = (0, LONG)
    with path.open("wb") as file:
        file.truncate(LONG)
        file.seek(0, 2)
        file.write(entries.tobytes() + struct.pack("<I", crc32c(entries.tobytes())))
    source = source_of(tmp_path, Seat())
    for box in (Box((0, 0, 0, 0), (4, 8, 8, 8)), Box((0, 0, 0, 0), (4, 64, 64, 64))):
        with pytest.raises(DataError, match="has a chunk of 3355"), in_little_memory():
            source.read(0, box)


def crc32c(data: bytes) -> int:
    import google_crc32c

    return int(google_crc32c.value(data))


def test_large_chunks_are_unpacked_one_by_one(tmp_path: Path) -> None:
    """They are honest: few bytes of zeros in each."""
    shape = (256, 256, 256, 4)
    array = group(
        tmp_path / "a.zarr",
        shape,
        chunks=(16, 256, 256, 4),
        compressors=[codecs.ZstdCodec()],
        config={"write_empty_chunks": True},
    )
    array[:16] = 0
    chunk = tmp_path / "a.zarr/full/c/0/0/0/0"
    for number in range(1, 16):
        place = tmp_path / f"a.zarr/full/c/{number}/0/0"
        place.mkdir(parents=True)
        (place / "0").write_bytes(chunk.read_bytes())
    source = source_of(tmp_path, Seat(), "last")
    with in_little_memory():
        assert not source.read(0, Box((0, 0, 0, 0), (1, 256, 8, 8))).any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"compressors": [codecs.GzipCodec(), codecs.ZstdCodec()]}, "is packed twice"),
    "an index": (
        {"chunks": (1, 1, 1, 1), "shards": (2048, 1024, 1, 1), "shape": (2048, 1024, 4, 4)},
        "in shards of 2097152 chunks",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arrays_that_are_refused(tmp_path: Path, kind: str) -> None:
    how, words = REFUSED[kind]
    group(tmp_path / "a.zarr", **how)
    with pytest.raises(DataError, match=rf"a\.zarr.*{words}"):
        source_of(tmp_path, Seat(), "last")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_codec_that_is_not_known(tmp_path: Path) -> None:
    group(tmp_path / "a.zarr")
    path = tmp_path / "a.zarr/full/zarr.json"
    said = json.loads(path.read_text())
    said["codecs"].append({"name": "numcodecs.lzma", "configuration": {}})
    path.write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"a\.zarr.*is stored by the codec LZMA"):
        source_of(tmp_path, Seat(), "last")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("storage_transformers", [{"name": "other"}], "'full' has storage transformers"),
        ("shape", [1] * 100_000, "'full' has 100000 dims; arrays of at most 32 are read"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    group(tmp_path / "a.zarr")
    place = tmp_path / "a.zarr/full/zarr.json"
    said = json.loads(place.read_text()) | {key: value}
    if key == "shape":
        said["chunk_grid"]["configuration"]["chunk_shape"] = value
    place.write_text(json.dumps(said))
    with pytest.raises(DataError, match=rf"a\.zarr.*{words}") as caught:
        source_of(tmp_path, Seat())
    assert len(str(caught.value)) < 500


def test_the_second_version_is_refused_in_words(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    with pytest.raises(DataError, match=r"a\.zarr is Zarr v2; only v3 is read\n.*zarr migrate v3"):
        source_of(tmp_path, Seat())


def test_words_that_unpack_to_more(tmp_path: Path) -> None:
    group(tmp_path / "a.zarr", compressors=[])[...] = values()
    made = zarr.open_group(tmp_path / "a.zarr")
    names = made.create_array("namePar", shape=(2,), dtype=str, compressors=[codecs.ZstdCodec()])
    names[:] = np.array(["a", "ü"], object)
    assert source_of(tmp_path, Seat()).parameters.names == ("a", "ü")
    path = tmp_path / "a.zarr/namePar/c/0"
    path.write_bytes(bounded.Zstd().encode(bytes(64 << 20)))
    with pytest.raises(DataError, match=r"a\.zarr.*unpacks to more"), in_little_memory():
        source_of(tmp_path, Seat())
    path.write_bytes(bounded.Zstd().encode(struct.pack("<I", 2**32 - 1) + bytes(100)))
    with pytest.raises(DataError, match=r"bytes for 4294967295 words"), in_little_memory():
        source_of(tmp_path, Seat())
