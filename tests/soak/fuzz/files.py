"""Files of volumes, labels and targets: of hyperslab's own writing and of others."""

from __future__ import annotations

import gzip
import hashlib
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import h5py
import numpy as np

import hyperslab as hs
from hyperslab.formats import DataMap
from hyperslab.formats.convert.run import Request, convert
from hyperslab.formats.tfrecord.records import masked_crc
from tests.formats import writers
from tests.formats.arrays.published import camels, quijote
from tests.formats.nifti import lists
from tests.formats.opening import source_of
from tests.formats.universes import counts, public
from tests.soak.fuzz.mutate import BINARY, HDF5, TEXT, double, mutate
from tests.soak.fuzz.subject import Digest, Subject

SHAPES = ((5, 6, 4), (4, 6, 5), (5, 6, 4))
"""(D, H, W) of listed scans."""


def read_samples(folder: Path, mapping: DataMap | None = None) -> Digest:
    source = source_of(folder, hs.Grid(), mapping=mapping)
    digest = hashlib.sha256(repr((source.shape, source.dtype, source.classes)).encode())
    try:
        for sample in range(len(source.names)):
            whole = hs.geometry.Box.whole(source.shape_of(sample))
            digest.update(np.ascontiguousarray(source.read(sample, whole)).tobytes())
            corner = hs.geometry.Box((0, 0, 0, 0), (source.shape[0], 2, 2, 2))
            source.read(sample, corner)
            if source.classes:
                whole = hs.geometry.Box(whole.lo[1:], whole.hi[1:])
                digest.update(source.labels(sample, whole).tobytes())
            else:
                digest.update(np.asarray(source.target(sample), np.float64).tobytes())
            source.storage(sample)
            source.extras(sample)
            digest.update(source.names[sample].encode("utf-8", "surrogateescape"))
    finally:
        source.close()
    return digest.hexdigest()


def read_file(name: str) -> Callable[[Path], Digest]:
    return lambda folder: read_samples(folder / name)


def converted(
    format: str, compression: str = "none", scans: bool = False
) -> Callable[[Path], None]:
    """Files as `hyperslab convert` writes them."""

    def make(folder: Path) -> None:
        origin = folder.with_name("origin")
        (writers.lits_hdf5 if scans else writers.tfrecords(False))(origin)
        convert(origin, folder, Request(format, compression=compression))
        shutil.rmtree(origin)
        (folder / "conversion.jsonl").unlink()

    return make


