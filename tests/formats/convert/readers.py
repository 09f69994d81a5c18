"""Converted files as the formats' own libraries read them, never ours."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import zarr
from numpy.typing import NDArray

from tests.formats.writers import example, record

Found = tuple[NDArray[Any], NDArray[Any]]
"""A volume (C, D, H, W), and its targets (P,) or labels (D, H, W)."""


def keys(file: Any, reverse: bool = False) -> Found:
    if "volume" in file:
        labels = file["segmentation"]
        assert labels.shape[0] == 1
        assert labels.dtype == np.uint8
        return file["volume"][:], labels[0]
    volume, target = ("full", "unitPar") if "full" in file else ("x", "y")
    values = file[volume][:]
    return values.transpose(0, 3, 2, 1) if reverse else np.moveaxis(values, -1, 0), file[target][:]


def hdf5(folder: Path, name: str) -> Found:
    with h5py.File(folder / f"{name}.hdf5") as file:
        return keys(file)


def lbann(folder: Path, name: str) -> Found:
    with h5py.File(folder / f"{name}.hdf5") as file:
        return keys(file, reverse=True)


def zarrs(folder: Path, name: str) -> Found:
    return keys(zarr.open_group(folder / f"{name}.zarr", mode="r", zarr_format=3))


def npy(folder: Path, name: str) -> Found:
    values = np.load(folder / f"{name}.npy")
    with (folder / "targets.csv").open(newline="") as file:
        table = {row[0]: row[1:] for row in csv.reader(file)}
    return values if values.ndim == 4 else values[None], np.array(table[name], float)


def nifti(folder: Path, name: str) -> Found:
    (volume,) = [p for p in folder.rglob(f"{name}.nii*") if "labels" not in str(p)]
    other = volume.name.replace("volume", "segmentation")
    (labels,) = [p for p in folder.rglob(other) if p != volume]
    arrays = []
    for path in (volume, labels):
        image = nibabel.load(path)
        assert nibabel.aff2axcodes(image.affine) == ("R", "A", "S")
        assert image.get_data_dtype() in (np.int16, np.uint8, np.float32)
        arrays.append(np.asarray(image.dataobj, image.get_data_dtype()).transpose(2, 1, 0))
    return arrays[0][None], arrays[1]


READERS: dict[str, Callable[[Path, str], Found]] = {
    "hdf5": hdf5,
    "lbann": lbann,
    "zarr": zarrs,
    "npy": npy,
    "nifti": nifti,
}


def tfrecord(volume: NDArray[Any], target: NDArray[Any]) -> bytes:
    """The bytes that a file of them has."""
    x = np.moveaxis(volume, 0, -1).astype("<i2").tobytes()
    return record(example(x=x, y=np.float32(target)))
