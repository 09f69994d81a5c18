"""Knows published layouts: the keys of HDF5 and Zarr files, and the names of CAMELS and Quijote.

Three layouts are known by their keys (docs/formats.md): the public CosmoFlow files, the benchmark's
(``x``, ``y``), and scans with a class for every voxel, see `formats.targets`. In the first two the
volume is (D, H, W, C) or (C, D, H, W): the attribute ``channels``, "first" or "last", which
`hyperslab convert` writes, says which; else the shape tells, or the user does.

LBANN's splitter transposes the whole cube, so that its files ``{base}_{ix}_{iy}_{iz}.hdf5`` hold
``full`` as (C, W, H, D). By that key, order and name they are known. The three numbers count along
the dims of the file: ix along W, iz along D.

Two data sets are known by the names of their files. CAMELS: the Multifield Dataset's 3D grids,
https://camels-multifield-dataset.readthedocs.io (Villaescusa-Navarro et al. 2021,
arXiv:2109.10915). Quijote: its latin hypercubes and density fields,
https://quijote-simulations.readthedocs.io (Villaescusa-Navarro et al. 2020, arXiv:1909.05273).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats import files, targets
from hyperslab.formats.arrays.open import (
    Catalog,
    KeyedFile,
    StoredArray,
    kind_of_file,
    open_keyed,
    scan_headers,
)
from hyperslab.formats.source import ScanOptions
from hyperslab.formats.storage_order import (
    CDHW,
    DHWC,
    DTYPES,
    LBANN_ORDER,
    Channels,
    StorageOrder,
    channel_order,
)
from hyperslab.formats.targets import Parameters, numbered_names, ranges_in, universe_names

HDF5_SUFFIXES = (".hdf5", ".h5")

LBANN_PART_NAME = re.compile(r"(.+)_(\d+)_(\d+)_(\d+)")
"""The name of a sub-volume of LBANN's: the cube's, and the place along width, height and depth."""

LAYOUT_KEYS = (("full", "unitPar"), ("x", "y"), targets.SCAN_KEYS)

KEYS_OF_LAYOUTS = tuple(key for pair in LAYOUT_KEYS for key in pair)

EXACT_LINE = 1e-9
"""The share of a parameter by which it may be off the ranges that its file notes."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Holds all of a file but its voxels."""

    volume: StoredArray
    order: StorageOrder  # of the volume's dims
    names: tuple[str, ...] = ()  # of the targets
    unit: tuple[float, ...] = ()  # the targets that a network is shown
    physical: tuple[float, ...] | None = None  # and in their own units, where it has them
    redshifts: tuple[float, ...] = ()  # of the channels, where it says them
    ranges: str = ""  # of the parameters, as `hyperslab simulate` notes them
    labels: StoredArray | None = None
    classes: tuple[str, ...] = ()
    affine: Any = None

    def alike(self) -> dict[str, object]:
        """Returns what is equal in all files of a data set, by the words of an error."""
        labels = self.labels or StoredArray("", (), "")
        return {
            "key": self.volume.key,
            "stored": self.volume.shape,
            "dtype": self.volume.dtype,
            "channels": "first" if self.order.dims.startswith("C") else "last",
            "names": self.names,
            "classes": self.classes,
            "label_shape": labels.shape,
            "label_dtype": labels.dtype,
            "reversed": self.order == LBANN_ORDER,
        }