def keyed_by_user(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i in range(3):
        with h5py.File(folder / f"sim_{i}.hdf5", "w") as file:
            file["grid/delta"] = np.random.default_rng(i).random((8, 8, 8)).astype(np.float32)
            file.create_group("Header").attrs["Omega0"] = 0.1 * i


def read_by_keys(folder: Path) -> Digest:
    return read_samples(folder, DataMap(volume="grid/delta", targets=("Header@Omega0",)))


def zips(folder: Path) -> None:
    folder.mkdir()
    for i in range(3):
        values = np.random.default_rng(i).random((8, 8, 8))
        np.savez(folder / f"sim_{i}.npz", delta=values, parameters=np.array([0.1 * i, 1.0]))


def read_zips(folder: Path) -> Digest:
    return read_samples(folder, DataMap(volume="delta", targets=("parameters",)))


SC18 = Request("sc18", redshifts=(0.0,), targets=("Omega_m", "sigma_8", "n_s"))


def cubes(folder: Path) -> None:
    for i in range(3):
        public(folder / f"univ_{i}.hdf5", counts(i, (5, 5, 5, 4)), i)


def of_sc18(folder: Path) -> None:
    """Three records in one file."""
    origin = folder.with_name("origin")
    cubes(origin)
    convert(origin, folder, SC18)
    shutil.rmtree(origin)
    (folder / "conversion.jsonl").unlink()


def packed(data: bytes, rng: random.Random) -> bytes:
    """Change what is within, and pack it again with right sums."""
    return gzip.compress(mutate(gzip.decompress(data), BINARY, rng)[0], 1, mtime=0)


def framed(data: bytes, rng: random.Random) -> bytes:
    """Change what is within a record, and make its sums anew."""
    body, _ = mutate(data[12:-4], BINARY, rng)
    head = struct.pack("<Q", len(body))
    sums = [struct.pack("<I", masked_crc(google_crc32c.value(part))) for part in (head, body)]
    return head + sums[0] + body + sums[1]


def framed_first(data: bytes, rng: random.Random) -> bytes:
    """Change what is within the first of several records, and make its sums anew."""
    end = 12 + struct.unpack_from("<Q", data)[0] + 4
    return framed(data[:end], rng) + data[end:]


def framed_in_gzip(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(framed(gzip.decompress(data), rng), 1, mtime=0)


def always(path: Path) -> bool:
    return True


def chunks(path: Path) -> bool:
    return path.suffix != ".json"


def blind_fletcher(before: bytes, after: bytes) -> bool:
    """Whether nothing but words 0000 has become FFFF or the other way round.

    Fletcher-32 sums words modulo FFFF, so the two are one to it.
    """
    if len(before) != len(after):
        return False
    return any(_words(before, first) == _words(after, first) for first in (0, 1))


def _words(data: bytes, first: int) -> list[bytes]:
    words = [data[:first], *(data[at : at + 2] for at in range(first, len(data), 2))]
    return [b"\0\0" if word == b"\xff\xff" else word for word in words]


OF_RECORDS = tuple(change for change in BINARY if change is not double)
"""Each record has a sum, but nothing says how many there are: a file twice is a longer file."""

FILES: dict[str, Subject] = {
    "hdf5": Subject(converted("hdf5"), read_samples, HDF5, "*.hdf5", always, blind_fletcher),
    "hdf5-gzip": Subject(converted("hdf5", "gzip"), read_samples, HDF5, "*.hdf5", always),
    "hdf5-foreign": Subject(writers.universes, read_samples, HDF5, "*.hdf5"),
    "hdf5-benchmark": Subject(writers.benchmark, read_samples, HDF5, "*.h5"),
    "hdf5-scans": Subject(
        converted("hdf5", scans=True), read_samples, HDF5, "*.hdf5", always, blind_fletcher
    ),
    "zarr": Subject(converted("zarr", "zstd"), read_samples, BINARY, "*", chunks),
    "zarr-foreign": Subject(writers.zarrs, read_samples, BINARY),
    "zarr-scans": Subject(writers.zarr_scans, read_samples, TEXT, "*.json"),
    "npy": Subject(writers.npy("first"), read_samples, BINARY),
    "npy-table": Subject(writers.npy("none"), read_samples, TEXT, "*.csv"),
    "camels": Subject(camels, read_samples, BINARY, "*.npy"),
    "camels-table": Subject(camels, read_samples, TEXT, "*.txt"),
    "quijote-table": Subject(quijote, read_file("latin_hypercube"), TEXT, "*.txt"),
    "hdf5-keys": Subject(keyed_by_user, read_by_keys, HDF5, "*.hdf5"),
    "npz": Subject(zips, read_zips, BINARY, "*.npz"),
    "lbann": Subject(writers.split, read_samples, HDF5, "*.hdf5"),
    "tfrecord": Subject(writers.tfrecords(False), read_samples, BINARY, "*", always, forge=framed),
    "tfrecord-gzip": Subject(
        writers.tfrecords(True), read_samples, BINARY, "*", always, forge=framed_in_gzip
    ),
    "sc18": Subject(of_sc18, read_samples, OF_RECORDS, "*", always, forge=framed_first),
    "nifti": Subject(writers.niftis(".nii", False), read_samples, BINARY),
    "nifti-gzip": Subject(
        writers.niftis(".nii.gz", True), read_samples, BINARY, "*", always, forge=packed
    ),
    "scans-4d": Subject(
        lambda folder: lists.decathlon(folder, SHAPES, 3), read_samples, BINARY, "*.nii.gz", always
    ),
    "decathlon-list": Subject(
        lambda folder: lists.decathlon(folder, SHAPES), read_samples, TEXT, "dataset.json"
    ),
    "nnunet-list": Subject(
        lambda folder: lists.nnunet(folder, SHAPES), read_samples, TEXT, "dataset.json"
    ),
    "csv-list": Subject(
        lambda folder: lists.listed(folder, SHAPES), read_file("scans.csv"), TEXT, "scans.csv"
    ),
}
