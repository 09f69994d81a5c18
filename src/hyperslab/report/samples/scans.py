"""Scans of a run with their true and their predicted classes, read where they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.data import Source
from hyperslab.errors import DataError
from hyperslab.formats.shared.labels import LIVER
from hyperslab.geometry import Box
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.volumes import (
    open_volume,
    other_volumes,
    synthetic_volumes,
    volume_files,
)
from hyperslab.report.samples.voxels import Voxels, voxels_of

Slice = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Scan:
    """The three planes of a scan through the centre of what is not background.

    ``values`` of the first channel, ``true`` and ``predicted`` classes, each by the axis that the
    plane is across: ``values["depth"]`` is (height, width), and so on. ``at`` is where the planes
    lie.
    """

    sample: str
    shape: tuple[int, ...]
    at: Mapping[str, int]
    values: Mapping[str, Slice]
    true: Mapping[str, Slice]
    predicted: Mapping[str, Slice]
    voxels: Voxels
    quantity: str


def scans(run: Run) -> list[Scan]:
    """The scans whose masks the evaluation has kept; none if it has kept none.

    Raises:
        DataError: a file is broken, or the scans are not there any more.
    """
    path = run.path / "evaluation" / "masks.npz"
    if not path.exists():
        return []
    try:
        with np.load(path) as file:
            samples = [str(sample) for sample in file["samples"].tolist()]
            masks: list[NDArray[np.uint8]] = (
                list(file["masks"])
                if "masks" in file
                else [file[f"mask_{number}"] for number in range(len(samples))]
            )
    except Exception as error:  # damaged bytes can raise anything, and stand for any size
        raise DataError(f"{path} holds no masks: {error}") from error
    return [_scan(run, sample, mask) for sample, mask in zip(samples, masks, strict=False)]


def _scan(run: Run, sample: str, predicted: NDArray[np.uint8]) -> Scan:
    source = _find(run, sample)
    try:
        if sample not in source.names:
            raise DataError(f"{run.setting('data.path')} has no {sample} (any more)")
        index = list(source.names).index(sample)
        extents = source.shape_of(index)[1:]
        true = source.labels(index, Box.whole(extents))
        if true.shape != predicted.shape:
            raise DataError(f"{source.where(index)}: {true.shape} voxels, a mask {predicted.shape}")
        voxels = voxels_of(source, index)
        at = dict(zip(SPATIAL_AXES, _centre(true), strict=True))
        values = {}
        for dim, axis in enumerate(SPATIAL_AXES):
            lo = [0, 0, 0, 0]
            hi = [1, *extents]
            lo[dim + 1] = at[axis]
            hi[dim + 1] = at[axis] + 1
            values[axis] = source.read(index, Box(tuple(lo), tuple(hi))).squeeze((0, dim + 1))
    finally:
        source.close()
    quantity = "HU" if source.classes == LIVER else "intensity"
    planes = (_planes(true, at), _planes(predicted, at))
    return Scan(sample, extents, at, values, *planes, voxels, quantity)


def _planes(classes: Slice, at: Mapping[str, int]) -> dict[str, Slice]:
    return {axis: classes.take(at[axis], dim) for dim, axis in enumerate(SPATIAL_AXES)}


def _find(run: Run, sample: str) -> Source:
    """The file that the sample is or is a part of, or the source that makes it."""
    source = synthetic_volumes(run) or other_volumes(run)
    if source is not None:
        return source
    folder = Path(str(run.setting("data.path")))
    parts = run.setting("data.subvolume") is not None
    for file in volume_files(run):
        name = file.relative_to(folder).as_posix().rpartition(".")[0]
        if name == sample or (parts and name == sample.rsplit("_", 3)[0]):
            return open_volume(run, file)
    raise DataError(f"{folder} has no {sample} (any more)")


def _centre(true: NDArray[np.uint8]) -> list[int]:
    """Of what is not background; of the whole where there is nothing else."""
    places = np.argwhere(true > 0)
    if not len(places):
        return [extent // 2 for extent in true.shape]
    return [int(place) for place in places.mean(0).round()]
