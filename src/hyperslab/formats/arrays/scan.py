"""Scans folders of arrays: lists their files, looks at every header, and finds the targets.

`scan_npy` takes numpy's files with a table of targets beside them; `scan_arrays` follows a
`DataMap`, where the shapes tell which dims of stored arrays count samples, channels and voxels.
Labels are arrays of classes in the same files as the volumes, under a key of their own.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays.layouts import recognise_published
from hyperslab.formats.arrays.open import (
    ARRAY_SUFFIXES,
    Catalog,
    StoredArray,
    find_array,
    kind_of_file,
    read_numbers,
    scan_headers,
    stamps_of,
)
from hyperslab.formats.arrays.table import (
    TARGET_SUFFIX,
    TARGETS_FILE,
    TargetTable,
    map_targets,
    npy_targets,
    read_target_table,
)
from hyperslab.formats.files import (
    ANY,
    FIELDS_AS_TARGETS,
    OF_LIBRARIES,
    OWN_DATA,
    DataMap,
    FileAccess,
    Stamp,
    check_names,
    list_files,
    naming,
    table_file,
    walk_folder,
)
from hyperslab.formats.source import Array, ScanOptions
from hyperslab.formats.storage_order import (
    CDHW,
    DHW,
    DHWC,
    DTYPES,
    Channels,
    StorageOrder,
    channel_order,
)
from hyperslab.formats.targets import Parameters

AS_VOLUME = "\n    store images as volumes of depth 1: (C, 1, H, W), and their labels as (1, H, W)"


def scan_npy(folder: Path, suffixes: Sequence[str], options: ScanOptions) -> Catalog:
    """Lists a folder of .npy files, ``{name}.npy`` a sample, and reads their targets.

    Volumes are (C, D, H, W), (D, H, W, C) or, of one channel, (D, H, W).

    Raises:
        DataError: the folder is missing or holds no volume; a file is damaged, or not stored like
            the first; or a target is missing or there are two.
    """
    reach = FileAccess(folder, options.allowed)
    files = [file for file in list_files(folder, suffixes) if not file.endswith(TARGET_SUFFIX)]
    if not files:
        raise DataError(f"{folder}: holds targets *{TARGET_SUFFIX} but no volume")

    def read(path: str) -> StoredArray:
        with naming(path, "npy"):
            array = find_array(Path(path), "", reach)
        dtype = np.dtype(array.dtype)
        if len(array.shape) not in (3, 4) or 0 in array.shape or dtype.name not in DTYPES:
            raise DataError(
                f"{path}: is {dtype} {array.shape}; needs three spatial dims, with or without "
                f"channels, of {', '.join(DTYPES)}\n    many volumes in one array, and other "
                f"types, go with data.table ({OWN_DATA}, arrays)"
            )
        return array

    def alike(first: tuple[str, StoredArray], entry: tuple[str, StoredArray]) -> None:
        _check_alike(folder, (first[0], entry[0]), (first[1], entry[1]))

    headers = (reach, StoredArray, ())
    found, stamps = scan_headers(folder, files, (), read, options.refuse, alike, headers)
    first, one = found[0]
    order = order_of_volume(folder / first, one.shape, options.channels)
    volumes = dict(found)
    bare = tuple(file.removesuffix(".npy") for file in volumes)
    names, targets, parameters = npy_targets(folder, bare, options.refuse)
    kept = tuple(f"{name}.npy" for name in names)
    table = folder / TARGETS_FILE
    return Catalog(
        folder=folder,
        files=kept,
        volumes=tuple(volumes[file] for file in kept),
        names=names,
        stamps=stamps,
        order=order,
        targets=targets,
        parameters=Parameters.normalised(parameters),
        table=table if table.exists() else None,
    )


def order_of_volume(path: Path, shape: tuple[int, ...], channels: Channels | None) -> StorageOrder:
    """Orders the dims of one volume, which may have channels, by its shape or as it is said."""
    if len(shape) == 3:
        return DHW
    return DHWC if (channels or channel_order(path, shape)) == "last" else CDHW


def order_of_arrays(
    folder: Path,
    found: Sequence[tuple[str, _MappedHeader]],
    table: TargetTable | None,
    channels: Channels | None,
    sure: bool,
    *,
    known_rows: bool,
) -> tuple[bool, StorageOrder]:
    """Decides if the first dim counts samples, ``sure`` if it does, and what the others are.

    With ``known_rows`` no table has to say so; else it has to have as many rows.
    """
    path = folder / found[0][0]
    first = found[0][1].array
    shape = first.shape
    if len(shape) not in (3, 4, 5) or 0 in shape:
        raise DataError(
            f"{path}: the array is {first.dtype} {shape}; needs (D, H, W), (C, D, H, W), "
            f"(N, D, H, W) or (N, C, D, H, W) ({OWN_DATA}, arrays)" + AS_VOLUME * (len(shape) == 2)
        )
    if table is not None:
        rows = len(table.values)
        counted = not table.names
    else:
        beside = [header.targets[0] for _, header in found if header.numbers]
        rows = sum(len(numbers) for numbers in beside if numbers.ndim)
        counted = bool(beside) and beside[0].ndim > 0
    # As many rows as there are along the first dim: it counts samples.
    stack = counted and rows == sum(header.array.shape[0] for _, header in found) != len(found)
    many = len(shape) == 5 or (len(shape) == 4 and (sure or (stack and not known_rows)))
    alone = len(found) == 1 and not known_rows
    if len(shape) == 4 and not many and alone and (rows != 1 or channels is None):
        raise DataError(
            f"{path}: is {first.dtype} {shape}, but {table.path if table else 'targets'} "
            f"{'has' if table else 'have'} {rows} rows: an array of many volumes needs one for "
            f"each ({OWN_DATA}, arrays)"
        )
    return many, order_of_volume(path, shape[1:] if many else shape, channels)


def check_labels(
    folder: Path,
    files: Sequence[str],
    labels: Sequence[StoredArray],
    extents: tuple[int, ...],
    rows: Sequence[int | None],
) -> None:
    """Compares labels with the extents (D, H, W) of volumes; ``rows``: of each file's array."""
    for file, array, count in zip(files, labels, rows, strict=True):
        wanted = extents if count is None else (count, *extents)
        shape = array.shape
        if count is None and len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]  # one channel of labels
        if shape != wanted or np.dtype(array.dtype).kind not in "iub":
            raise DataError(
                f"{folder / file}: the labels {array.key!r} are {array.dtype} {array.shape}; needs "
                f"whole numbers {wanted}, one for each voxel of the volume ({OWN_DATA}, keys)"
                + AS_VOLUME * (len(shape) == 2)
                + f"\n    {FIELDS_AS_TARGETS}"
            )


