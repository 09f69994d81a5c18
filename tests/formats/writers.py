"""Folders of every format, written by hand or by the format's own library, never by ours."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import zarr
from numpy.typing import NDArray

from tests.formats.scans import hu, labels, lbann
from tests.formats.universes import counts, public, unit, write

N = 3
"""Samples in each folder."""

CUBE = (4, 7, 7, 7)
SLAB = (4, 7, 6, 5)
SCAN = (1, 7, 6, 5)

Volumes = list[NDArray[Any]]
"""The (C, D, H, W) of each sample, in the order of their names."""

Write = Callable[[Path], Volumes]


def crc32c(data: bytes) -> int:
    """Bit by bit from the polynomial of RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    """TensorFlow's framing."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def field(number: int, data: bytes, kind: int = 2) -> bytes:
    size, varint = len(data), b""
    while size > 127:
        varint, size = varint + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | kind]) + (varint + bytes([size]) if kind == 2 else b"") + data


def example(packed: bool = True, **features: Any) -> bytes:
    """A `tf.train.Example` of bytes and vectors of float32."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif packed:
            feature = field(2, field(1, np.asarray(value, "<f4").tobytes()))
        else:
            feature = field(2, b"".join(field(1, struct.pack("<f", v), 5) for v in value))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def universe(seed: int, shape: tuple[int, ...] = CUBE) -> NDArray[Any]:
    return counts(seed, shape)


def mlperf(path: Path, seed: int, packed: bool = False, **change: Any) -> bytes:
    """One file; the record is returned."""
    x = np.moveaxis(universe(seed), 0, -1).astype("<i2").tobytes()
    features = {"x": x, "y": np.float32(unit(seed))} | change
    data = record(example(**{k: v for k, v in features.items() if v is not None}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if packed else data)
    return data


def tfrecords(packed: bool) -> Write:
    def make(folder: Path) -> Volumes:
        for i in range(N):
            mlperf(folder / f"univ_{i}.tfrecord", i, packed)
        return [universe(i) for i in range(N)]

    return make


def benchmark(folder: Path) -> Volumes:
    for i in range(N):
        write(folder / f"{i}.h5", y=np.float32(unit(i)))
        with h5py.File(folder / f"{i}.h5", "a") as file:
            x = np.moveaxis(universe(i), 0, -1)
            file.create_dataset("x", data=x, chunks=(4, 3, 7, 4), compression="gzip")
    return [universe(i) for i in range(N)]


def universes(folder: Path) -> Volumes:
    for i in range(N):
        public(folder / f"univ_{i}.hdf5", np.moveaxis(universe(i, SLAB), 0, -1), i)
    return [universe(i, SLAB) for i in range(N)]


def split(folder: Path, dtype: str = "int16", cubes: int = 1) -> Volumes:
    """LBANN's splitter: the transposed cube in eight parts (C, W, H, D), counted along these."""
    found = []
    for seed in range(cubes):
        cube = counts(seed, (10, 10, 10, 4), dtype)
        for ix, iy, iz in np.ndindex(2, 2, 2):
            part = cube.transpose()[:, ix * 5 :, iy * 5 :, iz * 5 :][:, :5, :5, :5]
            name = f"univ_a{seed}_{ix}_{iy}_{iz}.hdf5"
            write(folder / name, full=part, unitPar=unit(seed))
            place = (
                slice(5 * iz, 5 * iz + 5),
                slice(5 * iy, 5 * iy + 5),
                slice(5 * ix, 5 * ix + 5),
            )
            found.append(np.moveaxis(cube[place], -1, 0))
    return found


def lits_hdf5(folder: Path) -> Volumes:
    for i in range(N):
        lbann(folder / f"volume-{i}.hdf5", i)
    return [hu(i, (2, 7, 6, 5), "float32") for i in range(N)]


def npy(order: str) -> Write:
    def make(folder: Path) -> Volumes:
        folder.mkdir(parents=True, exist_ok=True)
        shape = SCAN if order == "none" else CUBE
        found = [counts(i, shape, "float32" if order == "last" else "int16") for i in range(N)]
        for i, volume in enumerate(found):
            last = np.asfortranarray(np.moveaxis(volume, 0, -1))
            stored = {"first": volume, "last": last, "none": volume[0]}[order]
            np.save(folder / f"v{i}.npy", stored)
            if order == "first":
                np.save(folder / f"v{i}.target.npy", unit(i))
        if order != "first":
            lines = [",".join([f"v{i}", *map(repr, unit(i).tolist())]) for i in range(N)]
            (folder / "targets.csv").write_text("name,a,b,c,d\n" + "\n".join(lines))
        return found

    return make


def zarrs(folder: Path) -> Volumes:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(N):
        group = zarr.create_group(folder / f"univ_{i}.zarr", zarr_format=3)
        volume = np.moveaxis(universe(i, SLAB), 0, -1)
        group.create_array("full", data=volume, chunks=(4, 4, 3, 4))
        for key, value in {"unitPar": unit(i), "redshifts": np.zeros(4)}.items():
            group.create_array(key, data=value)
    return [universe(i, SLAB) for i in range(N)]


def zarr_scans(folder: Path) -> Volumes:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(N):
        group = zarr.create_group(folder / f"volume-{i}.zarr", zarr_format=3)
        group.create_array("volume", data=hu(i, SCAN), chunks=(1, 4, 4, 4))
        group.create_array("segmentation", data=labels(i, SCAN, 3))
        group.attrs["classes"] = ["background", "liver", "tumour"]
    return [hu(i, SCAN) for i in range(N)]


AXES = [
    np.diag([1.0, 2, 3, 1]),
    np.diag([-1.0, -2, 3, 1]),
    np.eye(4)[[1, 2, 0, 3]] * [-1, 1, -1, 1],
]
"""RAS+, LPS+, and the axes permuted, two of them flipped."""


def nifti(path: Path, values: NDArray[Any], affine: NDArray[Any]) -> None:
    """Values (D, H, W) along the patient's axes, stored along those of the affine."""
    ras = values.transpose(2, 1, 0)
    to = nibabel.orientations.io_orientation(affine)
    back = nibabel.orientations.ornt_transform([[0, 1], [1, 1], [2, 1]], to)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(
        nibabel.Nifti1Image(nibabel.orientations.apply_orientation(ras, back), affine), path
    )


def niftis(suffix: str, msd: bool) -> Write:
    image, mask = ("imagesTr/liver_", "labelsTr/liver_") if msd else ("volume-", "segmentation-")

    def make(folder: Path) -> Volumes:
        for i in range(N):
            nifti(folder / f"{image}{i}{suffix}", hu(i, SCAN)[0], AXES[i])
            nifti(folder / f"{mask}{i}{suffix}", labels(i, SCAN, 3)[0], AXES[i])
        return [hu(i, SCAN) for i in range(N)]

    return make


FORMATS: dict[str, Write] = {
    "public HDF5": universes,
    "benchmark HDF5": benchmark,
    "LBANN split HDF5": split,
    "LBANN LiTS HDF5": lits_hdf5,
    "TFRecord": tfrecords(False),
    "TFRecord gzip": tfrecords(True),
    "npy first": npy("first"),
    "npy last": npy("last"),
    "npy one channel": npy("none"),
    "Zarr": zarrs,
    "Zarr scans": zarr_scans,
    "NIfTI": niftis(".nii", False),
    "NIfTI gzip": niftis(".nii.gz", True),
}
"""Each makes a folder that `hyperslab.open` is to know without a word."""
