"""Reads the volumes of a run's data set that its page shows, each file opened alone.

The middle planes of one universe, or the planes of scans with their true and their predicted
classes; how large their voxels are and where their axes point, as far as the files say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.data import Hdf5Folder, Source, Subvolumes
from hyperslab.errors import DataError
from hyperslab.formats.arrays.layouts import HDF5_SUFFIXES
from hyperslab.formats.registry import find_format, named, scanned
from hyperslab.formats.source import Extras, ScanOptions, SourceView
from hyperslab.formats.targets import LIVER
from hyperslab.formats.views import selected
from hyperslab.geometry import Box
from hyperslab.recipe.data import DataSection
from hyperslab.simulate.parameters import FIDUCIAL_H_0
from hyperslab.studies.run_folder import Run

DATA_KEYS = (
    *("path", "synthetic", "format", "channels", "redshifts", "targets", "subvolume"),
    *("files", "keys", "table", "columns", "ranges", "classes", "outside_files", "missing_chunks"),
)
"""Lists the keys of a recipe's data that say what a volume is; a report runs no plugins."""


def first_volume(run: Run) -> Source:
    """Opens a source whose first sample is the run's first volume.

    Raises:
        DataError: the folder of volumes is not there, holds none, or the file is broken.
    """
    return _open_volumes(run, lambda folder, files: min(files))


def _open_volumes(run: Run, choose: Callable[[Path, list[Path]], Path]) -> Source:
    """Opens a run's volumes as it saw them; of plain HDF5 files the chosen one alone.

    Raises:
        DataError: the folder of volumes is not there, holds none, or a file is broken.
    """
    if made := run.setting("data.target") or run.setting("data.python_class"):
        raise DataError(f"its volumes come from {made}, which a report does not run")
    said = {key: run.setting(f"data.{key}") for key in DATA_KEYS}
    if said["path"] is None and said["synthetic"] is None:
        raise DataError("its volumes are where data.train says, not in one folder data.path")
    given = {key: value for key, value in said.items() if value is not None}
    try:
        data = DataSection.model_validate({"batch_size": 1, **given})
    except ValidationError as error:
        raise DataError(f"{run.path / 'recipe.yaml'}: data: {error}") from None
    if data.synthetic is not None:
        source: Source = data.synthetic.source()
    else:
        assert data.path is not None
        source = _open_folder(data.path, data, choose)
    source = selected(source, data.redshifts, data.targets)
    return source if data.subvolume is None else Subvolumes(source, data.subvolume)


def _open_folder(
    folder: Path, data: DataSection, choose: Callable[[Path, list[Path]], Path]
) -> Source:
    options = ScanOptions(data.channels, data.format, allowed=data.allowed, mapping=data.mapping)
    if os.path.exists(folder):  # False for names that no system takes, too
        if options.mapping is None and options.format is None:
            options = replace(options, format=find_format(folder)[0].name)
        if options.mapping is not None or named(str(options.format)).source is not Hdf5Folder:
            return scanned(folder, options)[0]
    files = (
        [p for p in folder.rglob("*") if p.suffix in HDF5_SUFFIXES] if os.path.isdir(folder) else []
    )
    if not files:
        raise DataError(f"{folder} is not a folder of volumes (any more)")
    file = choose(folder, files).relative_to(folder).as_posix()
    return Hdf5Folder.of_file(folder, file, replace(options, format=data.format))


DIRECTIONS = (("L", "R"), ("P", "A"), ("I", "S"))
"""Names the ends of x, y, z in RAS+: left, right, posterior, anterior, inferior, superior."""


@dataclass(frozen=True, slots=True)
class Voxels:
    """Holds a voxel's size by axis in ``unit``, which is empty where voxels are counted.

    ``ends``: by axis, the letters of the patient's sides where it begins and ends; empty where
    they are not known.
    """

    sizes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SPATIAL_AXES, 1.0))
    unit: str = ""
    ends: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def title(self, axis: str) -> str:
        """Writes the title of a picture's axis, such as ``height [mm]``."""
        return f"{axis} [{self.unit}]" if self.unit else axis


def voxels_of(source: Source, sample: int) -> Voxels:
    """Finds a sample's voxels by the file's affine [mm], or by a simulated universe's side.

    Raises:
        DataError: the file cannot be read.
    """
    while isinstance(source, SourceView):  # its samples have the voxels of the whole
        source, sample = source.origin(sample)
    extras = source.extras(sample)
    if extras.affine is not None:
        return voxels_of_affine(extras.affine)
    side = _universe_side(extras)
    if side is None:
        return Voxels()
    extents = zip(SPATIAL_AXES, source.shape_of(sample)[1:], strict=True)
    return Voxels({axis: side / extent for axis, extent in extents}, "Mpc/h")


