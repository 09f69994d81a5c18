"""Reads arrays in files with a table of targets: each rank its box, in one selection of a file.

An `ArrayFolder` shows the samples of a `Catalog`, in whatever kind of file their arrays are.
What differs between its formats is how a folder is scanned and what lies beside the volumes:
`Hdf5Folder` and `ZarrFolder` know published layouts by their keys, `NpyFolder` takes numpy's
files, and `MappedFolder` follows a `DataMap` or the names of a published data set. `Fields` shows
several sources as one, their channels one after another.

With MPI-IO (the extra `mpi`, with h5py built for a parallel HDF5) the ranks of a replica open an
HDF5 file together and each reads its box of it in one collective transfer, which the MPI library
may put together to few large requests. Nothing is then read in the background: collective calls
need one order on all ranks, and HDF5 lets one thread in at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays import hdf5, layouts
from hyperslab.formats.arrays.open import (
    ARRAY_SUFFIXES,
    ArrayReader,
    Catalog,
    close_readers,
    kind_of_file,
    open_keyed,
    stamps_of,
)
from hyperslab.formats.arrays.scan import SHOWN_AS, TARGET_SUFFIX, scan_arrays, scan_npy
from hyperslab.formats.files import OWN_DATA, DataMap, FileAccess, naming
from hyperslab.formats.source import Array, Extras, ScanOptions, Source, SourceView
from hyperslab.formats.storage import HDF5_SIEVE, Storage
from hyperslab.formats.storage_order import LBANN_ORDER
from hyperslab.formats.targets import SCAN_KEYS, as_classes
from hyperslab.geometry import Box

if TYPE_CHECKING:  # torch
    from hyperslab.comm import Grid


class ArrayFolder(Source):
    """Shows the samples of a ``catalog``, of which ``reader`` reads boxes."""

    def __init__(self, catalog: Catalog, reader: ArrayReader | None = None) -> None:
        self.catalog = catalog
        self.reader = ArrayReader() if reader is None else reader
        self.names = catalog.names
        self.order = catalog.order
        self.shape = catalog.order.volume_shape(catalog.stored)
        self.dtype = np.dtype(SHOWN_AS[np.dtype(catalog.volumes[0].dtype).name])
        self.parameters = catalog.parameters
        self.redshifts = catalog.redshifts
        self.classes = catalog.classes
        self.remark = catalog.remark
        self.collective = self.reader.collective
        # HDF5 lets one thread in at a time.
        self.concurrent = all(kind_of_file(Path(file)) != "HDF5" for file in {*catalog.files})
        if catalog.labels:
            array = catalog.labels[0]
            channels = array.shape[0] if len(array.shape) == 4 and not catalog.rows else 1
            self.label_bytes = np.dtype(array.dtype).itemsize * channels

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files for itself; the manifest's volumes go along."""
        return type(self), (self.catalog,), {"volumes": dict(self.volumes)}

    def read(self, sample: int, box: Box) -> Array:
        """Reads the box, in one selection of the array.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        catalog = self.catalog
        stored = catalog.order.to_file(box)
        if catalog.rows:
            row = catalog.rows[sample]
            stored = Box((row, *stored.lo), (row + 1, *stored.hi))
        found = self.reader.read(catalog, sample, catalog.volumes[sample], stored)
        if catalog.rows:
            found = found[0]
        return catalog.order.to_volume(found.astype(found.dtype.newbyteorder("="), copy=False))

    def target(self, sample: int) -> Array:
        return self.catalog.targets[sample]

    def labels(self, sample: int, box: Box) -> Array:
        """Reads the box of the labels, in one selection; raises as `read` and `as_classes`."""
        array = self.catalog.labels[sample]
        stored = box
        if len(array.shape) == 4:  # of samples, or of channels
            rows = self.catalog.rows
            first, end = (rows[sample], rows[sample] + 1) if rows else (0, array.shape[0])
            stored = Box((first, *box.lo), (end, *box.hi))
        found = self.reader.read(self.catalog, sample, array, stored)
        channels = found if len(array.shape) == 4 else found[None]
        return as_classes(channels, f"{self.where(sample)}: {box}: {array.key!r}")

    def where(self, sample: int) -> str:
        rows = self.catalog.rows
        return str(self.path(sample)) + (f", row {rows[sample]}" if rows else "")

    def path(self, sample: int) -> Path:
        """Returns the file of a sample's volume."""
        return self.catalog.path(sample)

    def storage(self, sample: int) -> Storage | None:
        """Describes files in which a sample lies in one piece; None for the others."""
        array = self.catalog.volumes[sample]
        if kind_of_file(self.path(sample)) not in ("npy", "npz", "TFRecord"):
            return None
        if array.fortran and self.catalog.rows:
            return None  # the values of one sample are strewn over all of the file
        order = self.catalog.order.reversed if array.fortran else self.catalog.order
        stored = self.catalog.stored[:: -1 if array.fortran else 1]
        item = np.dtype(array.dtype).itemsize
        return Storage(order, stored, item, item * math.prod(stored), bridged=True)

    def files(self, sample: int) -> tuple[Path, ...]:
        """Names the file of the volume, and the table."""
        table = self.catalog.table
        return (self.path(sample), *(() if table is None else (table,)))

    def alone(self, sample: int) -> Self:
        return type(self)(self.catalog.only(sample))

    def close(self) -> None:
        self.reader.close()


