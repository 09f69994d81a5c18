"""Lists and opens the volumes to be predicted, reads their boxes and writes their masks.

In reading order: the files to be predicted, and the names of their results; a volume by the kind
of its file, which says who reads what of it and how its mask is written.

Legend: C channels, (D, H, W) voxels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm import Grid
from hyperslab.comm.agreement import broadcast_from_main, collective_try
from hyperslab.data import Source
from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays.layouts import HDF5_SUFFIXES as HDF5
from hyperslab.formats.arrays.layouts import lbann_of
from hyperslab.formats.arrays.open import kind_of_file
from hyperslab.formats.arrays.scan import files_matching, files_of_volumes, is_one_file
from hyperslab.formats.arrays.source import Hdf5Folder, MappedFolder, ZarrFolder, numbers_of_volume
from hyperslab.formats.arrays.table import TARGET_SUFFIX
from hyperslab.formats.convert.scans import as_hu
from hyperslab.formats.files import walk_folder
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.image import NIFTI_SUFFIXES as NIFTI
from hyperslab.formats.nifti.resample import blurred_linear
from hyperslab.formats.source import Array, DataMap, ScanOptions
from hyperslab.formats.tfrecord.mlperf import TfRecordFolder
from hyperslab.formats.views import Selected, read_filled, take_filled
from hyperslab.geometry import Box
from hyperslab.recipe.data import DataSection
from hyperslab.tensor.root_rank import scatter_from_main

KEYED_SUFFIXES = (*HDF5, ".zarr")

ARRAY_SUFFIXES = (".npy", ".npz")
"""Files with these suffixes are looked for where a folder has no others."""

MASK_SUFFIX = "-mask.nii.gz"

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
        """Return the paths of all channels."""
        return self.path, *self.channels

    @property
    def mask(self) -> str:
        """Return the name of the file of its mask."""
        return f"{self.name}{MASK_SUFFIX}"


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
    """Check that a file is there and its name ends as one of the ``kinds`` that a network takes.

    Raises:
        DataError: it is not.
    """
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
    return labels or path.name.endswith(MASK_SUFFIX)


Mask = NDArray[np.uint8]


class NiftiVolume:
    """Reads a volume of ``shape`` (C, D, H, W) from NIfTI files, on the lattice of the network.

    The main rank resamples it and scatters it.

    A compressed file can be read from its beginning only, so the others would gain nothing.
    ``paths``: one, or one for each channel.

    Raises:
        DataError: on every rank; see `image.read_channels`.
    """

    def __init__(
        self, paths: Sequence[Path], about: DataCard, *, native: bool, fill: float = 0
    ) -> None:
        self.values: Array | None = None
        self.scan: image.CtVolume | None = None
        self.about = about
        self.fill = fill
        self.shape = broadcast_from_main(
            lambda: self._read(paths, native),
            failing=f"{paths[0]}: cannot be read",
            error=DataError,
        )
        if self.shape[0] != about.whole[0]:
            found = f"{self.shape[0]} channel{'' if self.shape[0] == 1 else 's'}"
            remedy = "give the one that it takes in a file of its own, 3-D"
            if about.whole[0] > 1:
                remedy = "give them along the fourth dim of a file, or as NAME_0000.nii.gz, "
                remedy += "NAME_0001.nii.gz"
            words = "is 4-D and has" if len(paths) == 1 and self.shape[0] > 1 else "has"
            raise DataError(
                f"{paths[0]}: {words} {found} but the network was trained on "
                f"{', '.join(about.channels) or about.whole[0]}\n    {remedy}"
            )

    def _read(self, paths: Sequence[Path], native: bool) -> tuple[int, ...]:
        """Read the scan as training does, so that the network sees what it was trained on."""
        self.scan = image.read_channels(paths)
        values = self.scan.values
        lattice = None if native else _trained_lattice(self.scan, self.about)
        if lattice is not None and lattice != values.shape[1:]:
            values = np.stack([blurred_linear(channel, lattice) for channel in values])
        stored = np.dtype(self.about.dtype)
        self.values = as_hu(values) if stored == np.int16 else values.astype(stored, copy=False)
        return self.values.shape

    def block(self, grid: Grid, wanted: Box) -> Array:
        """Read this rank's box (1, C, d, h, w) of the box ``wanted``; every rank calls it.

        Beyond the volume, where ``wanted`` may reach, it holds the fill value.
        """
        part = None
        if self.values is not None:
            part = take_filled(self.values, wanted, self.fill)[None]
        dtype = np.dtype(self.about.dtype)
        return scatter_from_main(part, grid.partition((1, *wanted.shape)), dtype, grid)

    def write(self, mask: Mask, path: Path) -> None:
        """Write the mask (D, H, W) on the file's own lattice; the main rank calls it."""
        assert self.scan is not None
        image.write_mask(path, mask, self.scan)