def voxels_of_affine(affine: object) -> Voxels:
    """Reads sizes and ends off an affine (d, h, w, 1) to (x, y, z, 1) [mm], RAS+.

    >>> voxels_of_affine([[0, 0, -2, 0], [0, 1, 0, 0], [5, 0, 0, 0], [0, 0, 0, 1]]).ends["width"]
    ('R', 'L')
    """
    turns = np.asarray(affine, np.float64)[:3, :3]
    sizes = np.linalg.norm(turns, axis=0)
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        return Voxels()
    ends = {}
    for axis, column in zip(SPATIAL_AXES, turns.T, strict=True):
        main = int(np.abs(column).argmax())
        low, high = DIRECTIONS[main]
        ends[axis] = (low, high) if column[main] > 0 else (high, low)
    return Voxels(dict(zip(SPATIAL_AXES, sizes.tolist(), strict=True)), "mm", ends)


def _universe_side(extras: Extras) -> float | None:
    """Computes the side [Mpc/h] that `hyperslab simulate` notes, for this universe's own H_0."""
    box = extras.attributes.get("box_size")
    physical = extras.arrays.get("physPar")
    if not isinstance(box, (int, float)) or physical is None or "H_0" not in extras.names:
        return None
    side = float(box) * float(physical[extras.names.index("H_0")]) / FIDUCIAL_H_0
    return side if np.isfinite(side) and side > 0 else None


PlaneValues = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Planes:
    """Holds the three planes of a volume that cross at a voxel, each by the axis it is across.

    ``values["depth"]`` is (height, width), and so on, of what ``quantity`` says; ``at`` is where
    the planes lie.
    """

    sample: str
    shape: tuple[int, ...]
    at: Mapping[str, int]
    values: Mapping[str, PlaneValues]
    voxels: Voxels
    quantity: str


@dataclass(frozen=True, slots=True)
class Scan(Planes):
    """Holds planes of a scan, and the classes there that are true and that were predicted."""

    true: Mapping[str, PlaneValues]
    predicted: Mapping[str, PlaneValues]


def middle_planes(run: Run) -> Planes:
    """Reads the three middle planes of one sample, first channel; of counts log(1 + count).

    Raises:
        DataError: the folder of universes is not there, holds none, or the file is broken.
    """
    source = first_volume(run)
    try:
        extents = zip(SPATIAL_AXES, source.shape_of(0)[1:], strict=True)
        planes = _planes_through(source, 0, {axis: extent // 2 for axis, extent in extents})
    finally:
        source.close()
    counts = source.dtype.kind in "iu"
    if not (counts or min(float(plane.min()) for plane in planes.values.values()) >= 0):
        return planes  # some are below zero, or no numbers
    values = {axis: np.log1p(plane.clip(min=0)) for axis, plane in planes.values.items()}
    return replace(planes, values=values, quantity="log(1 + count)" if counts else "log(1 + value)")


def _planes_through(source: Source, sample: int, at: Mapping[str, int]) -> Planes:
    """Reads the first channel's planes that cross at a voxel."""
    shape = source.shape_of(sample)[1:]
    values = {}
    for dim, axis in enumerate(SPATIAL_AXES, start=1):
        lo = [0, 0, 0, 0]
        hi = [1, *shape]
        lo[dim] = at[axis]
        hi[dim] = at[axis] + 1
        plane = source.read(sample, Box(tuple(lo), tuple(hi))).squeeze((0, dim))
        values[axis] = plane.astype(np.float64)
    return Planes(source.names[sample], shape, at, values, voxels_of(source, sample), "value")


def scans(run: Run) -> list[Scan]:
    """Reads the scans whose masks the evaluation has kept; none if it has kept none.

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
    return [_read_scan(run, sample, mask) for sample, mask in zip(samples, masks, strict=False)]


def _read_scan(run: Run, sample: str, predicted: NDArray[np.uint8]) -> Scan:
    def choose(folder: Path, files: list[Path]) -> Path:
        """Chooses the file that has the sample, or the volume of which it is a part."""
        whole = sample.rsplit("_", 3)[0] if run.setting("data.subvolume") else sample
        for file in files:
            if file.relative_to(folder).as_posix().rpartition(".")[0] in (sample, whole):
                return file
        raise DataError(f"{folder} has no {sample} (any more)")

    source = _open_volumes(run, choose)
    try:
        if sample not in source.names:
            raise DataError(f"{run.setting('data.path')} has no {sample} (any more)")
        index = list(source.names).index(sample)
        true = source.labels(index, Box.whole(source.shape_of(index)[1:]))
        if true.shape != predicted.shape:
            raise DataError(f"{source.where(index)}: {true.shape} voxels, a mask {predicted.shape}")
        at = dict(zip(SPATIAL_AXES, _foreground_centre(true), strict=True))
        planes = _planes_through(source, index, at)
    finally:
        source.close()
    both: tuple[PlaneValues, ...] = (true, predicted)
    masks = [
        {axis: classes.take(at[axis], dim) for dim, axis in enumerate(SPATIAL_AXES)}
        for classes in both
    ]
    quantity = "HU" if source.classes == LIVER else "intensity"
    return Scan(sample, planes.shape, at, planes.values, planes.voxels, quantity, *masks)


def _foreground_centre(true: NDArray[np.uint8]) -> list[int]:
    """Finds the centre of what is not background, or of the whole without any."""
    places = np.argwhere(true > 0)
    if not len(places):
        return [extent // 2 for extent in true.shape]
    return [int(place) for place in places.mean(0).round()]
