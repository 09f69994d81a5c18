"""What is to be predicted, and under which name the result is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import HDF5_SUFFIXES as HDF5
from hyperslab.formats.nifti.image import NIFTI_SUFFIXES as NIFTI

MASK = "-mask.nii.gz"

CHANNEL = re.compile(r"(.+)_(\d{4})(\.nii(?:\.gz)?)")
"""The name of a file of one channel, as nnU-Net has them."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file, and the ``name`` of its result: a path below the output folder, without suffix."""

    path: Path
    name: str
    channels: tuple[Path, ...] = ()  # the files of those after the first

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those of all channels."""
        return self.path, *self.channels

    @property
    def mask(self) -> str:
        """The name of the file of its mask."""
        return f"{self.name}{MASK}"


def list_inputs(arguments: Sequence[Path], channels: int = 1) -> list[Input]:
    """The files given and those in the folders given and below; labels and masks are left out.

    Of several ``channels`` in files of their own, as nnU-Net has them, the first one stands for
    all: ``case_0000.nii.gz``, ``case_0001.nii.gz`` become the input ``case``.

    Raises:
        DataError: a folder has no such file, or two files would be written to one place.
    """
    found: dict[str, Input] = {}
    for argument in arguments:
        inputs = (
            _below(argument) if argument.is_dir() else [Input(argument, input_name(argument.name))]
        )
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
    known = next((s for s in sorted((*NIFTI, *HDF5), key=len)[::-1] if name.endswith(s)), "")
    return name.removesuffix(known)


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


def _below(folder: Path) -> list[Input]:
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith((*NIFTI, *HDF5)))
    inputs = [
        Input(path, (path.parent.relative_to(folder) / input_name(path.name)).as_posix())
        for path in paths
        if path.is_file() and not _left_out(path.relative_to(folder))
    ]
    if not inputs:
        raise DataError(f"{folder}: no *{' or *'.join((*NIFTI, *HDF5))} to predict in it or below")
    return inputs


def _left_out(path: Path) -> bool:
    """Hidden files, labels by their names in the public data sets, and what was predicted."""
    hidden = any(part.startswith(".") for part in path.parts)
    labels = path.name.startswith("segmentation-") or path.parent.name == "labelsTr"
    return hidden or labels or path.name.endswith(MASK)
