"""Knows published layouts: the keys of HDF5 and Zarr files, and the names of CAMELS and Quijote.

Three layouts are known by their keys: the public CosmoFlow files (``full``, ``unitPar``, and
``physPar``, ``namePar``, ``redshifts``, of which the last three may be absent), the benchmark's
(``x``, ``y``), and scans with a class for every voxel (``volume``, ``segmentation``, see
`formats.targets`). In the first two the volume is (D, H, W, C) or (C, D, H, W).

LBANN's splitter transposes the whole cube, so that its files ``{base}_{ix}_{iy}_{iz}.hdf5`` hold
``full`` as (C, W, H, D): channels first, the spatial dims reversed. By that key, order and name
they are known; `StorageLayout.reversed` says so. The three numbers count along the dims of the
file: ix along W, iz along D.

The attribute ``channels``, "first" or "last", which `hyperslab convert` writes, says where the
channels of the first two are; else the shape tells, or the user does.

Two data sets are known by the names of their files. CAMELS: the Multifield Dataset's 3D grids,
https://camels-multifield-dataset.readthedocs.io (Villaescusa-Navarro et al. 2021,
arXiv:2109.10915). Quijote: its latin hypercubes and density fields,
https://quijote-simulations.readthedocs.io (Villaescusa-Navarro et al. 2020, arXiv:1909.05273).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats import targets
from hyperslab.formats.arrays.open import (
    Catalog,
    KeyedFile,
    StoredArray,
    kind_of_file,
    open_keyed,
    scan_headers,
)
from hyperslab.formats.files import AccessPolicy, FileAccess, Stamp, list_files, naming, sift
from hyperslab.formats.source import OWN_DATA, ScanOptions
from hyperslab.formats.storage import HDF5_SIEVE, Storage
from hyperslab.formats.storage_order import (
    CDHW,
    DHWC,
    DTYPES,
    LBANN_ORDER,
    Channels,
    StorageOrder,
    channel_order,
)
from hyperslab.formats.targets import Floats, Parameters, numbered_names, ranges_in, universe_names

LBANN_PART_NAME = re.compile(r"(.+)_(\d+)_(\d+)_(\d+)")
"""The name of a sub-volume of LBANN's: the cube's, and the place along width, height and depth."""

LAYOUT_KEYS = (("full", "unitPar"), ("x", "y"), targets.SCAN_KEYS)


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """Describes how the volumes of a data set are stored: equal in all of its files."""

    key: str
    stored: tuple[int, ...]  # the shape in the file
    dtype: str
    order: StorageOrder
    names: tuple[str, ...] = ()  # of the targets
    classes: tuple[str, ...] = ()
    label_shape: tuple[int, ...] = ()  # in the file
    label_dtype: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the volume's shape (C, D, H, W)."""
        return self.order.volume_shape(self.stored)

    @property
    def channels(self) -> Channels:
        """The place of the channels in the file."""
        return "first" if self.order.dims.startswith("C") else "last"

    @property
    def reversed(self) -> bool:
        """Tells if the spatial dims in the file are (W, H, D)."""
        return self.order == LBANN_ORDER


@dataclass(frozen=True, slots=True)
class KeyedHeader:
    layout: StorageLayout
    unit: tuple[float, ...]
    physical: tuple[float, ...] | None
    redshifts: tuple[float, ...] = ()  # of the channels, where the file says them
    ranges: str = ""  # of the parameters, as `hyperslab simulate` notes them


