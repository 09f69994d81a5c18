"""Files with a class for every voxel, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from tests.formats.universes import write

CLASSES = ("background", "organ", "lesion", "vessel")


def hu(seed: int, shape: Sequence[int], dtype: str = "int16") -> NDArray[Any]:
    return np.random.default_rng(seed).integers(-1024, 1500, shape).astype(dtype)


def labels(seed: int, shape: Sequence[int], classes: int = 4) -> NDArray[np.uint8]:
    return np.random.default_rng(500 + seed).integers(0, classes, shape).astype(np.uint8)


def scan(path: Path, seed: int = 0, shape: Sequence[int] = (1, 7, 6, 5), **change: Any) -> None:
    """Our own layout; ``change`` replaces keys (None leaves one out) or ``classes``."""
    names = change.pop("classes", CLASSES)
    segmentation = labels(seed, (1, *shape[1:]))
    write(path, **({"volume": hu(seed, shape), "segmentation": segmentation} | change))
    if names is not None:
        with h5py.File(path, "a") as file:
            file.attrs["classes"] = np.array(names, "S") if isinstance(names, tuple) else names


def lbann(path: Path, seed: int = 0, shape: Sequence[int] = (2, 7, 6, 5)) -> None:
    """LBANN's: labels of the volume's shape and type, three classes without names."""
    segmentation = np.broadcast_to(labels(seed, (1, *shape[1:]), 3), shape)
    write(path, volume=hu(seed, shape, "float32"), segmentation=segmentation.astype("float32"))


def folder(path: Path, count: int, shape: Sequence[int] = (1, 7, 6, 5)) -> None:
    for i in range(count):
        scan(path / f"volume-{i}.hdf5", i, shape)