class ArrayVolume:
    """Reads volumes of arrays in files, every rank its own hyperslab; targets need not be there.

    ``source`` has the volumes of the file. ``affine`` is what `hyperslab convert` left of a scan.
    """

    def __init__(self, source: Source, fill: float, affine: NDArray[Any] | None = None) -> None:
        self.source = source
        self.fill = fill
        self.affine = affine
        self.shape = source.shape

    def block(self, grid: Grid, wanted: Box) -> Array:
        """Read as `NiftiVolume.block`."""
        with closing(self.source):
            return read_block(self.source, 0, grid, wanted, self.fill)

    def write(self, mask: Mask, path: Path) -> None:
        """Write as `NiftiVolume.write`; without an affine where the file knows none."""
        affine = None if self.affine is None else np.asarray(self.affine)[:, [2, 1, 0, 3]]
        image.save_image(path, mask.transpose(2, 1, 0), np.dtype(np.uint8), affine, None)


def open_volume(
    entry: InputFile, about: DataCard, data: DataSection, *, native: bool = False, fill: float = 0
) -> NiftiVolume | ArrayVolume:
    """Open a scan, arrays of one of the layouts that are known, or what a recipe says of its own.

    Raises:
        DataError: on every rank: not such a file, or of another size than the network's.
    """
    path = entry.path
    if about.classes and path.name.endswith(NIFTI):
        return NiftiVolume(entry.paths, about, native=native, fill=fill)
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
            f"{path}: holds {len(source.names)} volumes; a mask is that of one\n"
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
    lbann = lbann_of(data.format)
    found, affine = broadcast_from_main(
        lambda: folder.of_volume(path, about.file_shape, data.channels, lbann, data.allowed),
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


def read_block(source: Source, sample: int, grid: Grid, wanted: Box, fill: float = 0) -> Array:
    """Read this rank's box (1, C, d, h, w) of the box ``wanted`` of a sample; all ranks call it.

    Beyond the sample it holds ``fill``.

    Raises:
        DataError: on every rank, if one cannot read its box.
    """
    box = grid.partition((1, *wanted.shape)).box(grid.coords)
    mine = Box(box.lo[1:], box.hi[1:]).shift(wanted.lo)
    return collective_try(
        lambda: read_filled(
            lambda inside: source.read(sample, inside),
            Box.whole(source.shape),
            mine,
            fill,
            source.dtype,
        )[None],
        failing=f"{source.where(sample)}: cannot be read",
        error=DataError,
    )


def _trained_lattice(scan: image.CtVolume, about: DataCard) -> tuple[int, ...] | None:
    """Return the voxels (D, H, W) of a scan as the network was trained to see it; None: its own.

    Volumes of one shape have that; those of one size of a voxel have as many as that makes.
    """
    if not about.varied:
        return about.whole[1:]
    if not about.voxel or np.allclose(scan.spacing, about.voxel, rtol=5e-2):
        return None
    extents = np.array(scan.values.shape[1:]) * scan.spacing / np.array(about.voxel)
    return tuple(max(1, round(float(extent))) for extent in extents)


def _check_extents(path: Path, found: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: has {found} {what} but the network was trained on {wanted}")
