"""A folder of files with keys as a `Source`: a box of a volume is one selection in an array."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from hyperslab.comm import Grid, log_once
from hyperslab.comm.agreement import from_main
from hyperslab.formats.extras import Extras
from hyperslab.formats.io_cost import Storage
from hyperslab.formats.keyed.catalog import HDF5_SUFFIXES, Catalog, scan, stamped, stamps_of
from hyperslab.formats.keyed.header import LBANN_PART_NAME, read_volume_header, storage_in
from hyperslab.formats.keyed.keyed_file import kind_of, opened
from hyperslab.formats.keyed.opener import KeyedOpener, Selection, StoredArray
from hyperslab.formats.parameters import Parameters
from hyperslab.formats.shared.channels import Channels
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.labels import SCAN_KEYS, as_classes
from hyperslab.formats.shared.listing import Refuse
from hyperslab.formats.shared.reach import STRICT, Allowed, Reach
from hyperslab.formats.source import Array, ScanOptions, Source
from hyperslab.geometry import Box

CARRIED = ("physPar", "redshifts")
"""Arrays beside the volume and its target that a conversion takes along."""


class KeyedFolder(Source):
    """The samples of a `Catalog`, one file each, read by an `opener`."""

    suffixes: ClassVar[tuple[str, ...]] = HDF5_SUFFIXES

    def __init__(self, catalog: Catalog, opener: KeyedOpener) -> None:
        self.catalog = catalog
        self.opener = opener
        self.names = catalog.names
        self.shape = catalog.layout.shape
        self.dtype = np.dtype(catalog.layout.dtype)
        self.order = catalog.layout.order
        self.parameters = catalog.parameters
        self.redshifts = catalog.redshifts
        self.classes = catalog.layout.classes
        self.collective = opener.collective
        if self.classes:
            channels = catalog.layout.label_shape[0]
            self.label_bytes = channels * np.dtype(catalog.layout.label_dtype).itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files for itself."""
        return type(self), (self.catalog,)

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        """The samples of a catalogue, by the library's ordinary opener."""
        return cls(catalog)  # type: ignore[call-arg]  # a format's own class knows its opener

    @classmethod
    def scan(
        cls,
        path: str | Path,
        grid: Grid,
        channels: Channels | None = None,
        lbann: bool | None = None,
        refuse: Refuse | None = None,
    ) -> Self:
        """The folder as the main rank sees it. All ranks call this. Errors: see `catalog.scan`.

        ``lbann``: whether the spatial dims are stored reversed; ``None`` finds it out.
        """
        options = ScanOptions(channels, refuse=refuse)
        source = from_main(lambda: cls.scanned(Path(path), options, lbann))
        if source.remark:
            log_once(grid, source.remark)
        return source

    @classmethod
    def scanned(cls, folder: Path, options: ScanOptions, lbann: bool | None) -> Self:
        """The folder as this process sees it; see `scan`."""
        catalog = scan(
            folder, options.channels, lbann, cls.suffixes, options.refuse, options.allowed
        )
        source = cls.of(catalog)
        if catalog.layout.reversed and lbann is None:
            source.remark = (
                f"{folder}: sub-volumes of LBANN's by key, order and names; their reversed spatial "
                'dims (C, W, H, D) are read as (C, D, H, W); format="hdf5" takes them as they are'
            )
        return source

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Self:
        return cls.scanned(folder, options, None)

    @classmethod
    def of_volume(
        cls,
        path: Path,
        like: tuple[int, ...],
        channels: Channels | None = None,
        lbann: bool | None = None,
        allowed: Allowed = STRICT,
    ) -> tuple[Self, Any]:
        """One file that need not have a target, and its affine or ``None``.

        ``allowed``: what it may do. For the other arguments and
        errors see `header.read_volume_header`.
        """
        stamps = stamps_of(path.parent, path.name)  # a change from now on is noticed
        reach = Reach(path.parent, allowed)
        layout, affine, redshifts = read_volume_header(path, like, channels, lbann, reach)
        no_target = np.empty((1, 0))
        parameters = Parameters.normalised(())
        catalog = Catalog(
            folder=path.parent,
            files=(path.name,),
            layout=layout,
            unit=no_target,
            parameters=parameters,
            stamps=stamps,
            redshifts=redshifts,
            allowed=allowed,
        )
        return cls.of(catalog), affine

    def read(self, sample: int, box: Box) -> Array:
        """Read one hyperslab.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        layout = self.catalog.layout
        stored = layout.order.to_file(box)
        array = self._stored(sample, layout.key, layout.stored, layout.dtype)
        return layout.order.to_volume(self.opener.read(array, stored.slices()))

    def labels(self, sample: int, box: Box) -> Array:
        """Read one hyperslab of the labels; errors as `read`, and labels that are no classes."""
        layout = self.catalog.layout
        selection: Selection = (slice(0, layout.label_shape[0]), *box.slices())
        array = self._stored(sample, SCAN_KEYS[1], layout.label_shape, layout.label_dtype)
        return as_classes(self.opener.read(array, selection), f"{self.where(sample)}: {box}")

    def target(self, sample: int) -> Array:
        return self.catalog.unit[sample]

    def where(self, sample: int) -> str:
        return str(self.catalog.folder / self.catalog.files[sample])

    def volume(self, sample: int) -> str:
        """The sample itself, or the cube of which LBANN's splitter has made it a part."""
        name = self.names[sample]
        if name in self.volumes:
            return self.volumes[name]
        folder, slash, base = name.rpartition("/")
        part = LBANN_PART_NAME.fullmatch(base) if self.catalog.layout.reversed else None
        return f"{folder}{slash}{part[1]}" if part else name

    def storage(self, sample: int) -> Storage:
        return storage_in(Path(self.where(sample)), self.catalog.layout, self.catalog.reach)

    def extras(self, sample: int) -> Extras:
        path = Path(self.where(sample))
        with naming(path, kind_of(path)), opened(path, self.catalog.reach) as file:
            attributes = dict(file.attrs)
            if self.classes:
                affine = np.asarray(attributes.get("affine"))
                known = affine.shape == (4, 4) and affine.dtype.kind == "f"
                return Extras(SCAN_KEYS, attributes=attributes, affine=affine if known else None)
            volume = self.catalog.layout.key
            target = "unitPar" if volume == "full" else "y"
            found = {key: file.small(key) for key in (*CARRIED, target)}
            arrays = {
                key: np.asarray(array[()]) for key, array in found.items() if array is not None
            }
            values = arrays.pop(target)
        return Extras((volume, target), self.parameters.names, values, arrays, attributes)

    def files(self, sample: int) -> tuple[Path, ...]:
        return (self.catalog.folder / self.catalog.files[sample],)

    def alone(self, sample: int) -> Self:
        one = slice(sample, sample + 1)
        catalog = self.catalog
        return self.of(replace(catalog, files=catalog.files[one], unit=catalog.unit[one]))

    def close(self) -> None:
        self.opener.close()

    def _stored(self, sample: int, key: str, shape: tuple[int, ...], dtype: str) -> StoredArray:
        """An array of a sample, as it was when the folder was scanned."""
        catalog = self.catalog
        file = catalog.files[sample]
        path = catalog.folder / file
        name = stamped(file, key)
        kind = kind_of(path)
        return StoredArray(
            path=path,
            kind=kind,
            key=key,
            shape=shape,
            dtype=dtype,
            sample=self.names[sample],
            stamped=catalog.folder / name,
            stamp=catalog.stamps[name],
            reach=catalog.reach,
        )
