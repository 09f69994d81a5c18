"""TFRecords: the framing, gzip, and what is refused (tier: no process)."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import TfRecordFolder, open
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, unit
from tests.formats.writers import CUBE, example, masked, mlperf, record, tfrecords

Spoil = Callable[[Path], Any]


def cut(path: Path, count: int = 300) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def repack(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_bytes(gzip.compress(bytes(data)))


def sum_off(data: bytearray) -> None:
    data[2000] ^= 1


def endless(path: Path) -> None:
    """A field that claims to be longer than the record, under sums that fit."""
    body = b"\x0a\xff\xff\x03" + b"\0" * 20
    path.write_bytes(record(body))


RECORDS: dict[str, tuple[bool, Spoil, str]] = {
    "cut short": (False, cut, "has .* bytes but its first record takes .*needs one whole record"),
    "empty": (False, lambda p: p.write_bytes(b""), "is truncated: 0 bytes"),
    "text": (False, lambda p: p.write_text("name,a,b\n" * 9), "is not a TFRecord"),
    "sum of the length": (False, lambda p: flip(p, 9), "sum of its length"),
    "no x": (False, lambda p: mlperf(p, 0, x=None), r"has no 'x' but \['y'\]"),
    "no y": (False, lambda p: mlperf(p, 0, y=None), r"has no 'y' but \['x'\]"),
    "x of numbers": (False, lambda p: mlperf(p, 0, x=np.ones(4)), "'x' is not one string of bytes"),
    "y of bytes": (False, lambda p: mlperf(p, 0, y=b"abcd"), r"'y' is float32 \(0,\); needs"),
    "y not finite": (False, lambda p: mlperf(p, 0, y=[1, np.nan, 0, 0]), "finite numbers"),
    "no cube": (
        False,
        lambda p: mlperf(p, 0, x=b"\0" * 80),
        r"80 bytes.*shape=\(D, H, W, C\)",
    ),
    "endless": (False, endless, "ends within a field"),
    "two records": (False, lambda p: p.write_bytes(p.read_bytes() * 2), "needs one whole record"),
    "gzip cut short": (True, cut, "cannot be read as TFRecord, perhaps truncated"),
    "gzip of text": (
        True,
        lambda p: p.write_bytes(gzip.compress(b"text" * 9)),
        "is not a TFRecord",
    ),
    "no gzip after all": (
        True,
        lambda p: p.write_bytes(b"\x1f\x8bno gzip, this"),
        "cannot be read",
    ),
    "gzip, sum": (True, lambda p: repack(p, sum_off), "damaged: the sum of its record"),
    "gzip of two": (True, lambda p: repack(p, lambda d: d.extend(bytes(d))), "one whole record"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_bad_tfrecord(tmp_path: Path, kind: str) -> None:
    packed, spoil, words = RECORDS[kind]
    mlperf(tmp_path / "univ_0.tfrecord", 0, packed)
    spoil(tmp_path / "univ_0.tfrecord")
    with pytest.raises(hs.DataError, match=f"(?s)univ_0.tfrecord.*{words}"):
        source_of(tmp_path, Seat())


def test_records_of_a_folder_are_alike(tmp_path: Path) -> None:
    tfrecords(False)(tmp_path)
    mlperf(tmp_path / "univ_1.tfrecord", 1, y=np.zeros(5))
    with pytest.raises(hs.DataError, match=r"univ_1.tfrecord: record size is .*stored alike"):
        source_of(tmp_path, Seat())
    mlperf(tmp_path / "univ_1.tfrecord", 1)
    mlperf(tmp_path / "univ_1.tfrecord.gz", 1, packed=True)
    with pytest.raises(hs.DataError, match="are samples of one name"):
        source_of(tmp_path, Seat())


def test_gzip_is_known_by_its_bytes_and_floats_need_not_be_packed(tmp_path: Path) -> None:
    mlperf(tmp_path / "a.tfrecord.gz", 0)
    mlperf(tmp_path / "b.tfrecord", 1, packed=True)
    x = counts(2, CUBE)
    data = example(False, x=np.moveaxis(x, 0, -1).tobytes(), y=unit(2))
    longer = example(True, x=np.moveaxis(x, 0, -1).tobytes(), y=unit(2))
    assert len(data) == len(longer) + 4 * 5 - 18  # a tag for each in place of one length
    source = source_of(tmp_path, Seat())
    for i in range(2):
        np.testing.assert_array_equal(source.read(i, Box.whole(CUBE)), counts(i, CUBE))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/c.tfrecord").write_bytes(record(data))
    source = source_of(tmp_path / "c", Seat())
    np.testing.assert_array_equal(source.target(0), np.float32(unit(2)))


def test_the_shape_of_a_record_can_be_said(tmp_path: Path) -> None:
    volume = counts(0, (3, 4, 5, 2))
    mlperf(tmp_path / "a.tfrecord", 0, x=volume.tobytes(), y=[0.5])
    source = TfRecordFolder.scan(tmp_path, Seat(), shape=volume.shape)
    box = Box((0, 1, 0, 2), (2, 3, 4, 5))
    whole = np.moveaxis(volume, -1, 0)
    np.testing.assert_array_equal(source.read(0, box), whole[box.slices()])
    with pytest.raises(hs.DataError, match=r"a.tfrecord.*shape=\(3, 4, 5, 3\)"):
        TfRecordFolder.scan(tmp_path, Seat(), shape=(3, 4, 5, 3))


def test_a_late_fault_in_a_packed_sample_ends_in_its_step(tmp_path: Path) -> None:
    tfrecords(True)(tmp_path)
    repack(tmp_path / "univ_2.tfrecord", sum_off)
    data = open(tmp_path, Seat(), batch_size=1, split="all")
    batches = data.epoch(0)
    next(batches), next(batches)
    with pytest.raises(hs.DataError, match=r"univ_2.tfrecord: is damaged"):
        next(batches)
    assert len(data.source._kept) <= 2  # type: ignore[attr-defined]


def test_the_sums_are_those_of_the_specification() -> None:
    """The example of RFC 3720, B.4, masked as TensorFlow does."""
    crc = 0x8A9136AA
    expected = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked(bytes(32)) == struct.pack("<I", expected)
