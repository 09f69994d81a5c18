"""Lists and opens the volumes to be predicted, reads their boxes and writes their masks.

In reading order: the files to be predicted, and the names of their results; a volume by the kind
of its file, which says who reads what of it and how its mask is written.

Legend: C channels, (D, H, W) voxels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm import Grid
from hyperslab.comm.agreement import all_gather, broadcast_from_main, collective_try
from hyperslab.data import Source
from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays.layouts import HDF5_SUFFIXES as HDF5
from hyperslab.formats.arrays.open import kind_of_file
from hyperslab.formats.arrays.scan import (
    TARGET_SUFFIX,
    files_matching,
    files_of_volumes,
    is_one_file,
)
from hyperslab.formats.arrays.source import Hdf5Folder, MappedFolder, ZarrFolder, numbers_of_volume
from hyperslab.formats.convert.scans import as_hu
from hyperslab.formats.files import (
    DataMap,
    Stamp,
    check_finite,
    check_names,
    unchanged,
    walk_folder,
)
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.image import NIFTI_SUFFIXES as NIFTI
from hyperslab.formats.nifti.resample import blurred_linear_box, spacing
from hyperslab.formats.source import Array, ScanOptions
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.formats.tfrecord.source import TfRecordFolder
from hyperslab.formats.views import Selected, read_filled
from hyperslab.geometry import Box, Cut
from hyperslab.recipe.data import DataSection
from hyperslab.train.mask_files import MASK_SUFFIXES
from hyperslab.util.atomic_files import created_aside

KEYED_SUFFIXES = (*HDF5, ".zarr")

ARRAY_SUFFIXES = (".npy", ".npz")
"""Files with these suffixes are looked for where a folder has no others."""

CHANNEL_FILE = re.compile(r"(.+)_(\d{4})(\.nii(?:\.gz)?)")
"""Matches the name of a file of one channel, as nnU-Net has them."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """Holds a file and the ``name`` of its result: a path in the output folder, no suffix."""

    path: Path
    name: str
    channels: tuple[Path, ...] = ()  # the files of those after the first, or of other fields

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.path, *self.channels


def list_inputs(
    arguments: Sequence[Path], channels: int = 1, mapping: DataMap | None = None
) -> list[InputFile]:
    """List the files given and those in and below the folders given, without labels and masks.

    With a ``mapping`` a folder's files are those that training would take; if there are none, as
    without. Where each of several fields has files of its own, those of one number are one input.

    Of several ``channels`` in files of their own, as nnU-Net has them, the first one stands for
    all: ``case_0000.nii.gz``, ``case_0001.nii.gz`` become the input ``case``.

    Raises:
        DataError: a folder has no such file, two files would be written to one place, or fields
            do not belong together.
    """
    found: dict[str, InputFile] = {}
    for argument in arguments:
        if not argument.is_dir() or is_one_file(argument):
            inputs = [InputFile(argument, input_name(argument.name))]
        else:
            inputs = _in_folder(argument, mapping)
        for entry in _channels_grouped(inputs, channels):
            other = found.setdefault(entry.name, entry)
            if other.path.absolute() != entry.path.absolute():
                raise DataError(
                    f"{other.path} and {entry.path} would both be written as {entry.name}\n"
                    "    predict them into two folders"
                )
    return list(found.values())


def input_name(name: str) -> str:
    """Return a file's name without a suffix that says what it is."""
    suffixes = sorted((*NIFTI, *KEYED_SUFFIXES, *ARRAY_SUFFIXES), key=len, reverse=True)
    return name.removesuffix(next((s for s in suffixes if name.endswith(s)), ""))