SHOWN_AS = {
    "int8": "int16",
    "uint8": "int16",
    "int16": "int16",
    "uint16": "uint16",
} | dict.fromkeys(("int32", "uint32", "int64", "float16", "float32", "float64"), "float32")
"""Types of stored values, and as what they are kept."""


def scan_arrays(
    path: Path, options: ScanOptions, channels: Collection[int] | None = None
) -> Catalog:
    """Looks at every file. With ``channels``, of a network, there are no targets to look for.

    Of arrays of four dims, one of which is as many as ``channels`` has, that one is of channels.

    Raises:
        DataError: a file, a key or the table is not what it should be, or they do not go together.
    """
    said = options.mapping or DataMap()
    known = recognise_published(path)
    folder = path.parent if is_one_file(path) else path
    bare = channels is not None or bool(said.labels)
    table_path = None
    if said.table is not None and not bare:
        table_path = table_file(folder, said.table)
    elif known is not None and not (bare or said.targets):
        table_path = known.table
    found, stamps = _headers_of_map(folder, files_of_volumes(path, said, table_path), said, options)
    files = [file for file, _ in found]
    arrays = [header.array for _, header in found]
    labels = [header.labels for _, header in found if header.labels is not None]
    table = None if table_path is None else read_target_table(table_path)
    beside = [header.targets for _, header in found]
    sure = known is not None and known.stacked
    if labels:
        shape = arrays[0].shape
        rows = len(shape) == 5 or labels[0].shape[:1] == shape[:1] != (1,)
        sure = rows and len(labels[0].shape) == 4
    if channels is not None and len(arrays[0].shape) == 4:
        sure = not {arrays[0].shape[0], arrays[0].shape[-1]}.intersection(channels)
    stacked, order = order_of_arrays(folder, found, table, options.channels, sure, known_rows=bare)
    _check_alike(folder, files, arrays, stacked)
    if np.dtype(arrays[0].dtype).name not in SHOWN_AS:
        raise DataError(
            f"{folder / files[0]}: is {np.dtype(arrays[0].dtype)}; volumes are of one of "
            f"{', '.join(SHOWN_AS)} ({OWN_DATA}, arrays)"
        )
    places = [
        (number, row)
        for number, array in enumerate(arrays)
        for row in (range(array.shape[0]) if stacked else (None,))
    ]
    names = _names(files, places, arrays)
    if labels:
        counts = [array.shape[0] if stacked else None for array in arrays]
        extents = order.volume_shape(arrays[0].shape[int(stacked) :])[1:]
        check_labels(folder, files, labels, extents, counts)
    words = f"classes {', '.join(map(printable, said.classes))}"
    targets, parameters = np.zeros((len(names), 0)), Parameters.normalised(())
    if not bare:
        found_targets = map_targets(folder, names, places, table, beside, said, known)
        targets, parameters, words = found_targets
    return Catalog(
        folder=folder,
        files=tuple(files[number] for number, _ in places),
        volumes=tuple(arrays[number] for number, _ in places),
        stamps=stamps,
        names=names,
        order=order,
        targets=targets,
        parameters=parameters,
        table=table_path,
        allowed=options.allowed,
        remark=f"{path}: {'' if known is None else known.name + ', '}{len(names)} samples, {words}",
        rows=tuple(row for _, row in places if row is not None),
        labels=tuple(labels[number] for number, _ in places) if labels else (),
        classes=said.classes,
    )


