"""What one HDF5 file, or one Zarr group of the same keys, says about itself, checked.

Three layouts are known, by their keys: the public CosmoFlow files (``full``, ``unitPar``, and
``physPar``, ``namePar``, ``redshifts``, of which the last three may be absent), the benchmark's
(``x``, ``y``), and scans with a class for every voxel (``volume``, ``segmentation``, see `labels`).
In the first two the volume is (D, H, W, C) or (C, D, H, W).

LBANN's splitter transposes the whole cube, so that its files ``{base}_{ix}_{iy}_{iz}.hdf5`` hold
``full`` as (C, W, H, D): channels first, the spatial dims reversed. By that key, order and name
they are known; `Layout.reversed` says so. The three numbers count along the dims of the file: ix
along W, iz along D.

The attribute ``channels``, "first" or "last", which `hyperslab convert` writes, says where the
channels of the first two are; else the shape tells, or the user does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import h5py
import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.shared import labels, optional
from hyperslab.formats.shared.checks import naming

Channels = Literal["first", "last"]
Part = re.compile(r"(.+)_(\d+)_(\d+)_(\d+)")
"""The name of a sub-volume of LBANN's: the cube's, and the place along width, height and depth."""

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
    reversed: bool = False  # the spatial dims in the file are (W, H, D)

    @property
    def shape(self) -> tuple[int, ...]:
        """The volume's shape (C, D, H, W)."""
        if self.reversed:
            return (self.stored[0], *self.stored[:0:-1])
        last = self.channels == "last"
        return (self.stored[-1], *self.stored[:-1]) if last else self.stored


@dataclass(frozen=True, slots=True)
class Header:
    layout: Layout
    unit: tuple[float, ...]
    physical: tuple[float, ...] | None


def kind_of(path: Path) -> str:
    """``"Zarr"`` or ``"HDF5"``, by the name."""
    return "Zarr" if path.suffix == ".zarr" else "HDF5"


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file or Zarr group, of which the keys are looked up."""
    if kind_of(path) == "Zarr":
        yield optional.zarr().open_group(path, mode="r", zarr_format=3)
        return
    with h5py.File(path, "r", locking=False) as file:
        yield file


def read_header(path: Path, channels: Channels | None, lbann: bool | None = None) -> Header:
    """Open a file, check it, read everything but the volume.

    ``lbann`` says whether the spatial dims are reversed as LBANN's splitter does it; ``None`` finds
    it out.

    Raises:
        DataError: the file is truncated, foreign, lacks a key, or a key has a wrong shape, dtype
            or value; or ``channels`` is ``None`` and the order is not clear from the shape.
    """
    with naming(path, kind_of(path)), opened(path) as file:
        key, target = _keys(path, file)
        volume = file[key]
        _check_volume(path, key, volume)
        if target == labels.KEYS[1]:
            return Header(_labelled(path, file, channels), (), None)
        unit = _vector(path, target, file[target])
        redshifts = file["redshifts"].size if "redshifts" in file else -1
        said = _said(file)
        if channels and said and channels != said:
            raise DataError(f'{path}: says that its channels come {said}; do not say "{channels}"')
        order = channels or said or channel_order(path, volume.shape, redshifts)
        return Header(
            Layout(
                key,
                volume.shape,
                volume.dtype.name,
                order,
                _names(file, target, len(unit)),
                reversed=is_reversed(path, key, order, lbann),
            ),
            unit,
            _physical(path, file, len(unit)),
        )


def _keys(path: Path, file: Any) -> tuple[str, str]:
    for key, target in KEYS:
        if key not in file:
            continue
        for name in (key, target):
            if not hasattr(file.get(name), "ndim"):  # missing, or a group
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


def _said(file: Any) -> Channels | None:
    """Where the channels are, if the file itself says so."""
    said = file.attrs.get("channels")
    return next((order for order in get_args(Channels) if str(said) == order), None)


def _labelled(path: Path, file: Any, channels: Channels | None) -> Layout:
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


def is_reversed(path: Path, key: str, order: Channels, lbann: bool | None) -> bool:
    """Whether the spatial dims of a file are (W, H, D); ``lbann`` says so, or is found out.

    Raises:
        DataError: it is said of a file with channels last.
    """
    if lbann and order == "last":
        raise DataError(f'{path}: stores channels last, which LBANN\'s do not; say format="hdf5"')
    found = key == "full" and order == "first" and Part.fullmatch(path.stem) is not None
    return found if lbann is None else lbann


def channel_order(path: Path, stored: tuple[int, ...], redshifts: int = -1) -> Channels:
    """From the cube's equal extents, or else from the number of redshifts.

    Raises:
        DataError: neither tells.
    """
    cube = {
        "last": stored[0] == stored[1] == stored[2],
        "first": stored[1] == stored[2] == stored[3],
    }
    count = {"last": stored[-1] == redshifts, "first": stored[0] == redshifts}
    for evidence in (cube, count):
        found = [order for order in get_args(Channels) if evidence[order]]
        if len(found) == 1:
            return found[0]
    raise DataError(
        f"{path}: shape {stored} does not tell which dim is the channel's; "
        'say channels="first" or channels="last"'
    )


def _names(file: Any, target: str, count: int) -> tuple[str, ...]:
    """The file's own names (bytes or text, possibly padded), else the documented ones."""
    if "namePar" in file and file["namePar"].shape == (count,):
        raw = file["namePar"][()]
        text = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in raw]
        names = tuple(v.strip("\0 ") for v in text)
        if len({*names, ""}) == count + 1:  # all different and none empty
            return names
    return NAMES if target == "unitPar" and count == 4 else tuple(f"y{i}" for i in range(count))


def _physical(path: Path, file: Any, count: int) -> tuple[float, ...] | None:
    if "physPar" not in file:
        return None
    values = _vector(path, "physPar", file["physPar"])
    if len(values) != count:
        raise DataError(f"{path}: 'physPar' has {len(values)} values but there are {count} targets")
    return values