CARRIED_KEYS = ("physPar", "redshifts")
"""Arrays beside the volume and its target that a conversion takes along."""


class KeyedFolder(ArrayFolder):
    """Shows files of the layouts that `layouts` knows by their keys, each of which is a sample."""

    suffixes: ClassVar[tuple[str, ...]] = layouts.HDF5_SUFFIXES

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Self:
        source = cls(layouts.scan_layouts(folder, options, cls.suffixes))
        if source.order == LBANN_ORDER and layouts.lbann_of(options.format) is None:
            source.remark = (
                f"{folder}: sub-volumes of LBANN's by key, order and names; their reversed spatial "
                'dims (C, W, H, D) are read as (C, D, H, W); format="hdf5" takes them as they are'
            )
        return source

    @classmethod
    def of_file(
        cls, folder: Path, file: str, options: ScanOptions, like: tuple[int, ...] | None = None
    ) -> tuple[Self, Any]:
        """Opens one file of a folder, without a look at the others; also returns its affine.

        With ``like`` it need not have a target. For that, and for errors, see `read_header`.
        """
        close_readers()
        stamps = stamps_of(folder, file, layouts.KEYS_OF_LAYOUTS)  # before it is read
        header = layouts.read_header(
            folder / file, options, FileAccess(folder, options.allowed), like
        )
        alone = replace(header, physical=None)  # of one sample no range can be told
        return cls(
            layouts.catalog_of(folder, [(file, alone)], stamps, options.allowed)
        ), header.affine

    def volume(self, sample: int) -> str:
        """Returns the sample itself, or the cube of which LBANN's splitter has made it a part."""
        name = self.names[sample]
        if name in self.volumes:
            return self.volumes[name]
        folder, slash, base = name.rpartition("/")
        part = layouts.LBANN_PART_NAME.fullmatch(base) if self.order == LBANN_ORDER else None
        return f"{folder}{slash}{part[1]}" if part else name

    def storage(self, sample: int) -> Storage:
        path = self.path(sample)
        with naming(path, kind_of_file(path)), open_keyed(path, self.catalog.reach) as file:
            stored: Any = file.find(self.catalog.volumes[sample].key)
            whole = Storage(self.catalog.order, stored.shape, stored.dtype.itemsize, stored.nbytes)
            if file.zarr:
                size, chunk = stored.nbytes_stored(), tuple(stored.chunks)
                return replace(whole, size=size, chunk=chunk, compression=stored.packing)
            known = {**hdf5.WORDS, hdf5.FLETCHER32: "fletcher32"}
            codes = hdf5.filters_of(stored)
            word = ", ".join(known[code] for code in codes if code in known)
            size = stored.id.get_storage_size() or stored.nbytes  # a virtual data set has none
            whole = replace(whole, size=size, compression=word, buffer=HDF5_SIEVE)
            return replace(whole, chunk=stored.chunks)

    def extras(self, sample: int) -> Extras:
        path = self.path(sample)
        with naming(path, kind_of_file(path)), open_keyed(path, self.catalog.reach) as file:
            attributes = dict(file.attrs)
            if self.classes:
                affine = np.asarray(attributes.get("affine"))
                known = affine.shape == (4, 4) and affine.dtype.kind == "f"
                return Extras(SCAN_KEYS, attributes=attributes, affine=affine if known else None)
            volume = self.catalog.volumes[sample].key
            target = "unitPar" if volume == "full" else "y"
            found = {key: file.small(key) for key in (*CARRIED_KEYS, target)}
            arrays = {
                key: np.asarray(array[()]) for key, array in found.items() if array is not None
            }
            values = arrays.pop(target)
        return Extras((volume, target), self.parameters.names, values, arrays, attributes)