def read_header(
    path: Path,
    channels: Channels | None,
    lbann: bool | None = None,
    reach: FileAccess | None = None,
) -> KeyedHeader:
    """Opens a file, checks it, and reads everything but the volume.

    ``lbann`` says whether the spatial dims are reversed as LBANN's splitter does it; ``None`` finds
    it out. ``reach``: the files that it may refer to, by default those beside it.

    Raises:
        DataError: the file is truncated, foreign, lacks a key, or a key has a wrong shape, dtype
            or value; was never written or would be read from elsewhere, see `hdf5_storage`; or
            ``channels`` is ``None`` and the order is not clear from the shape.
    """
    reach = FileAccess(path.parent) if reach is None else reach
    with naming(path, kind_of_file(path)), open_keyed(path, reach) as file:
        key, target = _keys(path, file)
        volume = _volume(file, key)
        if target == targets.SCAN_KEYS[1]:
            return KeyedHeader(_labelled(path, file, volume, channels), (), None)
        unit = _vector(path, target, file.small(target))
        redshift = file.small("redshifts")
        count = -1 if redshift is None else redshift.size
        said = _said(file)
        if channels and said and channels != said:
            raise DataError(f'{path}: says that its channels come {said}; do not say "{channels}"')
        order = channels or said or channel_order(path, volume.shape, count)
        layout = StorageLayout(
            key,
            volume.shape,
            volume.dtype.name,
            storage_order(path, key, order, lbann),
            _names(file, target, len(unit)),
        )
        redshifts = redshifts_in(file, layout.shape[0])
        ranges = str(file.attrs.get("ranges", ""))
        return KeyedHeader(layout, unit, _physical(path, file, len(unit)), redshifts, ranges)


def _keys(path: Path, file: KeyedFile) -> tuple[str, str]:
    for key, target in LAYOUT_KEYS:
        if not file.has(key):
            continue
        for name in (key, target):
            if file.find(name) is None:  # missing, or a group
                raise DataError(f"{path}: has {key!r} but no data set {name!r}")
        return key, target
    known = " or ".join(f"{key!r} and {target!r}" for key, target in LAYOUT_KEYS)
    raise DataError(
        f"{path}: not a known layout: needs {known}, has {file.keys()}\n    other keys are set in "
        f"a recipe: data.keys: {{volume: grid/delta, targets: Header@Omega0}} ({OWN_DATA}, keys)"
    )


def _volume(file: KeyedFile, key: str) -> Any:
    """Returns the array of the volume, of which every value is there."""
    path = file.path
    volume = file.find(key)
    assert volume is not None, "it was looked for"
    if volume.ndim != 4 or 0 in volume.shape:
        raise DataError(
            f"{path}: {key!r} has shape {volume.shape}; needs three spatial dims and channels\n"
            f"    for others set data.keys.volume={key} and data.keys.targets ({OWN_DATA}, arrays)"
        )
    if volume.dtype.name not in DTYPES:
        raise DataError(
            f"{path}: {key!r} is {volume.dtype}; needs one of {', '.join(DTYPES)}\n    others are "
            f"read with data.keys.volume={key} and data.keys.targets ({OWN_DATA}, arrays)"
        )
    file.check_volume(key, volume)
    return volume


def _said(file: KeyedFile) -> Channels | None:
    """Reads the place of the channels, if the file itself says it."""
    said = file.attrs.get("channels")
    return next((order for order in get_args(Channels) if str(said) == order), None)


