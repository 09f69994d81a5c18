"""Reads folders of HDF5 files or Zarr v3 groups of known layouts: a box is one selection.

A `Catalog` is what a scan found: the files of one layout and all of them but the volumes. A
`KeyedOpener` reads selections, for one rank alone or for a replica together.

Of HDF5 a box is one hyperslab of a file. With MPI-IO (the extra `mpi`, with h5py built for a
parallel HDF5) the ranks of a replica open a file together and each reads its box of it in one
collective transfer, which the MPI library may put together to few large requests. Nothing is
then read in the background: collective calls need one order on all ranks, and HDF5 lets one
thread in at a time.

Of Zarr (the extra `zarr`) each sample is a group ``{name}.zarr`` with the keys and attributes of
the HDF5 layouts. Chunks that a box meets have to be there, see `arrays.zarr`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import h5py
import numpy as np

from hyperslab.comm import Grid, log_once, per_grid
from hyperslab.comm.agreement import broadcast_from_main, collective_try
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats import optional
from hyperslab.formats.arrays.hdf5 import check_storage
from hyperslab.formats.arrays.layouts import (
    LAYOUT_KEYS,
    LBANN_PART_NAME,
    KeyedHeader,
    StorageLayout,
    lbann_of,
    read_header,
    read_volume_header,
    storage_in,
)
from hyperslab.formats.arrays.open import HeaderChild, hdf5_or_zarr, open_keyed
from hyperslab.formats.arrays.zarr import check_chunks
from hyperslab.formats.files import (
    STRICT,
    AccessPolicy,
    FileAccess,
    Refuse,
    Stamp,
    check_unchanged,
    list_files,
    naming,
    sift,
    unchanged,
)
from hyperslab.formats.source import Array, Extras, ScanOptions, Source
from hyperslab.formats.storage import Storage
from hyperslab.formats.storage_order import Channels
from hyperslab.formats.targets import SCAN_KEYS, Floats, Parameters, as_classes, ranges_in
from hyperslab.geometry import Box

Selection = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, as both were when the folder was scanned.

    ``kind``: of the file, ``"HDF5"`` or ``"Zarr"``. ``stamped``: the file that had the ``stamp``.
    ``reach``: the files that this one may refer to.
    """

    path: Path
    kind: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    sample: str
    stamped: Path
    stamp: Stamp
    reach: FileAccess

    @contextmanager
    def as_scanned(self) -> Iterator[None]:
        """What goes wrong within names the file; that the file has changed is such a thing.

        Raises:
            DataError: in place of what the library raises.
        """
        with unchanged(self.stamped, self.sample, self.stamp), naming(self.path, self.kind):
            yield

    def of(self, file: Any) -> Any:
        """The array in the open file.

        Raises:
            DataError: it has another shape or type than it had.
        """
        stored = file[self.key]
        if stored.shape != self.shape or stored.dtype.name != self.dtype:
            raise DataError(
                f"{self.path}: {self.key!r} is {stored.dtype} {stored.shape} but was "
                f"{self.dtype} {self.shape} when the folder was scanned"
            )
        return stored


class KeyedOpener(ABC):
    """Opens files with keys. Every process has one of its own.

    ``collective``: the ranks of a replica read together.
    """

    collective: bool = False

    @abstractmethod
    def read(self, array: StoredArray, selection: Selection) -> Array:
        """The selected values, in the order of the file and native byte order.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """

    def close(self) -> None:  # noqa: B027 - some hold nothing open
        """Let go of what is open."""


EXACT_LINE = 1e-9
"""The share of a parameter by which it may be off the ranges that its file notes."""

HDF5_SUFFIXES = (".hdf5", ".h5")

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
"""Of a `StorageLayout`, what an error names."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """N files of one layout below ``folder``, in sorted order, with their targets (N, P).

    ``stamps``: of every file, or of the metadata of the arrays in a Zarr group, by relative names.
    ``redshifts``: of the channels, where all files say the same ones. ``allowed``: what the
    files may do.
    """

    folder: Path
    files: tuple[str, ...]  # relative: the same base name may occur in two sub-folders
    layout: StorageLayout
    unit: Floats
    parameters: Parameters
    stamps: Mapping[str, Stamp]
    redshifts: tuple[float, ...] = ()
    allowed: AccessPolicy = STRICT

    @property
    def reach(self) -> FileAccess:
        """How far the files may refer to others."""
        return FileAccess(self.folder, self.allowed)

    @property
    def names(self) -> tuple[str, ...]:
        """The samples' names: the relative paths without their suffix."""
        return tuple(file.rpartition(".")[0] for file in self.files)