class Hdf5Folder(KeyedFolder):
    """Shows HDF5 files of known layouts, read by this rank alone or by MPI-IO."""

    def read_together(self, driver: str, grid: Grid) -> Hdf5Folder:
        from hyperslab.formats.arrays.mpio import MpioReader, replica_of

        return Hdf5Folder(self.catalog, MpioReader(replica_of(grid)))


class ZarrFolder(KeyedFolder):
    """Shows Zarr v3 groups ``{name}.zarr`` (the extra `zarr`) with the keys of HDF5's layouts."""

    suffixes = (".zarr",)


class NpyFolder(ArrayFolder):
    """Shows numpy's own files, with ``targets.csv`` or a ``{name}.target.npy`` for each."""

    suffixes = (".npy",)
    targets_apart = True

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Self:
        return cls(scan_npy(folder, cls.suffixes, options))

    def files(self, sample: int) -> tuple[Path, ...]:
        """Names the file of the volume, and what holds its target."""
        single = self.catalog.folder / f"{self.names[sample]}{TARGET_SUFFIX}"
        table = self.catalog.table
        return self.path(sample), single if table is None else table


class MappedFolder(ArrayFolder):
    """Shows arrays where a `DataMap` says they are: by key, or many in one file."""

    targets_apart = True

    @classmethod
    def claims(cls, path: Path) -> bool:
        """Tells if a folder, or a file, is such data by its names, whatever their suffixes say."""
        return layouts.recognise_published(path) is not None or (
            path.is_file() and kind_of_file(path) == "npy"
        )

    @classmethod
    def open_folder(  # type: ignore[override]
        cls, folder: Path, options: ScanOptions, channels: int | None = None
    ) -> Source:
        """Opens a folder, or one file; several fields become one source, see `Fields`.

        ``channels``: those of a network, which is shown volumes alone.
        """
        said = options.mapping
        if said is None or not said.fields:
            return cls(scan_arrays(folder, options, None if channels is None else (channels,)))
        shares = None if channels is None else _shares(channels, len(said.fields))
        maps = [replace(options, mapping=of) for of in said.of_fields]
        return Fields([cls(scan_arrays(folder, of, shares)) for of in maps], said.fields)

    @classmethod
    def of_volumes(cls, paths: Sequence[Path], options: ScanOptions, channels: int) -> Source:
        """Opens the volumes of a file for a network of so many ``channels``; see `scan_arrays`.

        Their targets need not be there. Where fields are in files of their own ``paths`` has one
        for each.
        """
        said = replace((options.mapping or DataMap()).without_targets, files="")
        if not (said.fields and said.of_files):
            return cls.open_folder(paths[0], replace(options, mapping=said), channels)
        if len(paths) != len(said.fields):
            raise DataError(
                f"{paths[0]}: the network takes {len(said.fields)} files as channels, so no file "
                "alone is one of its volumes\n    give the folder in which they are, as "
                f"{' and '.join(map(printable, said.fields))}"
            )
        each = replace(options, mapping=replace(said, fields=()))
        shares = _shares(channels, len(paths))
        return Fields([cls(scan_arrays(path, each, shares)) for path in paths], said.fields)


