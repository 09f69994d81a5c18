"""What one HDF5 file says about itself, checked.

Three layouts are known, by their keys: the public CosmoFlow files (``full``, ``unitPar``, and
``physPar``, ``namePar``, ``redshifts``, of which the last three may be absent), the benchmark's
(``x``, ``y``), and scans with a class for every voxel (``volume``, ``segmentation``, see `labels`).
In the first two the volume is (D, H, W, C) or (C, D, H, W).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import h5py
import numpy as np

from hyperslab.data import labels
from hyperslab.errors import DataError

Channels = Literal["first", "last"]
KEYS = (("full", "unitPar"), ("x", "y"), labels.KEYS)
DTYPES = ("int16", "uint16", "float32")
NAMES = ("Omega_m", "sigma_8", "n_s", "H_0")  # the order of unitPar in the public files


@dataclass(frozen=True, slots=True)
class Layout:
    """How the volumes of a data set are stored: equal in all of its files."""

    key: str
    stored: tuple[int, ...]  # the shape in the file
    dtype: str
    channels: Channels
    names: tuple[str, ...]  # of the targets
    classes: tuple[str, ...] = ()
    label_shape: tuple[int, ...] = ()  # in the file
    label_dtype: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The volume's shape (C, D, H, W)."""
        last = self.channels == "last"
        return (self.stored[-1], *self.stored[:-1]) if last else self.stored


@dataclass(frozen=True, slots=True)
class Header:
    layout: Layout
    unit: tuple[float, ...]
    physical: tuple[float, ...] | None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what h5py raises about a file into a `DataError` that names it."""
    try:
        yield
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(
            f"{path}: cannot be read as HDF5, truncated or foreign?: {error}"
        ) from error


def read_header(path: Path, channels: Channels | None) -> Header:
    """Open a file, check it, read everything but the volume.

    Raises:
        DataError: the file is truncated, foreign, lacks a key, or a key has a wrong shape, dtype
            or value; or ``channels`` is ``None`` and the order is not clear from the shape.
    """
    with naming(path), h5py.File(path, "r", locking=False) as file:
        key, target = _keys(path, file)
        volume = file[key]
        _check_volume(path, key, volume)
        if target == labels.KEYS[1]:
            return Header(_labelled(path, file, channels), (), None)
        unit = _vector(path, target, file[target])
        return Header(
            Layout(
                key,
                volume.shape,
                volume.dtype.name,
                channels or _channel_order(path, file, volume.shape),
                _names(file, target, len(unit)),
            ),
            unit,
            _physical(path, file, len(unit)),
        )


def _keys(path: Path, file: h5py.File) -> tuple[str, str]:
    for key, target in KEYS:
        if key not in file:
            continue
        for name in (key, target):
            if not isinstance(file.get(name), h5py.Dataset):
                raise DataError(f"{path}: has {key!r} but no data set {name!r}")
        return key, target
    known = " or ".join(f"{key!r} and {target!r}" for key, target in KEYS)
    raise DataError(f"{path}: not a known layout: needs {known}, has {sorted(file)}")


def _check_volume(path: Path, key: str, volume: Any) -> None:
    if volume.ndim != 4 or 0 in volume.shape:
        raise DataError(
            f"{path}: {key!r} has shape {volume.shape}; needs three spatial dims and channels"
        )
    if volume.dtype.name not in DTYPES:
        raise DataError(f"{path}: {key!r} is {volume.dtype}; needs one of {', '.join(DTYPES)}")


def _labelled(path: Path, file: h5py.File, channels: Channels | None) -> Layout:
    volume, segmentation = (file[key] for key in labels.KEYS)
    if channels == "last":
        raise DataError(f"{path}: in files with 'volume' and 'segmentation' channels come first")
    labels.check_segmentation(str(path), volume, segmentation)
    return Layout(
        labels.KEYS[0],
        volume.shape,
        volume.dtype.name,
        "first",
        (),
        labels.classes_of(str(path), file),
        segmentation.shape,
        segmentation.dtype.name,
    )


def _vector(path: Path, key: str, dataset: Any) -> tuple[float, ...]:
    if dataset.ndim != 1 or dataset.size == 0 or dataset.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {key!r} is {dataset.dtype} {dataset.shape}; needs a vector of numbers"
        )
    values = np.asarray(dataset[()], np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {key!r} holds {values.tolist()}; needs finite numbers")
    return tuple(values.tolist())


def _channel_order(path: Path, file: h5py.File, stored: tuple[int, ...]) -> Channels:
    """From the cube's equal extents, or else from the number of redshifts."""
    cube = {
        "last": stored[0] == stored[1] == stored[2],
        "first": stored[1] == stored[2] == stored[3],
    }
    redshifts = file["redshifts"].size if "redshifts" in file else -1
    count = {"last": stored[-1] == redshifts, "first": stored[0] == redshifts}
    for evidence in (cube, count):
        found = [order for order in get_args(Channels) if evidence[order]]
        if len(found) == 1:
            return found[0]
    raise DataError(
        f"{path}: shape {stored} does not tell which dim is the channel's; "
        'say channels="first" or channels="last"'
    )


def _names(file: h5py.File, target: str, count: int) -> tuple[str, ...]:
    """The file's own names (bytes or text, possibly padded), else the documented ones."""
    if "namePar" in file and file["namePar"].shape == (count,):
        raw = file["namePar"][()]
        text = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in raw]
        names = tuple(v.strip("\0 ") for v in text)
        if len({*names, ""}) == count + 1:  # all different and none empty
            return names
    return NAMES if target == "unitPar" and count == 4 else tuple(f"y{i}" for i in range(count))


def _physical(path: Path, file: h5py.File, count: int) -> tuple[float, ...] | None:
    if "physPar" not in file:
        return None
    values = _vector(path, "physPar", file["physPar"])
    if len(values) != count:
        raise DataError(f"{path}: 'physPar' has {len(values)} values but there are {count} targets")
    return values
