"""What is to be predicted, and under which name the result is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hyperslab.errors import DataError, printable
from hyperslab.formats.keyed.catalog import HDF5_SUFFIXES as HDF5
from hyperslab.formats.mapped.fields import numbers_of_volume
from hyperslab.formats.mapped.scan import files_of_volumes, is_one_file, matching
from hyperslab.formats.nifti.image import NIFTI_SUFFIXES as NIFTI
from hyperslab.formats.npy.source import TARGET
from hyperslab.formats.shared.data_map import DataMap
from hyperslab.formats.shared.listing import walk
from hyperslab.formats.tfrecord.source import TfRecordFolder

KEYED = (*HDF5, ".zarr")

ARRAYS = (".npy", ".npz")
"""Files that are known by their suffix alone: looked for where a folder has no others."""

MASK = "-mask.nii.gz"

CHANNEL = re.compile(r"(.+)_(\d{4})(\.nii(?:\.gz)?)")
"""The name of a file of one channel, as nnU-Net has them."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file, and the ``name`` of its result: a path below the output folder, without suffix."""

    path: Path
    name: str
    channels: tuple[Path, ...] = ()  # the files of those after the first, or of other fields

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those of all channels."""
        return self.path, *self.channels

    @property
    def mask(self) -> str:
        """The name of the file of its mask."""
        return f"{self.name}{MASK}"


def list_inputs(
    arguments: Sequence[Path], channels: int = 1, mapping: DataMap | None = None
) -> list[Input]:
    """The files given and those in the folders given and below; labels and masks are left out.

    With a ``mapping`` a folder's files are those that training would take; if there are none, as
    without. Where each of several fields has files of its own, those of one number are one input.

    Of several ``channels`` in files of their own, as nnU-Net has them, the first one stands for
    all: ``case_0000.nii.gz``, ``case_0001.nii.gz`` become the input ``case``.

    Raises:
        DataError: a folder has no such file, two files would be written to one place, or fields
            do not belong together.
    """
    found: dict[str, Input] = {}
    for argument in arguments:
        if not argument.is_dir() or is_one_file(argument):
            inputs = [Input(argument, input_name(argument.name))]
        else:
            inputs = _in_folder(argument, mapping)
        for entry in _grouped(inputs, channels):
            other = found.setdefault(entry.name, entry)
            if other.path.absolute() != entry.path.absolute():
                raise DataError(
                    f"{other.path} and {entry.path} would both be written as {entry.name}\n"
                    "    predict them into two folders"
                )
    return list(found.values())


def input_name(name: str) -> str:
    """A file's name without a suffix that says what it is."""
    suffixes = sorted((*NIFTI, *KEYED, *ARRAYS), key=len, reverse=True)
    return name.removesuffix(next((s for s in suffixes if name.endswith(s)), ""))


def check_kind(path: Path, kinds: Sequence[str]) -> None:
    """Nothing, if a file is there whose name ends as one of the ``kinds`` that a network takes.

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


def _grouped(inputs: Sequence[Input], channels: int) -> list[Input]:
    if channels == 1:
        return list(inputs)
    found: dict[Path, Input] = {}
    for entry in inputs:
        match = CHANNEL.fullmatch(entry.path.name)
        if match is None:
            found[entry.path] = entry
            continue
        first, *others = (
            entry.path.with_name(f"{match[1]}_{number:04}{match[3]}") for number in range(channels)
        )
        name = f"{entry.name.removesuffix(match[1] + '_' + match[2])}{match[1]}"
        found[first] = Input(first, name, tuple(others))
    return list(found.values())


def _in_folder(folder: Path, mapping: DataMap | None) -> list[Input]:
    if mapping is None:
        return _below(folder)
    of_files = bool(mapping.fields) and mapping.of_files
    if of_files or matching(folder, mapping.files):
        return _mapped(folder, mapping)
    return _below(folder)


def _below(folder: Path) -> list[Input]:
    names = [name for name in walk(folder) if is_one_file(folder / name)]
    found = [name for name in names if name.endswith((*NIFTI, *KEYED)) and not _left_out(name)]
    if not found and any(name.endswith(ARRAYS) for name in names):
        found = files_of_volumes(folder, DataMap())  # which knows fields of several kinds
        found = [name for name in found if name.endswith(ARRAYS) and not name.endswith(TARGET)]
        found = [name for name in found if is_one_file(folder / name)]
    if found:
        return [_input(folder, name) for name in found]
    for name in names:
        _check_no_records(folder / name)
    kinds = " or *".join((*NIFTI, *KEYED, *ARRAYS))
    raise DataError(f"{folder}: no *{kinds} to predict in it or below")


def _mapped(folder: Path, mapping: DataMap) -> list[Input]:
    said = mapping.without_targets
    table = None if mapping.table is None else folder / mapping.table
    if not said.of_files:
        said = replace(said, fields=())
    columns = [
        [_input(folder, name) for name in files_of_volumes(folder, of, table)]
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


def _input(folder: Path, name: str) -> Input:
    return Input(folder / name, (Path(name).parent / input_name(Path(name).name)).as_posix())


def _left_out(name: str) -> bool:
    """Labels by their names in the public data sets, and what was predicted."""
    path = Path(name)
    labels = path.name.startswith("segmentation-") or path.parent.name == "labelsTr"
    return labels or path.name.endswith(MASK)
