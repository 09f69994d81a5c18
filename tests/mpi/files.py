"""HDF5 files of every layout, with uneven extents, written by h5py alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def volume(seed: int) -> Any:
    """(C, D, H, W)"""
    return np.random.default_rng(seed).poisson(1.0, (4, 7, 7, 7)).astype("int16")


def unit(seed: int) -> Any:
    return np.random.default_rng(1000 + seed).uniform(-1, 1, 4)


def public(path: Path, seed: int, **how: Any) -> None:
    with h5py.File(path.with_suffix(".hdf5"), "w") as file:
        file.create_dataset("full", data=np.moveaxis(volume(seed), 0, -1), **how)
        file["unitPar"] = unit(seed)


def benchmark(path: Path, seed: int) -> None:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        x = np.moveaxis(volume(seed), 0, -1)
        file.create_dataset("x", data=x, chunks=(4, 3, 7, 4), compression="gzip")
        file["y"] = unit(seed)


def lbann(path: Path, seed: int) -> None:
    with h5py.File(path.with_name(f"{path.name}_0_0_0.hdf5"), "w") as file:
        file["full"], file["unitPar"] = volume(seed).transpose(0, 3, 2, 1), unit(seed)


def scans(path: Path, seed: int) -> None:
    with h5py.File(path.with_suffix(".hdf5"), "w") as file:
        file["volume"], file["segmentation"] = volume(seed), volume(seed)[:1] % 3


LAYOUTS: dict[str, Callable[[Path, int], None]] = {
    "public": public,
    "benchmark, gzip": benchmark,
    "LBANN": lbann,
    "scans": scans,
}
