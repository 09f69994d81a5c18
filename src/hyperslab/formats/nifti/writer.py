"""NIfTI files of volumes and labels, named as LiTS's or the Decathlon's (the extra `medical`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any

import numpy as np

from hyperslab.formats.shared import optional
from hyperslab.formats.shared.labels import LIVER
from hyperslab.formats.source import Array, Source
from hyperslab.formats.writer import SampleToWrite, Writer, packed

LITS_NAME = re.compile(r"volume-(\d+)")
MOST_VOXELS = 32767
MSD_NAME = re.compile(r"liver_(\d+)")


class NiftiWriter(Writer):
    """One channel with labels, its axes along the patient's (RAS+)."""

    compressions = ("none", "gzip")
    labels = True

    def misfit(self, source: Source) -> str:
        if not source.classes:
            return "targets"
        if source.shape[0] != 1:
            return f"{source.shape[0]} channels"
        if source.dtype not in (np.dtype(np.int16), np.dtype(np.float32)):
            return f"{source.dtype.name}, which is read from it as float32"
        if max(source.shape) > MOST_VOXELS:
            return f"more than {MOST_VOXELS} voxels along a dim"
        if source.classes != LIVER:
            return f"the names of the classes {', '.join(source.classes)}"
        for name in source.names:
            if not any(kind.fullmatch(name.rpartition("/")[2]) for kind in (LITS_NAME, MSD_NAME)):
                return f"the name {name!r}: its files are known as volume-N or liver_N"
        return ""

    def names(self, source: Source, root: str) -> list[str]:
        return [name.rpartition("/")[2] for name in source.names]

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        suffix = ".nii" if compression == "none" else ".nii.gz"
        if MSD_NAME.fullmatch(name):
            return f"labelsTr/{name}{suffix}", f"imagesTr/{name}{suffix}"
        return f"{name.replace('volume', 'segmentation')}{suffix}", f"{name}{suffix}"

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        labels, volume = (folder / file for file in self.files(name, sample.compression))
        shape = sample.source.shape[1:]
        affine = sample.extras.affine
        for path, dtype, slabs in (
            (volume, sample.source.dtype, sample.values()),
            (labels, np.dtype(np.uint8), sample.labels()),
        ):
            with packed(path, sample.compression) as file:
                _write_header(file, shape, dtype, affine)
                for _, slab in slabs:  # (x, y, z), x fastest, is (D, H, W) in the order of C
                    file.write(np.ascontiguousarray(slab).tobytes())


def _write_header(
    file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], affine: Array | None
) -> None:
    """For voxels along (x, y, z); ``affine`` is of (d, h, w)."""
    header = optional.nibabel().Nifti1Header()
    header.set_data_dtype(dtype)
    header.set_data_shape(shape[::-1])
    xyz = np.eye(4) if affine is None else np.asarray(affine)[:, [2, 1, 0, 3]]
    header.set_zooms(np.linalg.norm(xyz[:3, :3], axis=0))
    header.set_sform(xyz, code="scanner")
    header.set_xyzt_units("mm")
    header.write_to(file)