def read_header(
    path: Path,
    options: ScanOptions,
    reach: files.FileAccess,
    like: tuple[int, ...] | None = None,
) -> FileHeader:
    """Opens a file, checks it, and reads everything but the volume.

    ``reach``: the files that it may refer to. With ``like``, the shape (C, D, H, W) that a network
    takes, its targets and labels need not be there; nor need it tell where the channels are: they
    are last if that gives this shape, or at least as many of them.

    Raises:
        DataError: the file is truncated, foreign, lacks a key, or a key has a wrong shape, dtype
            or value; was never written or would be read from elsewhere, see `arrays.hdf5`; or
            the options do not say the order of channels and it is not clear from the shape.
    """
    with files.naming(path, kind_of_file(path)), open_keyed(path, reach) as file:
        key, target = _keys(file, bare=like is not None)
        volume = _volume(file, key)
        array = StoredArray(key, tuple(volume.shape), volume.dtype.name)
        scan = key == targets.SCAN_KEYS[0]
        channels = options.channels
        lbann = lbann_of(options.format)
        if like is not None:
            first, *_, end = array.shape
            fits = DHWC.volume_shape(array.shape) == like or first != like[0] == end
            seeming: Channels = "last" if array.shape != like and fits else "first"
            if like[0] not in (first, end):  # it is refused, for the channels that it has
                with suppress(DataError):
                    seeming = channel_order(path, array.shape)
            order = storage_order(path, key, "first" if scan else channels or seeming, lbann)
            redshifts = _redshifts(file.small("redshifts"), order.volume_shape(array.shape)[0])
            affine = file.attrs.get("affine") if scan else None
            return FileHeader(array, order, redshifts=redshifts, affine=affine)
        if scan:
            labels, classes = _labels(file, volume, channels)
            return FileHeader(array, CDHW, labels=labels, classes=classes)
        unit = _vector(path, target, file.small(target))
        redshift = file.small("redshifts")
        said = next((c for c in get_args(Channels) if str(file.attrs.get("channels")) == c), None)
        if channels and said and channels != said:
            raise DataError(
                f'{path}: its channels come {said}, not {channels}: use channels="{said}"'
            )
        count = -1 if redshift is None else redshift.size
        first, *_, last = array.shape
        told, other = (first, last) if channels == "first" else (last, first)
        if channels and len(array.shape) == 4 and told != count == other:
            raise DataError(
                f"{path}: has {count} redshifts and is {array.shape}, so its channels do not come "
                f"{channels}; leave channels out"
            )
        found = channels or said or channel_order(path, array.shape, count)
        order = storage_order(path, key, found, lbann)
        return FileHeader(
            array,
            order,
            _names(file, target, len(unit)),
            unit,
            _physical(file, len(unit)),
            _redshifts(redshift, order.volume_shape(array.shape)[0]),
            str(file.attrs.get("ranges", "")),
        )


def _keys(file: KeyedFile, *, bare: bool) -> tuple[str, str]:
    """Finds the keys of the volume and of targets or labels, which a bare file need not have."""
    path = file.path
    for key, target in LAYOUT_KEYS:
        if bare and file.find(key) is not None:
            return key, ""
        if bare or not file.has(key):
            continue
        for name in (key, target):
            if file.find(name) is None:  # missing, or a group
                raise DataError(f"{path}: has {key!r} but no data set {name!r}")
        return key, target
    if bare:
        raise DataError(f"{path}: has none of the data sets {', '.join(k for k, _ in LAYOUT_KEYS)}")
    known = " or ".join(f"{key!r} and {target!r}" for key, target in LAYOUT_KEYS)
    raise DataError(
        f"{path}: not a known layout: needs {known}, has {file.keys()}\n    other keys are set in "
        f"a recipe: data.keys: {{volume: grid/delta, targets: Header@Omega0}}, or labels: mask in "
        f"place of targets ({files.OWN_DATA}, keys)"
    )


def _volume(file: KeyedFile, key: str) -> Any:
    """Returns the array of the volume, of which every value is there."""
    path = file.path
    volume = file.find(key)
    assert volume is not None, "it was looked for"
    if volume.ndim != 4 or 0 in volume.shape:
        raise DataError(
            f"{path}: {key!r} has shape {volume.shape}; needs three spatial dims and channels\n"
            f"    for others set data.keys.volume={key} and data.keys.targets ({files.OWN_DATA}, "
            "arrays)"
        )
    if volume.dtype.name not in DTYPES:
        raise DataError(
            f"{path}: {key!r} is {volume.dtype}; needs one of {', '.join(DTYPES)}\n    others are "
            f"read with data.keys.volume={key} and data.keys.targets ({files.OWN_DATA}, arrays)"
        )
    file.check_volume(key, volume)
    return volume


def _labels(
    file: KeyedFile, volume: Any, channels: Channels | None
) -> tuple[StoredArray, tuple[str, ...]]:
    """Finds the labels of a scan's voxels, and the names of the classes, background first."""
    path = file.path
    key = targets.SCAN_KEYS[1]
    array: Any = file.find(key)
    if channels == "last":
        raise DataError(f"{path}: in files with 'volume' and 'segmentation' channels come first")
    fits = array.ndim == 4 and array.shape[0] in (1, volume.shape[0])
    if not fits or array.shape[1:] != volume.shape[1:]:
        raise DataError(
            f"{path}: 'segmentation' has shape {array.shape} but 'volume' has {volume.shape}"
        )
    if array.dtype.kind not in "iuf":
        raise DataError(f"{path}: 'segmentation' is {array.dtype}; needs numbers")
    file.check_volume(key, array, labels=True)
    labels = StoredArray(key, tuple(array.shape), array.dtype.name)
    if "classes" not in file.attrs:
        return labels, targets.LIVER
    raw = np.atleast_1d(file.attrs["classes"]).tolist()
    names = tuple(printable(_text(word)) for word in raw)
    targets.check_class_names(names, f"{path}: the names in its attribute 'classes'")
    return labels, names