@dataclass(frozen=True, slots=True)
class _MappedHeader:
    """The arrays that a `DataMap` finds in a file; the numbers are targets, as nested lists."""

    array: StoredArray
    numbers: list[Any]
    labels: StoredArray | None

    @property
    def targets(self) -> list[Array]:
        return [np.asarray(numbers, np.float64) for numbers in self.numbers]


def _headers_of_map(
    folder: Path, files: Sequence[str], said: DataMap, options: ScanOptions
) -> tuple[list[tuple[str, _MappedHeader]], dict[str, Stamp]]:
    """Looks at the files that are as they should be; and stamps them."""
    reach = FileAccess(folder, options.allowed)

    def read(name: str) -> _MappedHeader:
        file = Path(name)
        kind = kind_of_file(file)
        with naming(file, kind, ANY if kind == "npz" else OF_LIBRARIES):
            return _MappedHeader(
                find_array(file, said.volume, reach),
                [array.tolist() for array in read_numbers(file, said.targets, reach)],
                find_array(file, said.labels, reach) if said.labels else None,
            )

    keys = [key for key in (said.volume, said.labels) if key]
    kept = (reach, _MappedHeader, (said.volume, said.labels, said.targets))
    found, stamps = scan_headers(folder, files, keys, read, options.refuse, kept=kept)
    if not said.volume:  # a Zarr group has said only now which array it is
        for file, header in found:
            stamps.update(stamps_of(folder, file, [header.array.key]))
    return found, stamps


def is_one_file(path: Path) -> bool:
    """Tells if a path is a file or a Zarr group, not a folder of them."""
    return path.is_file() or (path.suffix == ".zarr" and path.is_dir())


def files_of_volumes(path: Path, said: DataMap, table: Path | None = None) -> list[str]:
    """Names the files with volumes of a folder, in their natural order; or the one file.

    ``table`` is left out. Of fields of several kinds one has to be chosen.
    """
    if is_one_file(path) and not said.files and path.name.endswith(ARRAY_SUFFIXES):
        return [path.name]
    known = recognise_published(path)
    folder = path.parent if is_one_file(path) else path
    pattern = said.files or (path.name if is_one_file(path) else known.pattern if known else "")
    files = _files(folder, pattern, table)
    kinds = sorted({file.rpartition("/")[2] for file in files})
    if known is not None and not said.files and len(kinds) > 1:
        shown = ", ".join(map(printable, kinds[:20])) + (", ..." if len(kinds) > 20 else "")
        deep = "*/" if "/" in files[0] else ""
        raise DataError(
            f"{folder}: {known.name} with {len(kinds)} kinds of files: {shown}\n    choose one: "
            f'data.files="{deep}{kinds[0]}"'
        )
    return files


def files_matching(folder: Path, pattern: str) -> list[str]:
    """Names the files of arrays in a folder and below that a pattern takes; without one, all."""
    return [
        name
        for name in walk_folder(folder)
        if name.endswith(ARRAY_SUFFIXES) and (not pattern or fnmatch.fnmatchcase(name, pattern))
    ]


def _files(folder: Path, pattern: str, table: Path | None) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; give the folder or the file that holds the data")
    files = [
        name for name in files_matching(folder, pattern) if table is None or folder / name != table
    ]
    if not files:
        wanted = pattern or "file " + ", ".join(f"*{suffix}" for suffix in ARRAY_SUFFIXES)
        raise DataError(
            f"{folder}: holds no {wanted}\n"
            "    data.files is a pattern of the files with volumes, relative to the folder "
            f"({OWN_DATA})"
        )
    check_names(folder, files)
    return sorted(files, key=_natural)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by value: realisation 2 comes before 10.

    >>> sorted(["10/a", "2/a", "b"], key=_natural)
    ['2/a', '10/a', 'b']
    """
    parts = re.split(r"(\d+)", name)
    return [(0, int(p[:18]), p) if i % 2 else (1, 0, p) for i, p in enumerate(parts) if p or i == 0]


def _check_alike(
    folder: Path, files: Sequence[str], arrays: Sequence[StoredArray], stacked: bool = False
) -> None:
    first = arrays[0]
    shape = first.shape[int(stacked) :]
    for file, array in zip(files, arrays, strict=True):
        if (array.shape[int(stacked) :], array.dtype) != (shape, first.dtype):
            raise DataError(
                f"{folder / file}: is {np.dtype(array.dtype)} {array.shape} but {files[0]} is "
                f"{np.dtype(first.dtype)} {first.shape}; all files of a data set are stored alike"
                f"\n    choose some of them by data.files ({OWN_DATA})"
            )


def _names(
    files: Sequence[str],
    places: Sequence[tuple[int, int | None]],
    arrays: Sequence[StoredArray],
) -> tuple[str, ...]:
    bare = [file.removesuffix(Path(file).suffix) for file in files]
    digits = len(str(max(array.shape[0] for array in arrays) - 1))
    prefixes = [f"{name}/" if len(files) > 1 else "" for name in bare]
    return tuple(
        bare[file] if row is None else f"{prefixes[file]}{row:0{digits}}" for file, row in places
    )