def scan_keyed(
    folder: Path,
    channels: Channels | None,
    lbann: bool | None = None,
    suffixes: Sequence[str] = HDF5_SUFFIXES,
    refuse: Refuse | None = None,
    allowed: AccessPolicy = STRICT,
) -> Catalog:
    """List the folder and its sub-folders and check the header of every file.

    With ``refuse`` files that are not what they should be are left out; ``allowed``: what they
    may do.

    Raises:
        DataError: the folder is missing or holds no file, a file is not what it should be,
            or a file is not stored like the first one.
    """
    files = list_files(folder, suffixes)
    stamps: dict[str, Stamp] = {}
    reach = FileAccess(folder, allowed)

    def header(file: str) -> KeyedHeader:
        stamps.update(stamps_of(folder, file))  # a change from now on is noticed
        path = folder / file
        return child(str(path)) if hdf5_or_zarr(path) == "HDF5" else read(str(path))

    def read(path: str) -> KeyedHeader:
        return read_header(Path(path), channels, lbann, reach)

    with HeaderChild(read) as child:
        found = sift(files, header, refuse)
    first, one = found[0]

    def alike(entry: tuple[str, KeyedHeader]) -> KeyedHeader:
        _check_alike(folder, first, one.layout, entry[0], entry[1].layout)
        return entry[1]

    found = [entry for entry, _ in sift(found, alike, refuse)]
    headers = [header for _, header in found]
    unit = np.array([header.unit for header in headers])
    names = tuple(file for file, _ in found)
    parameters = _parameters(headers, unit)
    said = {header.redshifts for header in headers}
    redshifts = one.redshifts if len(said) == 1 else ()
    return Catalog(
        folder=folder,
        files=names,
        layout=one.layout,
        unit=unit,
        parameters=parameters,
        stamps=stamps,
        redshifts=redshifts,
        allowed=allowed,
    )


def stamps_of(folder: Path, file: str) -> dict[str, Stamp]:
    """The stamp of a file, or those of the arrays in a Zarr group that a data set may have.

    Raises:
        DataError: it has gone.
    """
    path = folder / file
    with naming(path, hdf5_or_zarr(path)):
        names = {stamped(file, key) for pair in LAYOUT_KEYS for key in pair}
        return {name: Stamp.of(folder / name) for name in names if (folder / name).exists()}


def stamped(file: str, key: str) -> str:
    """What of a sample has a stamp: the file, or where Zarr v3 says what the array of a key is."""
    return f"{file}/{key}/zarr.json" if hdf5_or_zarr(Path(file)) == "Zarr" else file