def check_file_kind(path: Path, kinds: Sequence[str]) -> None:
    """Refuse a file that is not there, or ends as none of a network's ``kinds`` (`DataError`)."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    _check_no_records(path)
    if not path.name.endswith(tuple(kinds)):
        raise DataError(f"{path}: this network takes {', '.join(kinds)}")


def _check_no_records(path: Path) -> None:
    if path.name.endswith(TfRecordFolder.suffixes):
        raise DataError(
            f"{path}: TFRecord files are read as data sets only\n"
            "    hyperslab evaluate RUN --split all data.path=FOLDER predicts one; hyperslab "
            "convert FOLDER OUT makes HDF5 files of it"
        )


def _channels_grouped(inputs: Sequence[InputFile], channels: int) -> list[InputFile]:
    if channels == 1:
        return list(inputs)
    found: dict[Path, InputFile] = {}
    for entry in inputs:
        match = CHANNEL_FILE.fullmatch(entry.path.name)
        if match is None:
            found[entry.path] = entry
            continue
        first, *others = (
            entry.path.with_name(f"{match[1]}_{number:04}{match[3]}") for number in range(channels)
        )
        name = f"{entry.name.removesuffix(match[1] + '_' + match[2])}{match[1]}"
        found[first] = InputFile(first, name, tuple(others))
    return list(found.values())


def _in_folder(folder: Path, mapping: DataMap | None) -> list[InputFile]:
    if mapping is None:
        return _files_below(folder)
    of_files = bool(mapping.fields) and mapping.of_files
    if of_files or files_matching(folder, mapping.files):
        return _files_of_mapping(folder, mapping)
    return _files_below(folder)


def _files_below(folder: Path) -> list[InputFile]:
    names = [name for name in walk_folder(folder) if is_one_file(folder / name)]
    found = [
        name
        for name in names
        if name.endswith((*NIFTI, *KEYED_SUFFIXES)) and not _is_label_or_mask(name)
    ]
    if not found and any(name.endswith(ARRAY_SUFFIXES) for name in names):
        found = files_of_volumes(folder, DataMap())  # which knows fields of several kinds
        found = [
            name
            for name in found
            if name.endswith(ARRAY_SUFFIXES) and not name.endswith(TARGET_SUFFIX)
        ]
        found = [name for name in found if is_one_file(folder / name)]
    if found:
        check_names(folder, found)
        return [_input_file(folder, name) for name in found]
    for name in names:
        _check_no_records(folder / name)
    kinds = " or *".join((*NIFTI, *KEYED_SUFFIXES, *ARRAY_SUFFIXES))
    raise DataError(f"{folder}: no *{kinds} to predict in it or below")


def _files_of_mapping(folder: Path, mapping: DataMap) -> list[InputFile]:
    said = mapping.without_targets
    table = None if mapping.table is None else folder / mapping.table
    if not said.of_files:
        said = replace(said, fields=())
    columns = [
        [_input_file(folder, name) for name in files_of_volumes(folder, of, table)]
        for of in said.of_fields
    ]
    first = columns[0]
    wanted = [numbers_of_volume(entry.name, said.fields[0]) for entry in first if said.fields]
    for column, title in zip(columns[1:], said.fields[1:], strict=True):
        if [numbers_of_volume(entry.name, title) for entry in column] != wanted:
            raise DataError(
                f"{folder}: {len(first)} files {printable(said.fields[0])} and {len(column)} "
                f"{printable(title)} are not fields of the same volumes\n    those of one volume "
                "have the same numbers in their names"
            )
    rows = zip(*columns, strict=True)
    return [replace(one, channels=tuple(entry.path for entry in others)) for one, *others in rows]


def _input_file(folder: Path, name: str) -> InputFile:
    return InputFile(folder / name, (Path(name).parent / input_name(Path(name).name)).as_posix())


def _is_label_or_mask(name: str) -> bool:
    """Recognise labels, by their names in the public data sets, and predicted masks."""
    path = Path(name)
    labels = path.name.startswith("segmentation-") or path.parent.name == "labelsTr"
    return labels or path.name.endswith(tuple(MASK_SUFFIXES.values()))


class NiftiVolume:
    """Reads a volume of ``shape`` (C, D, H, W) from NIfTI files, on the lattice of the network.

    Every rank reads, and resamples, its own boxes. A packed file can be read from its beginning
    only, so the main rank first unpacks it, piece by piece, into ``scratch``, a folder that all
    ranks see; `close` removes it there. ``paths``: one, or one for each channel. ``extents``
    (D, H, W) are those of the files.

    Raises:
        DataError: on every rank: see `image.open_nifti` and `image.check_channels`; the volume
            holds NaN or infinite values, or one and the same everywhere; or it has other channels
            than the network.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        about: DataCard,
        grid: Grid,
        scratch: Path,
        *,
        native: bool,
        fill: float = 0,
    ) -> None:
        self.paths = paths
        self.grid = grid
        self.fill = fill
        self.dtype = np.dtype(about.dtype)
        self.stamps: list[Stamp] = []
        self.unpacked: list[Path] = []
        try:
            self._open(about, scratch, native)
        except BaseException:
            self.close()
            raise

    def _open(self, about: DataCard, scratch: Path, native: bool) -> None:
        where = self.paths[0]

        def plain() -> tuple[list[Stamp], list[Path]]:
            stamps = [Stamp.of(path) for path in self.paths]  # before any is read
            known = zip(self.paths, stamps, strict=True)
            return stamps, [self._plain(path, stamp, scratch) for path, stamp in known]

        self.stamps, places = broadcast_from_main(
            plain, failing=f"{where}: cannot be read", error=DataError
        )
        self.files = collective_try(
            lambda: [image.open_nifti(place) for place in places],
            failing=f"{where}: cannot be read",
            error=DataError,
        )
        first = self.files[0]
        self.extents = first.shape[1:]
        self.affine = first.affine
        self._check_values()
        self.lattice = self.extents
        if not native:
            self.lattice = _trained_lattice(first, about) or self.extents
        channels = first.shape[0] if len(self.files) == 1 else len(self.files)
        self.shape = (channels, *self.lattice)
        if channels != about.whole[0]:
            found = f"{channels} channel{'' if channels == 1 else 's'}"
            remedy = "give the one that it takes in a file of its own, 3-D"
            if about.whole[0] > 1:
                remedy = "give them along the fourth dim of a file, or as NAME_0000.nii.gz, "
                remedy += "NAME_0001.nii.gz"
            words = "is 4-D and has" if len(self.files) == 1 and channels > 1 else "has"
            raise DataError(
                f"{where}: {words} {found} but the network was trained on "
                f"{', '.join(about.channels) or about.whole[0]}\n    {remedy}"
            )

    def _plain(self, path: Path, stamp: Stamp, scratch: Path) -> Path:
        """Return a file that can be read anywhere: itself, or what it is unpacked to."""
        if not self.unpacked:  # once, before anything is unpacked
            image.check_channels([image.open_nifti(path) for path in self.paths])
        if not path.name.endswith(".gz"):
            return path
        place = scratch / f".{path.name.removesuffix('.gz')}.{len(self.unpacked)}.partial.nii"
        scratch.mkdir(parents=True, exist_ok=True)
        self.unpacked.append(place)
        with created_aside(place) as file, unchanged(path, path.name, stamp):
            image.unpack(path, file)
        return place

    def _check_values(self) -> None:
        """Refuse values that no scan has; each rank looks at its share of the files' layers."""
        found = all_gather(collective_try(self._extremes))
        low = min(low for low, _ in found)
        if low == max(high for _, high in found):
            raise DataError(f"{self.paths[0]}: is empty: every voxel is {low:g}")

    def _extremes(self) -> tuple[float, float]:
        slowest = "DHW".index(self.files[0].order.dims[2])
        begin, end = Cut.balanced("rank", self.extents[slowest], self.grid.size).interval(
            self.grid.rank
        )
        layer = math.prod(self.extents) // self.extents[slowest]
        many = max(1, image.MASK_BLOCK // layer)
        low, high = math.inf, -math.inf
        for number, (path, file) in enumerate(zip(self.paths, self.files, strict=True)):
            intervals = [(0, extent) for extent in file.shape]
            for lo in range(begin, end, many):
                intervals[1 + slowest] = (lo, min(lo + many, end))
                least, most = check_finite(self._read(number, Box.of(intervals)), f"{path}:")
                low, high = min(low, float(least)), max(high, float(most))
        return low, high

    def block(self, grid: Grid, wanted: Box) -> Array:
        """Read this rank's box (1, C, d, h, w) of the box ``wanted``; every rank calls it.

        Beyond the volume, where ``wanted`` may reach, it holds the fill value.
        """
        where = str(self.paths[0])
        return read_block(self.read, self.shape, self.dtype, where, grid, wanted, self.fill)

    def read(self, box: Box) -> Array:
        """Read a box (C, d, h, w) as training does, so that the network sees what it knows."""
        if self.lattice == self.extents:
            values = self._stored(box)
        else:
            values = np.concatenate([self._resampled(c, box) for c in range(box.lo[0], box.hi[0])])
        return as_hu(values) if self.dtype == np.int16 else values.astype(self.dtype, copy=False)

    def _stored(self, box: Box) -> Array:
        if len(self.files) == 1:
            return self._read(0, box)
        inside = Box((0, *box.lo[1:]), (1, *box.hi[1:]))
        return np.concatenate([self._read(c, inside) for c in range(box.lo[0], box.hi[0])])

    def _read(self, number: int, box: Box) -> Array:
        """Read a box of a file that must not change meanwhile; what was unpacked does not."""
        path, file = self.paths[number], self.files[number]
        if file.path != path:
            return file.read(box)
        with unchanged(path, path.name, self.stamps[number]):
            return file.read(box)

    def _resampled(self, channel: int, box: Box) -> Array:
        def read(inside: Box) -> Array:
            return self._stored(Box((channel, *inside.lo), (channel + 1, *inside.hi)))[0]

        inside = Box(box.lo[1:], box.hi[1:])
        return blurred_linear_box(read, self.extents, inside, self.lattice)[None]

    def write(self, read: Callable[[Box], image.Mask], path: Path) -> None:
        """Write a mask, of which ``read`` gives boxes, on the file's own lattice."""
        image.write_mask(path, read, self.files[0])

    def close(self) -> None:
        for place in self.unpacked:
            place.unlink(missing_ok=True)


class ArrayVolume:
    """Reads volumes of arrays in files, every rank its own hyperslab; targets need not be there.

    ``source`` has the volumes of the file. ``affine`` is what `hyperslab convert` left of a scan.
    """

    def __init__(self, source: Source, fill: float, affine: NDArray[Any] | None = None) -> None:
        self.source = source
        self.fill = fill
        self.affine = None if affine is None else np.asarray(affine)
        self.shape = source.shape
        self.extents = source.shape[1:]

    def block(self, grid: Grid, wanted: Box) -> Array:
        """Read as `NiftiVolume.block`."""
        with closing(self.source):
            return block_of_sample(self.source, 0, grid, wanted, self.fill)

    def write(self, read: Callable[[Box], image.Mask], path: Path) -> None:
        """Write as `NiftiVolume.write`; without an affine where the file knows none."""
        affine = None if self.affine is None else self.affine[:, [2, 1, 0, 3]]
        image.write_layers(path, read, self.extents, StorageOrder("WHD"), affine, None)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def open_volume(
    entry: InputFile,
    about: DataCard,
    data: DataSection,
    grid: Grid,
    scratch: Path,
    *,
    native: bool = False,
    fill: float = 0,
) -> NiftiVolume | ArrayVolume:
    """Open a scan, arrays of one of the layouts that are known, or what a recipe says of its own.

    A packed scan is unpacked into the folder ``scratch``; every rank calls it.

    Raises:
        DataError: on every rank: not such a file, or of another size than the network's.
    """
    path = entry.path
    if about.classes and path.name.endswith(NIFTI):
        return NiftiVolume(entry.paths, about, grid, scratch, native=native, fill=fill)
    if data.mapping is None and not path.name.endswith(ARRAY_SUFFIXES):
        return _open_keyed(path, about, data, native=native, fill=fill)
    options = ScanOptions(data.channels, allowed=data.allowed, mapping=data.mapping)
    source: Source = broadcast_from_main(
        lambda: MappedFolder.of_volumes(entry.paths, options, about.whole[0]),
        failing=f"{path}: cannot be read",
        error=DataError,
    )
    _check_extents(path, source.shape[:1], about.whole[:1], "channels")
    _check_extents(path, source.shape[1:], about.whole[1:], "voxels")
    if about.classes and len(source.names) > 1:
        raise DataError(
            f"{path}: holds {len(source.names)} volumes, but a mask belongs to one\n"
            "    write each into a file of its own"
        )
    return ArrayVolume(source, fill)


def _open_keyed(
    path: Path, about: DataCard, data: DataSection, *, native: bool, fill: float
) -> ArrayVolume:
    """Open an HDF5 file or Zarr group; its channels may be more than the network was shown."""
    check_file_kind(path, (*(NIFTI if about.classes else ()), *KEYED_SUFFIXES, *ARRAY_SUFFIXES))
    folder: type[Hdf5Folder | ZarrFolder] = (
        ZarrFolder if kind_of_file(path) == "Zarr" else Hdf5Folder
    )
    options = ScanOptions(data.channels, data.format, allowed=data.allowed)
    found, affine = broadcast_from_main(
        lambda: folder.of_file(path.parent, path.name, options, about.file_shape),
        failing=f"{path}: cannot be read",
        error=DataError,
    )
    _check_extents(path, found.shape[:1], about.file_shape[:1], "channels")
    source: Source = found
    if about.stored_redshifts:
        found.redshifts = found.redshifts or about.stored_redshifts
        source = Selected(found, redshifts=about.redshifts)
    if not native and not about.varied:
        _check_extents(path, source.shape[1:], about.whole[1:], "voxels")
    return ArrayVolume(source, fill, affine)


def block_of_sample(source: Source, sample: int, grid: Grid, wanted: Box, fill: float = 0) -> Array:
    """Read this rank's box (1, C, d, h, w) of a sample of a source, as `read_block` does."""
    shape, dtype, where = source.shape, source.dtype, source.where(sample)
    read = partial(source.read, sample)
    return read_block(read, shape, dtype, where, grid, wanted, fill)


def read_block(
    read: Callable[[Box], Array],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    where: str,
    grid: Grid,
    wanted: Box,
    fill: float = 0,
) -> Array:
    """Read this rank's box (1, C, d, h, w) of the box ``wanted`` of a volume; all ranks call it.

    ``read`` gives boxes of the volume of ``shape``; beyond it the result holds ``fill``.

    Raises:
        DataError: on every rank, if one cannot read its box.
    """
    box = grid.partition((1, *wanted.shape)).box(grid.coords)
    mine = Box(box.lo[1:], box.hi[1:]).shift(wanted.lo)
    return collective_try(
        lambda: read_filled(read, Box.whole(shape), mine, fill, dtype)[None],
        failing=f"{where}: cannot be read",
        error=DataError,
    )


def _trained_lattice(scan: image.NiftiFile, about: DataCard) -> tuple[int, ...] | None:
    """Return the voxels (D, H, W) of a scan as the network was trained to see it; None: its own.

    Volumes of one shape have that; those of one size of a voxel have as many as that makes.
    """
    if not about.varied:
        return about.whole[1:]
    size = spacing(scan.affine)[:3]
    if not about.voxel or np.allclose(size, about.voxel, rtol=5e-2):
        return None
    extents = np.array(scan.shape[1:]) * size / np.array(about.voxel)
    return tuple(max(1, round(float(extent))) for extent in extents)


def _check_extents(path: Path, found: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: has {found} {what} but the network was trained on {wanted}")
