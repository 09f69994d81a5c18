"""Lists the files to be predicted, and looks at their headers; without torch.

In reading order: the files, and the names of their results; arrays and scans, and whether they
are of the kind that a network was trained on.

Legend: C channels, (D, H, W) voxels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays import scan
from hyperslab.formats.arrays.layouts import HDF5_SUFFIXES as HDF5
from hyperslab.formats.arrays.open import kind_of_file
from hyperslab.formats.arrays.source import Hdf5Folder, MappedFolder, ZarrFolder, numbers_of_volume
from hyperslab.formats.files import DataMap, check_names, walk_folder
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.image import NIFTI_SUFFIXES as NIFTI
from hyperslab.formats.nifti.source import DATASET_JSON, labels_of_list
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.tfrecord.source import TfRecordFolder
from hyperslab.formats.views import Selected
from hyperslab.recipe.data import DataSection
from hyperslab.recipe.schema import Recipe
from hyperslab.train.samples import WindowPolicy, check_windows

MASK_SUFFIXES = {"nifti": "-mask.nii.gz", "hdf5": "-mask.hdf5", "zarr": "-mask.zarr"}
"""Ends of the names of masks, by their formats."""

KEYED_SUFFIXES = (*HDF5, ".zarr")

ARRAY_SUFFIXES = (".npy", ".npz")
"""Files with these suffixes are looked for where a folder has no others."""

LABEL_FOLDERS = ("labelsTr", "labelsTs")
"""Folders of labels in the Decathlon's and nnU-Net's data sets."""

LISTS = (".json", ".csv")
"""Suffixes of lists of scans."""

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
    arguments: Sequence[Path],
    channels: int = 1,
    mapping: DataMap | None = None,
    labels: Sequence[Path] = (),
) -> list[InputFile]:
    """List the files given and those in and below the folders given, without labels and masks.

    Labels are known by their names, by lists in a folder, or are those given.

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
        if not argument.is_dir() or scan.is_one_file(argument):
            inputs = [InputFile(argument, input_name(argument.name))]
        else:
            inputs = _in_folder(argument, mapping, labels)
        for entry in _channels_grouped(inputs, channels):
            other = found.setdefault(entry.name, entry)
            if os.path.realpath(other.path) != os.path.realpath(entry.path):
                raise DataError(
                    f"{other.path} and {entry.path} would both be written as {entry.name}\n"
                    "    predict them into two folders"
                )
    return list(found.values())


def inputs_for(
    about: DataCard, arguments: Sequence[str | Path], data: DataSection
) -> list[InputFile]:
    """List the inputs of a network, without the labels of its training; raises as `list_inputs`."""
    channels = about.whole[0] if about.classes else 1
    labels: list[Path] = []
    if about.classes and data.path is not None:
        # `Path.is_dir` raises where it may not look: the data of the training need not be there.
        path = data.path / DATASET_JSON if os.path.isdir(data.path) else data.path
        labels = labels_of_list(path) if path.name.endswith(LISTS) else []
    return list_inputs([Path(path) for path in arguments], channels, data.mapping, labels)


def input_name(name: str) -> str:
    """Return a file's name without a suffix that says what it is."""
    suffixes = sorted((*NIFTI, *KEYED_SUFFIXES, *ARRAY_SUFFIXES), key=len, reverse=True)
    return name.removesuffix(next((s for s in suffixes if name.endswith(s)), ""))


def check_there(paths: Sequence[Path]) -> None:
    """Refuse files that are not there, and what is no file, such as a pipe (`DataError`)."""
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is not a file")


def check_file_kind(path: Path, kinds: Sequence[str]) -> None:
    """Refuse a file that ends as none of a network's ``kinds`` (`DataError`)."""
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


def _in_folder(folder: Path, mapping: DataMap | None, labels: Sequence[Path]) -> list[InputFile]:
    if mapping is None:
        return _files_below(folder, labels)
    of_files = bool(mapping.fields) and mapping.of_files
    if of_files or scan.files_matching(folder, mapping.files):
        return _files_of_mapping(folder, mapping)
    return _files_below(folder, labels)


def _files_below(folder: Path, known: Sequence[Path]) -> list[InputFile]:
    names = [name for name in walk_folder(folder) if scan.is_one_file(folder / name)]
    lists = [name for name in names if name.endswith(LISTS)]
    listed = [path for name in lists for path in labels_of_list(folder / name)]
    labels = {os.path.realpath(path) for path in (*known, *listed)}
    found = [
        name
        for name in names
        if name.endswith((*NIFTI, *KEYED_SUFFIXES))
        and not _is_label_or_mask(name)
        and os.path.realpath(folder / name) not in labels
    ]
    if not found and any(name.endswith(ARRAY_SUFFIXES) for name in names):
        found = scan.files_of_volumes(folder, DataMap())  # which knows fields of several kinds
        found = [
            name
            for name in found
            if name.endswith(ARRAY_SUFFIXES) and not name.endswith(scan.TARGET_SUFFIX)
        ]
        found = [name for name in found if scan.is_one_file(folder / name)]
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
        [_input_file(folder, name) for name in scan.files_of_volumes(folder, of, table)]
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
    labels = path.name.startswith("segmentation-") or path.parent.name in LABEL_FOLDERS
    return labels or path.name.endswith(tuple(MASK_SUFFIXES.values()))


def trained_on(checkpoint: Path) -> DataCard:
    """Read what a checkpoint says of the data of its network (`DataError`: nothing)."""
    about = DataCard.of_checkpoint(checkpoint)
    if about is None:
        raise DataError(
            f"the checkpoint {checkpoint} does not say what its network was trained on; "
            "use one that `hyperslab train` wrote"
        )
    return about