def _check_alike(
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


def _parameters(headers: list[KeyedHeader], unit: Floats) -> Parameters:
    names = headers[0].layout.names
    physical = [header.physical for header in headers if header.physical is not None]
    if len(physical) < len(headers):
        return Parameters.normalised(names)
    drawn = {header.ranges for header in headers}
    ranges = ranges_in(drawn.pop()) if len(drawn) == 1 else {}
    if tuple(ranges) == names:
        within = Parameters.within(ranges, unit, np.array(physical))
        if within.misfit < EXACT_LINE:
            return within
    return Parameters.fit(names, unit, np.array(physical))


CARRIED_KEYS = ("physPar", "redshifts")
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
        source = broadcast_from_main(lambda: cls.scanned(Path(path), options, lbann))
        if source.remark:
            log_once(grid, source.remark)
        return source

    @classmethod
    def scanned(cls, folder: Path, options: ScanOptions, lbann: bool | None) -> Self:
        """The folder as this process sees it; see `scan_keyed`."""
        catalog = scan_keyed(
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
        allowed: AccessPolicy = STRICT,
    ) -> tuple[Self, Any]:
        """One file that need not have a target, and its affine or ``None``.

        ``allowed``: what it may do. For the other arguments and
        errors see `header.read_volume_header`.
        """
        stamps = stamps_of(path.parent, path.name)  # a change from now on is noticed
        reach = FileAccess(path.parent, allowed)
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
        with naming(path, hdf5_or_zarr(path)), open_keyed(path, self.catalog.reach) as file:
            attributes = dict(file.attrs)
            if self.classes:
                affine = np.asarray(attributes.get("affine"))
                known = affine.shape == (4, 4) and affine.dtype.kind == "f"
                return Extras(SCAN_KEYS, attributes=attributes, affine=affine if known else None)
            volume = self.catalog.layout.key
            target = "unitPar" if volume == "full" else "y"
            found = {key: file.small(key) for key in (*CARRIED_KEYS, target)}
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
        kind = hdf5_or_zarr(path)
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


T = TypeVar("T")


class MpioOpener(KeyedOpener):
    """Opens HDF5 files on the communicator of this rank's replica.

    No file stays open, for to close one is collective too, and a rank that has left after an error
    of its own, such as NaN in its box, does not take part any more.
    """

    collective = True

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator

    def read(self, array: StoredArray, selection: Selection) -> Array:
        """What is selected of an array.

        Distribution scheme: 1. the ranks of the replica agree that each sees the file as it was;
        2. they open it and agree that it holds what it should; 3. one collective transfer; 4. they
        close it; 5. they agree that all went well, and that the file is still as it was.
        """
        path = array.path
        self._all_or_raise(lambda: check_unchanged(array.stamped, array.sample, array.stamp), path)

        def transfer() -> Array:
            with ExitStack() as opened, array.as_scanned():

                def dataset() -> Any:
                    file = h5py.File(path, "r", driver="mpio", comm=self.communicator)
                    return array.of(opened.enter_context(file))

                stored = self._all_or_raise(dataset, path)
                return self._fetch(stored, selection, np.dtype(array.dtype))

        return self._all_or_raise(transfer, path)

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        values = np.empty([s.stop - s.start for s in selection], dtype)
        with dataset.collective:
            dataset.read_direct(values, source_sel=selection)
        return values

    def _all_or_raise(self, attempt: Callable[[], T], path: Path) -> T:
        """What ``attempt`` returns, if it succeeds on all ranks of the replica.

        Raises:
            DataError: on all of them; see `collective_try`.
        """
        failing = f"{path}: cannot be read"
        gather = self.communicator.allgather
        return collective_try(attempt, failing=failing, error=DataError, gather=gather)


@per_grid
def replica_of(grid: Grid) -> Any:
    """The MPI communicator of the ranks that share their samples with this one; all ranks call it.

    Raises:
        HyperslabError: mpi4py is missing, h5py is built without MPI, or the ranks of the grid are
            not those of MPI.
    """
    mpi = optional.mpi()
    if not h5py.get_config().mpi:
        raise HyperslabError(
            'driver="mpio" needs an h5py that was built for a parallel HDF5, and this one was not\n'
            "    HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py, or leave the driver out: "
            "every rank then reads by itself"
        )
    world = mpi.COMM_WORLD
    ours = (grid.rank, grid.size)
    theirs = (world.Get_rank(), world.Get_size())
    if not all(world.allgather(ours == theirs)):
        raise HyperslabError(
            f'driver="mpio" needs MPI and torch to number the ranks alike: here, torch\'s rank '
            f"{ours[0]} of {ours[1]} is MPI's {theirs[0]} of {theirs[1]}\n    start the ranks with "
            f"mpirun -n {grid.size}, and leave RANK and WORLD_SIZE to it"
        )
    return world.Split(color=grid.coords["data"], key=grid.rank)


MOST_OPEN_FILES = 4
"""Files kept open: enough for the sub-volumes of one cube and those of its neighbours."""


class Hdf5Folder(KeyedFolder):
    """HDF5 files of the layouts that `header` knows, read by this rank alone or by MPI-IO."""

    def __init__(self, catalog: Catalog, opener: KeyedOpener | None = None) -> None:
        super().__init__(catalog, Hdf5Opener() if opener is None else opener)

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Self:
        return cls.scanned(folder, options, lbann_of(options.format))

    def read_together(self, driver: str, grid: Grid) -> Hdf5Folder:
        return Hdf5Folder(self.catalog, MpioOpener(replica_of(grid)))


class Hdf5Opener(KeyedOpener):
    """Opens HDF5 files for one rank; the files used last stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, h5py.File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, array: StoredArray, selection: Selection) -> Array:
        with self._lock:
            try:
                with array.as_scanned():
                    dataset = array.of(self._file(array.path))
                    if dataset.is_virtual or dataset.external:  # the other files have no stamps
                        check_storage(array.path, array.key, dataset, array.reach)
                    return self._fetch(dataset, selection, np.dtype(array.dtype))
            except DataError:
                if file := self._open.pop(array.path, None):
                    file.close()  # it may not be the file of this name any more
                raise

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _file(self, path: Path) -> h5py.File:
        """An open file; the least recently used one makes room."""
        if path not in self._open:
            if len(self._open) >= MOST_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[path] = h5py.File(path, "r", locking=False)
        self._open.move_to_end(path)
        return self._open[path]

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        values = np.empty([s.stop - s.start for s in selection], dtype)
        dataset.read_direct(values, source_sel=selection)
        return values


class ZarrFolder(KeyedFolder):
    """Zarr v3 groups of the layouts that `header` knows."""

    suffixes = (".zarr",)

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog, ZarrOpener())


class ZarrOpener(KeyedOpener):
    """Opens Zarr v3 groups; nothing stays open."""

    def read(self, array: StoredArray, selection: Selection) -> Array:
        with array.as_scanned():
            group = optional.zarr().open_group(array.path, mode="r", zarr_format=3)
            stored = array.of(group)
            check_chunks(array.path, array.key, stored, array.reach, selection)
            return self._fetch(stored, selection, np.dtype(array.dtype))

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        return np.asarray(dataset[selection], dtype)