def _shares(channels: int, fields: int) -> range:
    """Counts how many of the channels one field may have, where each has one at least."""
    return range(1, max(1, channels - fields + 1) + 1)


class Fields(SourceView):
    """Joins sources of one field each: their channels become one sample's, one after another.

    They have to agree in samples, extents and targets.
    """

    def __init__(self, sources: Sequence[Source], titles: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self.titles = tuple(titles)
        first = self.sources[0]
        for source, title in zip(self.sources[1:], self.titles[1:], strict=True):
            _check_fields_alike(first, source, self.titles[0], title)
        self.counts = tuple(source.shape[0] for source in self.sources)
        super().__init__(first)
        self.concurrent = all(source.concurrent for source in self.sources)
        self.shape = (sum(self.counts), *first.shape[1:])
        self.dtype = np.result_type(*(source.dtype for source in self.sources))
        self.channel_names = self.titles if set(self.counts) == {1} else ()
        self.remark = f"{first.remark}; channels: {', '.join(map(printable, self.titles))}"

    def read(self, sample: int, box: Box) -> Array:
        parts = []
        begin = 0
        for source, count in zip(self.sources, self.counts, strict=True):
            lo, hi = max(box.lo[0], begin), min(box.hi[0], begin + count)
            if lo < hi:
                inner = Box((lo - begin, *box.lo[1:]), (hi - begin, *box.hi[1:]))
                parts.append(source.read(sample, inner).astype(self.dtype, copy=False))
            begin += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    volume = Source.volume  # of the folder's own manifest, which no single field has

    def storage(self, sample: int) -> None:
        """Returns None: a field's storage has less than the sample."""

    def files(self, sample: int) -> tuple[Path, ...]:
        return tuple(path for source in self.sources for path in source.files(sample))

    def alone(self, sample: int) -> Fields:
        return Fields([source.alone(sample) for source in self.sources], self.titles)

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _check_fields_alike(first: Source, other: Source, title: str, its: str) -> None:
    if len(first.names) != len(other.names) or first.shape[1:] != other.shape[1:]:
        raise DataError(
            f"{printable(title)} has {len(first.names)} volumes of {first.shape[1:]} voxels but "
            f"{printable(its)} has {len(other.names)} of {other.shape[1:]}; fields that become "
            f"channels need as many volumes, of one size ({OWN_DATA}, channels)"
        )
    for sample, (name, twin) in enumerate(zip(first.names, other.names, strict=True)):
        if first.classes or not len(first.parameters.names):
            alike = numbers_of_volume(name, title) == numbers_of_volume(twin, its)
        else:
            alike = np.array_equal(first.target(sample), other.target(sample))
        if not alike:
            raise DataError(
                f"{printable(name)!r} and {printable(twin)!r} are not two fields of one volume: "
                f"they belong to other rows ({OWN_DATA}, channels)"
            )


def numbers_of_volume(name: str, pattern: str) -> list[str]:
    """Finds the numbers in a file's name that tell one volume from another; suffixes do not count.

    Those of the ``pattern`` that found it are the field's: *z0/\\** and *z1/\\** are two of them.

    >>> numbers_of_volume("z1/run3_0007.npy", "z1/run*_*.npy")
    ['3', '0007']
    """
    suffix = next((suffix for suffix in ARRAY_SUFFIXES if pattern.endswith(suffix)), "")
    bare = pattern.removesuffix(suffix)
    for said in (bare, bare.rpartition("/")[2]):  # names may be those of files in a folder
        free = re.split(r"\*|\?|\[!?\]?[^]]*\]", said)
        found = re.match("(.*)".join(map(re.escape, free)), name)
        if found is not None:
            return re.findall(r"\d+", " ".join((*found.groups(), name[found.end() :])))
    return re.findall(r"\d+", name)