def _labelled(path: Path, file: KeyedFile, volume: Any, channels: Channels | None) -> StorageLayout:
    segmentation: Any = file.find(targets.SCAN_KEYS[1])
    if channels == "last":
        raise DataError(f"{path}: in files with 'volume' and 'segmentation' channels come first")
    targets.check_segmentation(str(path), volume, segmentation)
    file.check_labels(targets.SCAN_KEYS[1], segmentation)
    return StorageLayout(
        targets.SCAN_KEYS[0],
        volume.shape,
        volume.dtype.name,
        CDHW,
        classes=targets.classes_of(str(path), file),
        label_shape=segmentation.shape,
        label_dtype=segmentation.dtype.name,
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


def storage_order(path: Path, key: str, channels: Channels, lbann: bool | None) -> StorageOrder:
    """Finds the order of the dims of a volume; ``lbann`` says if it is LBANN's, or is found out.

    Raises:
        DataError: it is said of a file with channels last.
    """
    if lbann and channels == "last":
        raise DataError(f'{path}: stores channels last, which LBANN\'s do not; say format="hdf5"')
    if lbann is None:
        named = LBANN_PART_NAME.fullmatch(path.stem) is not None
        lbann = key == "full" and channels == "first" and named
    if lbann:
        return LBANN_ORDER
    return DHWC if channels == "last" else CDHW


def lbann_of(format: str | None) -> bool | None:
    """Tells by the format that was asked for if HDF5 files have reversed spatial dims."""
    return None if format is None else format == "lbann"


def read_volume_header(
    path: Path,
    like: tuple[int, ...],
    channels: Channels | None,
    lbann: bool | None,
    reach: FileAccess | None = None,
) -> tuple[StorageLayout, Any, tuple[float, ...]]:
    """Reads how the volume of a file is stored, its affine or ``None``, and its redshifts.

    The file need not have a target.
    Where ``channels`` is ``None`` and the file is no scan, they are last if that gives the shape
    ``like`` (C, D, H, W).

    Raises:
        DataError: the file is foreign or truncated, or its volume is none.
    """
    reach = FileAccess(path.parent) if reach is None else reach
    with naming(path, kind_of_file(path)), open_keyed(path, reach) as file:
        known = [key for key, _ in LAYOUT_KEYS]
        key = next((key for key in known if file.find(key) is not None), None)
        if key is None:
            raise DataError(f"{path}: has none of the data sets {', '.join(known)}")
        volume = _volume(file, key)
        scan = key == targets.SCAN_KEYS[0]
        last = tuple(volume.shape) != like and DHWC.volume_shape(volume.shape) == like
        found: Channels = "last" if last else "first"
        order = storage_order(path, key, "first" if scan else channels or found, lbann)
        affine = file.attrs.get("affine") if scan else None
        layout = StorageLayout(key, volume.shape, volume.dtype.name, order)
        return layout, affine, redshifts_in(file, layout.shape[0])


def storage_in(path: Path, key: str, order: StorageOrder, reach: FileAccess) -> Storage:
    """Describes how the volume under a key lies in a file.

    Raises:
        DataError: the file cannot be read.
    """
    with naming(path, kind_of_file(path)), open_keyed(path, reach) as file:
        stored: Any = file.find(key)
        plain = Storage(order, stored.shape, stored.dtype.itemsize, stored.nbytes)
        if file.zarr:
            word = ", ".join(type(codec).__name__ for codec in stored.compressors)
            chunk = tuple(stored.chunks)
            return replace(plain, size=stored.nbytes_stored(), chunk=chunk, compression=word)
        words = [stored.compression, "fletcher32" if stored.fletcher32 else None]
        word = ", ".join(filter(None, words))
        size = stored.id.get_storage_size() or stored.nbytes  # a virtual data set has none
        return replace(plain, size=size, chunk=stored.chunks, compression=word, buffer=HDF5_SIEVE)


def _names(file: KeyedFile, target: str, count: int) -> tuple[str, ...]:
    """Reads the file's own names (bytes or text, may be padded); else takes the documented ones."""
    stored = file.small("namePar")
    if stored is not None and stored.shape == (count,):
        raw = stored[()]
        text = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in raw]
        names = tuple(printable(v.strip("\0 ")) for v in text)
        if len({*names, ""}) == count + 1:  # all different and none empty
            return names
    return universe_names(count) if target == "unitPar" else numbered_names(count)


def redshifts_in(file: KeyedFile, channels: int) -> tuple[float, ...]:
    """Reads the redshifts of the channels of an open file or group; none where it has none."""
    stored = file.small("redshifts")
    if stored is None or stored.shape != (channels,) or stored.dtype.kind not in "fiu":
        return ()
    values = np.asarray(stored[()], np.float64)
    return tuple(values.tolist()) if np.isfinite(values).all() else ()


def _physical(path: Path, file: KeyedFile, count: int) -> tuple[float, ...] | None:
    stored = file.small("physPar")
    if stored is None:
        return None
    values = _vector(path, "physPar", stored)
    if len(values) != count:
        raise DataError(f"{path}: 'physPar' has {len(values)} values but there are {count} targets")
    return values


HDF5_SUFFIXES = (".hdf5", ".h5")

KEYS_OF_LAYOUTS = tuple(key for pair in LAYOUT_KEYS for key in pair)

EXACT_LINE = 1e-9
"""The share of a parameter by which it may be off the ranges that its file notes."""