def _text(word: Any) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)


def _vector(path: Path, key: str, dataset: Any) -> tuple[float, ...]:
    if dataset.ndim != 1:
        raise DataError(f"{path}: {key!r} has shape {dataset.shape}; needs a vector of numbers")
    return tuple(targets.as_numbers(dataset[()], f"{path}: {key!r}").tolist())


def storage_order(path: Path, key: str, channels: Channels, lbann: bool | None) -> StorageOrder:
    """Finds the order of the dims of a volume; ``lbann`` says if it is LBANN's, or is found out."""
    if lbann and channels == "last":
        raise DataError(f'{path}: stores channels last, which LBANN\'s do not; use format="hdf5"')
    if lbann is None:
        named = LBANN_PART_NAME.fullmatch(path.stem) is not None
        lbann = key == "full" and channels == "first" and named
    if lbann:
        return LBANN_ORDER
    return DHWC if channels == "last" else CDHW


def lbann_of(format: str | None) -> bool | None:
    """Tells by the format asked for if spatial dims are reversed; None where it does not."""
    return {"lbann": True, "hdf5": False}.get(format or "")


def _names(file: KeyedFile, target: str, count: int) -> tuple[str, ...]:
    """Reads the file's own names (bytes or text, may be padded); else takes the documented ones."""
    stored = file.small("namePar")
    if stored is not None and stored.shape == (count,):
        names = tuple(printable(_text(word).strip("\0 ")) for word in stored[()])
        if len({*names, ""}) == count + 1:  # all different and none empty
            return names
    return universe_names(count) if target == "unitPar" else numbered_names(count)


def _redshifts(stored: Any, channels: int) -> tuple[float, ...]:
    """Reads the redshifts of the channels; none where a file has none."""
    if stored is None or stored.shape != (channels,) or stored.dtype.kind not in "fiu":
        return ()
    values = np.asarray(stored[()], np.float64)
    return tuple(values.tolist()) if np.isfinite(values).all() else ()


def _physical(file: KeyedFile, count: int) -> tuple[float, ...] | None:
    stored = file.small("physPar")
    if stored is None:
        return None
    values = _vector(file.path, "physPar", stored)
    if len(values) != count:
        raise DataError(
            f"{file.path}: 'physPar' has {len(values)} values but there are {count} targets"
        )
    return values


def scan_layouts(
    folder: Path, options: ScanOptions, suffixes: Sequence[str] = HDF5_SUFFIXES
) -> Catalog:
    """Lists a folder and its sub-folders and checks the header of every HDF5 file or Zarr group.

    All have to be stored like the first one.
    """
    reach = files.FileAccess(folder, options.allowed)

    def read(path: str) -> FileHeader:
        return read_header(Path(path), options, reach)

    def alike(first: tuple[str, FileHeader], entry: tuple[str, FileHeader]) -> None:
        files.check_alike(folder / entry[0], entry[1].alike(), first[0], first[1].alike())
        here, there = entry[1].redshifts, first[1].redshifts
        if here != there and sorted(here) == sorted(there):
            raise DataError(
                f"{folder / entry[0]}: its channels have the redshifts {list(here)}, those of "
                f"{first[0]} {list(there)}; all files of a data set are stored alike"
            )

    names = files.list_files(folder, suffixes)
    refuse, own = options.refuse, options.own
    kept = (reach, FileHeader, (options.channels, options.format))
    found, stamps = scan_headers(folder, names, KEYS_OF_LAYOUTS, read, refuse, alike, kept, own=own)
    return catalog_of(folder, found, stamps, options.allowed)


def catalog_of(
    folder: Path,
    found: Sequence[tuple[str, FileHeader]],
    stamps: Mapping[str, files.Stamp],
    allowed: files.AccessPolicy,
) -> Catalog:
    """Catalogues files of one layout, of which each is a sample and named after its path."""
    headers = [header for _, header in found]
    one = headers[0]
    return Catalog(
        folder=folder,
        files=tuple(file for file, _ in found),
        volumes=(one.volume,) * len(found),
        names=tuple(file.rpartition(".")[0] for file, _ in found),
        stamps=stamps,
        order=one.order,
        targets=np.array([header.unit for header in headers]),
        parameters=_parameters(headers),
        labels=() if one.labels is None else (one.labels,) * len(found),
        classes=one.classes,
        redshifts=one.redshifts if len({header.redshifts for header in headers}) == 1 else (),
        allowed=allowed,
    )


