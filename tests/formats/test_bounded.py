"""Small files that unpack to much, or say so, and sums that do not fit (tier: no process)."""

from __future__ import annotations

import gzip
import math
import re
import resource
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import nibabel
import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.formats.arrays import hdf5
from hyperslab.formats.files import DataMap
from hyperslab.formats.tfrecord.records import masked_crc, message_fields
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.scans import hu
from tests.formats.universes import Seat, counts
from tests.formats.writers import example, mlperf, nifti, record

AXES = np.diag([1.0, 1.0, 1.0, 1.0])


@contextmanager
def in_little_memory() -> Iterator[None]:
    """Fails where the peak of this process, or of a child, grows by 256 MiB within."""
    with suppress(OSError):  # elsewhere than on Linux an earlier peak may hide this one
        Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        yield
    finally:
        assert peak() - before < 256 << 10  # [KiB]


def peak() -> int:
    """The peak of this process since `clear_refs`, or of a child [KiB]."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return max(own, children)
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children)


def framed(length: int) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc(google_crc32c.value(head)))


def bomb(path: Path) -> None:
    """4 GiB of zeros as a record, in 4 MB; made as gzip members, one after the other."""
    zeros = gzip.compress(bytes(64 << 20), mtime=0)
    path.write_bytes(gzip.compress(framed(64 * (64 << 20) - 16), mtime=0) + zeros * 64)


def far_too_long(path: Path) -> None:
    path.write_bytes(framed(2**40) + bytes(1000))


def long_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(framed(2**31 - 1) + bytes(1 << 20)))


RECORDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bomb": (bomb, "which are not a tf.train.Example"),
    "a length": (far_too_long, "not a tf.train.Example"),
    "a length in gzip": (long_gzip, "which no volume does"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_that_says_too_much(tmp_path: Path, kind: str) -> None:
    make, words = RECORDS[kind]
    make(tmp_path / "a.tfrecord")
    with pytest.raises(DataError, match=rf"a\.tfrecord.*{words}"), in_little_memory():
        source_of(tmp_path, Seat())


def test_a_message_of_millions_of_fields() -> None:
    with pytest.raises(ValueError, match="more than 10000 fields"):
        list(message_fields(memoryview(b"\x08\x00" * 20_000)))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["mlperf", "sc18"])
def test_the_sum_of_a_plain_record_is_compared(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tfrecord"
    if kind == "mlperf":
        mlperf(path, 0, False)
    else:
        cube = counts(0, (6, 6, 6), "float64").tobytes()
        labels = np.array([0.3, 0.8]).tobytes()
        path.write_bytes(record(example(data_raw=cube, label_raw=labels)))
    whole = Box.whole(source_of(tmp_path, Seat()).shape)
    before = source_of(tmp_path, Seat()).read(0, whole)
    size = path.stat().st_size
    for place in (size // 2, size // 3, size - 1):
        flip(path, place)
        with pytest.raises(DataError, match=r"a\.tfrecord.*: is damaged: the sum"):
            source_of(tmp_path, Seat()).read(0, whole)
        flip(path, place)
    np.testing.assert_array_equal(source_of(tmp_path, Seat()).read(0, whole), before)


def test_the_sum_at_the_end_of_gzip_is_compared(tmp_path: Path) -> None:
    shape = (1, 30, 40, 50)
    for name in ("volume-0", "segmentation-0"):
        values = hu(0, shape)[0] if name == "volume-0" else np.zeros(shape[1:], np.uint8)
        nifti(tmp_path / f"{name}.nii.gz", values, AXES)
    source = source_of(tmp_path, Seat())
    assert source.read(0, Box.whole(shape)).any()
    flip(tmp_path / "volume-0.nii.gz", -6)
    source = source_of(tmp_path, Seat())
    with pytest.raises(DataError, match=r"volume-0\.nii\.gz: cannot be read as NIfTI.*CRC"):
        source.read(0, Box.whole(shape))


def test_a_nifti_that_declares_too_much(tmp_path: Path) -> None:
    shape = (1, 8, 6, 4)
    nifti(tmp_path / "volume-0.nii", hu(0, shape)[0], AXES)
    data = bytearray((tmp_path / "volume-0.nii").read_bytes())
    data[42:48] = struct.pack("<3h", 32767, 32767, 32767)
    (tmp_path / "volume-0.nii").unlink()
    for name in ("volume-0", "segmentation-0"):
        (tmp_path / f"{name}.nii.gz").write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match=r"volume-0\.nii\.gz: has \d+ bytes and says"):
        source_of(tmp_path, Seat())


def scans(folder: Path, header: bytes, *members: bytes, suffix: str = ".nii.gz") -> None:
    """Writes a volume and labels of this header, and of gzip members, or of 1000 bytes."""
    data = header + bytes(1000)
    for name in ("volume-0", "segmentation-0"):
        packed = gzip.compress(header, mtime=0) + b"".join(members) if members else data
        (folder / f"{name}{suffix}").write_bytes(packed)


def nifti_header(kind: Any, extents: tuple[int, ...], start: int | None = None) -> bytes:
    """Packs a header that claims these extents, and voxels that begin at a byte."""
    found = kind()
    found.set_data_dtype(np.int16)
    found.set_sform(np.eye(4), code=1)
    found["dim"][:4] = (3, *extents)
    found["vox_offset"] = start or kind.sizeof_hdr + 4
    return bytes(found.binaryblock) + (b"\1" if start else b"\0") + bytes(3)


ZEROS = gzip.compress(bytes(64 << 20), mtime=0)

EXTENSION = struct.pack("<2i", 2**31 - 128, 6)

LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "voxels": (
        lambda d: scans(d, nifti_header(nibabel.Nifti1Header, (32767,) * 3), suffix=".nii"),
        "has 1352 bytes and says that it has 70362301923678",
    ),
    "voxels beyond 64 bits": (
        lambda d: scans(d, nifti_header(nibabel.Nifti2Header, (2**40,) * 3), suffix=".nii"),
        "has 1544 bytes and says",
    ),
    "negative voxels": (
        lambda d: scans(d, nifti_header(nibabel.Nifti1Header, (-8, -8, 8)), suffix=".nii"),
        "says that it has -8 x -8 x 8 voxels",
    ),
    "gzip": (
        lambda d: scans(d, nifti_header(nibabel.Nifti1Header, (2048, 1024, 1024)), b""),
        r"has \d+ bytes and says that it unpacks to 42949",
    ),
    "gzip that holds it": (
        lambda d: scans(d, nifti_header(nibabel.Nifti1Header, (2048, 1024, 1024)), ZEROS * 64),
        r"has \d+ bytes and says that it unpacks to 42949",
    ),
    "gzip of more": (
        lambda d: scans(d, nifti_header(nibabel.Nifti1Header, (8, 8, 8)), ZEROS * 64),
        "unpacks to more than its header says",
    ),
    "an extension in gzip": (
        lambda d: scans(
            d, nifti_header(nibabel.Nifti1Header, (8, 8, 8), 416) + EXTENSION, ZEROS * 33
        ),
        "an extension of its header has 2147483520 bytes",
    ),
    "a header in gzip": (
        lambda d: scans(
            d, nifti_header(nibabel.Nifti1Header, (8, 8, 8), 2**31) + EXTENSION, ZEROS * 33
        ),
        "claims a header of 2147483648 bytes",
    ),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_scan_that_says_more_than_it_holds(tmp_path: Path, kind: str) -> None:
    make, words = LIES[kind]
    make(tmp_path)
    with pytest.raises(DataError, match=rf"volume-0\.nii.*{words}"), in_little_memory():
        source_of(tmp_path, Seat()).read(0, Box.whole((1, 8, 8, 8)))


def chunks(path: Path, side: int, filtered: bool, data: bytes = b"") -> None:
    """Creates a volume of one chunk, of which nothing is written but, as it is, this."""
    with h5py.File(path, "w") as file:
        file["unitPar"] = np.zeros(4, "f4")
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_chunk((side, side, side, 1))
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if filtered:
            how.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
            how.set_deflate(4)
        space = h5py.h5s.create_simple((side, side, side, 1))
        volume = h5py.h5d.create(file.id, b"full", h5py.h5t.STD_I16LE, space, how)
        if data:
            volume.write_direct_chunk((0,) * 4, data)


def zeros_in_pieces(count: int) -> bytes:
    """A stream of deflate that unpacks to so many MiB; each piece stands for itself."""
    pack = zlib.compressobj(9)
    first, *others = (
        pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH) for _ in range(3)
    )
    return first + others[1] * (count - 1)


CHUNKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "packed": (lambda p: chunks(p, 1024, True, b"x"), "is packed in chunks of 2048 MiB"),
    "as it is": (lambda p: chunks(p, 640, False), "was never written"),
    "unpacks to more": (
        lambda p: chunks(p, 64, True, zeros_in_pieces(1024)),
        "unpack to more than",
    ),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_an_hdf5_chunk_of_more_than_memory(tmp_path: Path, kind: str) -> None:
    make, words = CHUNKS[kind]
    make(tmp_path / "a.hdf5")
    with pytest.raises(DataError, match=rf"a\.hdf5.*{words}"), in_little_memory():
        source_of(tmp_path, Seat(), "last")


def test_an_hdf5_chunk_that_unpacks_to_more_than_it_says(tmp_path: Path) -> None:
    """Its bytes could be those of a chunk of voxels; only unpacking them tells."""
    lie = zeros_in_pieces(600)
    assert len(zlib.decompressobj().decompress(zeros_in_pieces(3))) == 3 << 20
    assert hdf5.UNPACKED_FREELY // 1032 < len(lie) < 2 * 96**3
    chunks(tmp_path / "a.hdf5", 96, True, lie)
    source = source_of(tmp_path, Seat(), "last")
    with pytest.raises(DataError, match=r"a\.hdf5: 'full' has a chunk"), in_little_memory():
        source.read(0, Box.whole(source.shape))


def test_an_hdf5_volume_that_is_packed_twice(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["unitPar"] = np.zeros(4, "f4")
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_chunk((8, 8, 8, 1))
        for _ in range(2):
            how.set_deflate(4)
        space = h5py.h5s.create_simple((8, 8, 8, 1))
        volume = h5py.h5d.create(file.id, b"full", h5py.h5t.STD_I16LE, space, how)
        volume.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ones((8, 8, 8, 1), "i2"))
    source = source_of(tmp_path, Seat(), "last")
    with pytest.raises(DataError, match="is packed twice"):
        source.read(0, Box.whole(source.shape))


@pytest.mark.parametrize("where", ["/", "g"])
def test_an_attribute_that_is_large(tmp_path: Path, where: str) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w", libver="latest") as file:
        file["full"] = np.ones((8, 8, 8, 1), "i2")
        file["unitPar"] = np.zeros(1)
        file.create_group("g").attrs["y"] = 0.5
        file[where].attrs.create("big", np.zeros(2 << 20, "u1"))
    mapping = DataMap(volume="full", targets=("g@y",)) if where == "g" else None
    with pytest.raises(DataError, match=r"a\.hdf5: an attribute of .* has 2097152 bytes"):
        source_of(tmp_path, Seat(), "last", mapping=mapping).extras(0)


def words_of_gigabytes(path: Path, where: str) -> None:
    """Each of 4000 words is the same one of 1 MiB: 4 GiB from 2 MiB."""
    kind = h5py.string_dtype()
    with h5py.File(path, "w") as file:
        file["full"] = np.ones((8, 8, 8, 1), "i2")
        file["unitPar"] = np.zeros(4000, "f4")
        one = file.create_dataset("one", (1,), kind)
        one[0] = "x" * (1 << 20)
        place = one.id.get_offset()
        if where == "a data set":
            file.create_dataset("namePar", (4000,), kind)[:] = "q"
        else:
            file.attrs.create("words", ["q"] * 4000, dtype=kind)
    data = path.read_bytes()
    found = re.search(rb"(?s)(\x01\0\0\0.{12}){4000}", data)  # length, heap, number in it
    assert found is not None
    path.write_bytes(data[: found.start()] + data[place : place + 16] * 4000 + data[found.end() :])


WORDS = ("a data set", "an attribute")

OPENS = """
import sys
from pathlib import Path
from tests.formats import test_bounded as here
for folder in sys.argv[1:]:
    try:
        with here.in_little_memory():
            here.source_of(Path(folder), here.Seat(), "last")
    except here.DataError as error:
        print(str(error).replace("\\n", " "))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_words_of_hdf5_that_stand_for_gigabytes(tmp_path: Path) -> None:
    """In a process of its own: one that has given back memory has more addresses than it fills.

    Nor is it forked: the peak of a child would be that of the session.
    """
    for where in WORDS:
        (tmp_path / where).mkdir()
        words_of_gigabytes(tmp_path / where / "a.hdf5", where)
    command = [sys.executable, "-c", OPENS, *(str(tmp_path / where) for where in WORDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for where, said in zip(WORDS, done.stdout.splitlines(), strict=True):
        assert re.search(rf"{where}/a\.hdf5: .* strings of variable", said), done.stdout


def test_short_words_of_variable_length_are_read(tmp_path: Path) -> None:
    names = ["Omega_m", "sigma_8"]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["full"] = np.ones((8, 8, 8, 1), "i2")
        file["unitPar"] = np.zeros(2, "f4")
        file["namePar"] = names
        file.attrs["channels"] = "last"
        file.attrs["from"] = "a simulation"
    source = source_of(tmp_path, Seat())
    assert [*source.parameters.names] == names
    assert source.extras(0).attributes["from"] == "a simulation"


def test_an_hdf5_filter_without_its_options(tmp_path: Path) -> None:
    """h5py fails on it; HDF5 reads what needs no unpacking."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["unitPar"] = np.zeros(4, "f4")
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_chunk((8, 8, 8, 1))
        how.set_filter(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((8, 8, 8, 1))
        volume = h5py.h5d.create(file.id, b"full", h5py.h5t.STD_I16LE, space, how)
        volume.write_direct_chunk((0,) * 4, zlib.compress(np.ones((8, 8, 8, 1), "i2").tobytes()))
    source = source_of(tmp_path, Seat(), "last")
    assert source.storage(0).compression == "gzip"
    with pytest.raises(DataError, match=r"a\.hdf5: cannot be read"):
        source.read(0, Box.whole(source.shape))


def header(shape: tuple[int, ...], kind: str = "<i2") -> bytes:
    words = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(words)) + words


NPY = {
    "much": header((10**6, 10**6, 10**6)),
    "negative": header((-4, -4, -4)),
    "negative twice": header((-4, -4, 4)),
    "brackets": header((1,)).replace(b"(1,)", b"(" * 5000),
    "objects": header((4, 4, 4), "|O"),
    "no type": header((4, 4, 4), "nonsense"),
}


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("kind", NPY)
def test_headers_of_npy(tmp_path: Path, kind: str, target: bool) -> None:
    name = "a.target.npy" if target else "a.npy"
    np.save(tmp_path / "a.npy", np.ones((4, 4, 4), "i2"))
    np.save(tmp_path / "a.target.npy", np.ones(3))
    (tmp_path / name).write_bytes(NPY[kind] + bytes(math.prod((4, 4, 4)) * 2))
    with pytest.raises(DataError, match=name):
        source_of(tmp_path, Seat())


@pytest.mark.parametrize("target", [False, True])
def test_a_header_of_npy_that_is_said_to_be_long(tmp_path: Path, target: bool) -> None:
    """numpy reads all of it before it refuses it."""
    name = "a.target.npy" if target else "a.npy"
    np.save(tmp_path / "a.npy", np.ones((4, 4, 4), "i2"))
    np.save(tmp_path / "a.target.npy", np.ones(3))
    with (tmp_path / name).open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 28) + b"{")
        file.truncate(1 << 29)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"{name}: .* claims a header of 268435456 bytes"):
            source_of(tmp_path, Seat())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