ALIKE_HEADERS = (
    "key",
    "stored",
    "dtype",
    "channels",
    "names",
    "classes",
    "label_shape",
    "label_dtype",
    "reversed",
)
"""Fields of a `StorageLayout` that an error names."""


def scan_layouts(
    folder: Path,
    options: ScanOptions,
    lbann: bool | None = None,
    suffixes: Sequence[str] = HDF5_SUFFIXES,
) -> Catalog:
    """Lists a folder and its sub-folders and checks the header of every HDF5 file or Zarr group.

    ``lbann``: whether the spatial dims are stored reversed; ``None`` finds it out.

    Raises:
        DataError: the folder is missing or holds no file, a file is not what it should be,
            or a file is not stored like the first one.
    """
    reach = FileAccess(folder, options.allowed)

    def read(path: str) -> KeyedHeader:
        return read_header(Path(path), options.channels, lbann, reach)

    files = list_files(folder, suffixes)
    found, stamps = scan_headers(folder, files, KEYS_OF_LAYOUTS, read, options.refuse)
    first, one = found[0]

    def alike(entry: tuple[str, KeyedHeader]) -> None:
        _check_layouts_alike(folder, first, one.layout, entry[0], entry[1].layout)

    found = [entry for entry, _ in sift(found, alike, options.refuse)]
    headers = [header for _, header in found]
    said = {header.redshifts for header in headers}
    return catalog_of_layout(
        folder,
        tuple(file for file, _ in found),
        one.layout,
        stamps,
        unit=np.array([header.unit for header in headers]),
        parameters=_parameters(headers),
        redshifts=one.redshifts if len(said) == 1 else (),
        allowed=options.allowed,
    )


def catalog_of_layout(
    folder: Path,
    files: tuple[str, ...],
    layout: StorageLayout,
    stamps: Mapping[str, Stamp],
    *,
    unit: Floats,
    parameters: Parameters,
    redshifts: tuple[float, ...],
    allowed: AccessPolicy,
) -> Catalog:
    """Catalogues files of one layout, of which each is a sample and named after its path."""
    volume = StoredArray(layout.key, layout.stored, layout.dtype)
    labels = StoredArray(targets.SCAN_KEYS[1], layout.label_shape, layout.label_dtype)
    return Catalog(
        folder=folder,
        files=files,
        volumes=(volume,) * len(files),
        places=tuple((number, None) for number in range(len(files))),
        names=tuple(file.rpartition(".")[0] for file in files),
        stamps=stamps,
        order=layout.order,
        targets=unit,
        parameters=parameters,
        labels=(labels,) * len(files) if layout.classes else (),
        classes=layout.classes,
        redshifts=redshifts,
        allowed=allowed,
    )


def _check_layouts_alike(
    folder: Path, first: str, one: StorageLayout, file: str, other: StorageLayout
) -> None:
    for word in ALIKE_HEADERS:
        ours = getattr(one, word)
        theirs = getattr(other, word)
        if ours != theirs:
            raise DataError(
                f"{folder / file}: {word} is {theirs} but {ours} in {first}; "
                "all files of a data set are stored alike"
            )


def _parameters(headers: Sequence[KeyedHeader]) -> Parameters:
    names = headers[0].layout.names
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
    """Describes a published data set: the ``pattern`` of its volumes, its ``table`` and ``priors``.

    ``parameters``: how many of the columns say something, where it is not all of them.
    ``stacked``: an array holds many volumes.
    """

    name: str
    pattern: str
    table: Path | None
    priors: Ranges
    parameters: int | None = None
    stacked: bool = False


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
    gravity_only = found[0]["suite"].startswith("Nbody")
    tables = [
        folder / f"params_{found[0]['set']}_{suite}.txt" for suite in _suites(found[0]["suite"])
    ]
    table = next((table for table in tables if table.is_file()), None)
    parameters = 2 if gravity_only else None
    return Published("CAMELS", pattern, table, CAMELS_PRIORS, parameters, stacked=True)


def _suites(suite: str) -> Iterator[str]:
    """Lists the suites of tables: N-body simulations have those of the suite that they match."""
    yield suite
    if suite.startswith("Nbody"):
        yield "Nbody"
        yield suite.removeprefix("Nbody_")


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