def is_scan(entry: InputFile, about: DataCard) -> bool:
    """Say whether an input is read as a scan; networks that predict numbers take arrays."""
    return bool(about.classes) and entry.path.name.endswith(NIFTI)


def open_scan(paths: Sequence[Path], about: DataCard) -> list[image.NiftiFile]:
    """Open the files of a scan.

    Raises:
        DataError: see `image.open_nifti` and `image.check_channels`; or it has other channels than
            those that the network was trained on.
    """
    check_there(paths)
    opened = [image.open_nifti(path) for path in paths]
    image.check_channels(opened)
    channels = opened[0].shape[0] if len(opened) == 1 else len(opened)
    if channels == about.whole[0]:
        return opened
    found = f"{channels} channel{'' if channels == 1 else 's'}"
    remedy = "give the one that it takes in a file of its own, 3-D"
    if about.whole[0] > 1:
        remedy = "give them along the fourth dim of a file, or as NAME_0000.nii.gz, "
        remedy += "NAME_0001.nii.gz"
    dims = len(opened[0].image.shape)
    words = f"is {dims}-D and has" if len(opened) == 1 and channels > 1 else "has"
    raise DataError(
        f"{paths[0]}: {words} {found} but the network was trained on "
        f"{', '.join(about.channels) or about.whole[0]}\n    {remedy}"
    )


def open_arrays(
    entry: InputFile, about: DataCard, data: DataSection, *, native: bool = False
) -> tuple[Source, NDArray[Any] | None]:
    """Open arrays of one of the layouts that are known, or what a recipe says of its own.

    Returns also what `hyperslab convert` left of a scan: its affine.

    Raises:
        DataError: not such a file, or of another size than the network's.
    """
    path = entry.path
    check_there(entry.paths)
    if path.name.endswith(NIFTI):  # which else would be looked for as `data.files`
        check_file_kind(path, (*KEYED_SUFFIXES, *ARRAY_SUFFIXES))
    if data.mapping is None and not path.name.endswith(ARRAY_SUFFIXES):
        return _open_keyed(path, about, data, native=native)
    options = ScanOptions(data.channels, allowed=data.allowed, mapping=data.mapping)
    source: Source = MappedFolder.of_volumes(entry.paths, options, about.whole[0])
    _check_extents(path, source.shape[:1], about.whole[:1], "channels")
    _check_extents(path, source.shape[1:], about.whole[1:], "voxels")
    if about.classes and len(source.names) > 1:
        raise DataError(
            f"{path}: holds {len(source.names)} volumes, but a mask belongs to one\n"
            "    write each into a file of its own"
        )
    return source, None


def _open_keyed(
    path: Path, about: DataCard, data: DataSection, *, native: bool
) -> tuple[Source, NDArray[Any] | None]:
    """Open an HDF5 file or Zarr group; its channels may be more than the network was shown."""
    check_file_kind(path, (*(NIFTI if about.classes else ()), *KEYED_SUFFIXES, *ARRAY_SUFFIXES))
    folder: type[Hdf5Folder | ZarrFolder] = (
        ZarrFolder if kind_of_file(path) == "Zarr" else Hdf5Folder
    )
    found, affine = folder.of_file(path.parent, path.name, data.scan_options, about.file_shape)
    _check_extents(path, found.shape[:1], about.file_shape[:1], "channels")
    source: Source = found
    if about.stored_redshifts:
        found.redshifts = found.redshifts or about.stored_redshifts
        source = Selected(found, redshifts=about.redshifts)
    if not native and not about.varied:
        remedy = "\n    --native predicts it as it is" if about.classes else ""
        _check_extents(path, source.shape[1:], about.whole[1:], "voxels", remedy)
    return source, affine


def _check_extents(
    path: Path, found: tuple[int, ...], wanted: tuple[int, ...], what: str, remedy: str = ""
) -> None:
    if found != wanted:
        has, trained = (" x ".join(map(str, shape)) for shape in (found, wanted))
        raise DataError(
            f"{path}: has {has} {what} but the network was trained on {trained}{remedy}"
        )


def check_prediction(
    recipe: Recipe, about: DataCard, windows: WindowPolicy | None, format: str
) -> None:
    """Refuse windows, or a format of masks, for which a network is not made (`DataError`)."""
    check_windows(windows, about.classes)
    if format not in MASK_SUFFIXES:
        raise DataError(f"format {format!r}: a mask is written as {', '.join(MASK_SUFFIXES)}")
    if format != "nifti" and not about.classes:
        raise DataError(f"{format} is a format of masks; this network gives numbers")
    if windows is not None and recipe.data.divides_by_mean:
        raise DataError(
            f"data.transform={recipe.data.transform} divides by the mean of a whole volume, "
            "which a window does not have\n    predict whole volumes: leave --window out"
        )


def check_any_readable(
    entries: Sequence[InputFile], about: DataCard, data: DataSection, *, native: bool
) -> None:
    """Refuse inputs of which none can be read, by their headers; stops at the first that can.

    Raises:
        DataError: says of each why.
    """
    reasons = []
    for entry in entries:
        try:
            if is_scan(entry, about):
                open_scan(entry.paths, about)
            else:
                open_arrays(entry, about, data, native=native)
            return
        except DataError as error:
            reasons.append(str(error))
    raise failed_inputs(reasons, len(entries))


def failed_inputs(reasons: Sequence[str], inputs: int) -> DataError:
    """Return the error that says of inputs why they could not be predicted."""
    lines = "\n".join(f"    {reason}" for reason in reasons)
    return DataError(f"{len(reasons)} of {inputs} inputs failed\n{lines}")