def _parameters(headers: Sequence[FileHeader]) -> Parameters:
    names = headers[0].names
    physical = [header.physical for header in headers if header.physical is not None]
    if len(physical) < len(headers):
        return Parameters.normalised(names)
    unit = np.array([header.unit for header in headers])
    drawn = {header.ranges for header in headers}
    ranges = ranges_in(drawn.pop()) if len(drawn) == 1 else {}
    if tuple(ranges) == names:
        within = Parameters.within(ranges, unit, np.array(physical))
        if within.misfit < EXACT_LINE:
            return within
    return Parameters.fit(names, unit, np.array(physical))


Ranges = dict[str, tuple[float, float]]

CAMELS = re.compile(r"Grids_[A-Za-z]+_(?P<suite>\w+)_(?P<set>[A-Za-z0-9]+)_\d+_z=[\d.]+\.npy")
CAMELS_PRIORS: Ranges = {
    "Omega_m": (0.1, 0.5),
    "sigma_8": (0.6, 1.0),
    "A_SN1": (0.25, 4.0),
    "A_AGN1": (0.25, 4.0),
    "A_SN2": (0.5, 2.0),
    "A_AGN2": (0.5, 2.0),
}

QUIJOTE_FIELD = re.compile(r"df_\w+_z=[\d.]+\.npy")
QUIJOTE_REALISATION = re.compile(r"(NCV_)?\d+")
QUIJOTE_TABLES = ("latin_hypercube*params.txt", "BSQ_params.txt")
QUIJOTE_PRIORS: Ranges = {
    "Omega_m": (0.1, 0.5),
    "Omega_b": (0.03, 0.07),
    "h": (0.5, 0.9),
    "n_s": (0.8, 1.2),
    "sigma_8": (0.6, 1.0),
}

NAMES_LOOKED_AT = 64
"""Entries of a folder that tell what it is."""


@dataclass(frozen=True, slots=True)
class Published:
    """Describes a published data set: its volumes, the table of their targets, and priors."""

    name: str
    pattern: str
    table: Path | None
    priors: Ranges
    parameters: int | None = None  # columns that say something, where it is not all of them
    stacked: bool = False  # an array holds many volumes


def recognise_published(path: Path) -> Published | None:
    """Recognises the data set that a folder, or the file of one, is; None where it is not known."""
    if path.is_file():
        return _camels(path.parent, [path.name])
    if not path.is_dir():
        return None
    entries = sorted(entry.name for entry in itertools.islice(path.iterdir(), NAMES_LOOKED_AT))
    return _camels(path, entries) or _quijote(path, entries)


def _camels(folder: Path, entries: list[str]) -> Published | None:
    found = [match for match in map(CAMELS.fullmatch, entries) if match]
    if not found:
        return None
    pattern = found[0][0] if len(entries) == 1 else "Grids_*.npy"
    suite = found[0]["suite"]
    gravity_only = suite.startswith("Nbody")
    # N-body simulations have the table of the suite that they match.
    suites = [suite, "Nbody", suite.removeprefix("Nbody_")] if gravity_only else [suite]
    tables = [folder / f"params_{found[0]['set']}_{suite}.txt" for suite in suites]
    table = next((table for table in tables if table.is_file()), None)
    parameters = 2 if gravity_only else None
    return Published("CAMELS", pattern, table, CAMELS_PRIORS, parameters, stacked=True)


def _quijote(folder: Path, entries: list[str]) -> Published | None:
    for entry in filter(QUIJOTE_REALISATION.fullmatch, entries):
        inside = folder / entry
        if not inside.is_dir():
            continue
        fields = [file.name for file in itertools.islice(inside.iterdir(), NAMES_LOOKED_AT)]
        if any(map(QUIJOTE_FIELD.fullmatch, fields)):
            return Published("Quijote", "*/df_*.npy", _quijote_table(folder), QUIJOTE_PRIORS)
    return None


def _quijote_table(folder: Path) -> Path | None:
    for place in (folder, folder.parent):
        found = sorted(file for pattern in QUIJOTE_TABLES for file in place.glob(pattern))
        if len(found) == 1:
            return found[0]
    return None
