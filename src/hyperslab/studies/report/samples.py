"""Reads the volumes of a run's data set that its page shows, each file opened alone.

The middle planes of one universe, or the planes of scans with their true and their predicted
classes; how large their voxels are and where their axes point, as far as the files say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.data import Hdf5Folder, Source, Subvolumes
from hyperslab.errors import DataError
from hyperslab.formats.arrays.layouts import HDF5_SUFFIXES
from hyperslab.formats.arrays.source import MappedFolder
from hyperslab.formats.files import AccessPolicy
from hyperslab.formats.registry import find_format, named
from hyperslab.formats.source import DataMap, Extras, ScanOptions
from hyperslab.formats.targets import LIVER
from hyperslab.formats.views import Selected, selected
from hyperslab.geometry import Box
from hyperslab.recipe.data import DataSection, SyntheticSection
from hyperslab.simulate.parameters import FIDUCIAL_H_0
from hyperslab.studies.run_folder import Run


def first_volume(run: Run) -> Source:
    """Opens a source whose first sample is the run's first volume.

    Raises:
        DataError: the folder of volumes is not there, holds none, or the file is broken.
    """
    if source := run.setting("data.target") or run.setting("data.python_class"):
        raise DataError(f"its volumes come from {source}, which a report does not run")
    found = synthetic_volumes(run) or other_volumes(run)
    return found or open_volume(run, min(volume_files(run)))


def synthetic_volumes(run: Run) -> Source | None:
    """Makes the volumes of a run that has none in files.

    Raises:
        DataError: its recipe describes none.
    """
    described = run.setting("data.synthetic")
    if described is None:
        return None
    try:
        source = SyntheticSection.model_validate(described).source()
    except ValidationError as error:
        raise DataError(f"{run.path / 'recipe.yaml'}: data.synthetic: {error}") from None
    return _selected_parts(run, source)


def other_volumes(run: Run) -> Source | None:
    """Opens the samples of a run whose files are not plain HDF5.

    Raises:
        DataError: one of the files is broken.
    """
    path = Path(str(run.setting("data.path")))
    if not path.exists():
        return None
    mapping = _data_map(run)
    if mapping is not None:
        options = ScanOptions(
            run.setting("data.channels"), allowed=_file_access(run), mapping=mapping
        )
        return _selected_parts(run, MappedFolder.open_folder(path, options))
    name = run.setting("data.format")
    found = named(str(name)) if name else find_format(path)[0]
    if found.source is Hdf5Folder:
        return None
    options = ScanOptions(run.setting("data.channels"), name, allowed=_file_access(run))
    return _selected_parts(run, found.source.open_folder(path, options))


def volume_files(run: Run) -> list[Path]:
    """Lists the files of the run's volumes.

    Raises:
        DataError: the folder is not there or holds none.
    """
    if run.setting("data.path") is None:
        raise DataError("its volumes are where data.train says, not in one folder data.path")
    folder = Path(str(run.setting("data.path")))
    files = [p for p in folder.rglob("*") if p.suffix in HDF5_SUFFIXES] if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} is not a folder of volumes (any more)")
    return files


def open_volume(run: Run, file: Path) -> Source:
    """Opens one file of the run's folder as a source of its own.

    Raises:
        DataError: the file is broken.
    """
    folder = Path(str(run.setting("data.path")))
    name = file.relative_to(folder).as_posix()
    options = ScanOptions(
        run.setting("data.channels"), run.setting("data.format"), allowed=_file_access(run)
    )
    return _selected_parts(run, Hdf5Folder.of_file(folder, name, options))


def _data_map(run: Run) -> DataMap | None:
    """Reads from the recipe where volumes and targets are.

    Raises:
        DataError: it is not what a recipe may say.
    """
    keys = ("files", "keys", "table", "columns", "ranges", "classes")
    said = {key: run.setting(f"data.{key}") for key in keys}
    said = {key: value for key, value in said.items() if value is not None}
    try:
        return DataSection.model_validate({"path": "", "batch_size": 1, **said}).mapping
    except ValidationError as error:
        raise DataError(f"{run.path / 'recipe.yaml'}: data: {error}") from None


def _file_access(run: Run) -> AccessPolicy:
    return AccessPolicy(
        outside_files=bool(run.setting("data.outside_files")),
        missing_chunks=bool(run.setting("data.missing_chunks")),
    )


def _selected_parts(run: Run, source: Source) -> Source:
    """Selects the channels that were shown, and cuts volumes as the run did."""
    source = selected(source, run.setting("data.redshifts"), run.setting("data.targets"))
    width = run.setting("data.subvolume")
    return Subvolumes(source, int(width)) if width else source


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
    while isinstance(source, (Subvolumes, Selected)):  # their parts have the voxels of the whole
        sample = sample // len(source.places) if isinstance(source, Subvolumes) else sample
        source = source.source
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


@dataclass(frozen=True, slots=True)
class MiddlePlanes:
    """Holds the three middle planes of a volume; each is named by the axis it is across.

    ``values["depth"]`` is (height, width), and so on, of what ``quantity`` says.
    """

    sample: str
    shape: tuple[int, int, int]
    values: Mapping[str, NDArray[np.float64]]
    voxels: Voxels
    quantity: str


def middle_planes(run: Run) -> MiddlePlanes:
    """Reads the three middle planes of one sample, first channel; of counts log(1 + count).

    Raises:
        DataError: the folder of universes is not there, holds none, or the file is broken.
    """
    source = first_volume(run)
    _, *extents = source.shape_of(0)
    planes = {}
    counts = source.dtype.kind in "iu"
    try:
        for i, axis in enumerate(SPATIAL_AXES):
            lo = [0, 0, 0, 0]
            hi = [1, *extents]
            lo[i + 1] = extents[i] // 2
            hi[i + 1] = lo[i + 1] + 1
            values = source.read(0, Box(tuple(lo), tuple(hi))).squeeze((0, i + 1))
            planes[axis] = values.astype(np.float64)
        voxels = voxels_of(source, 0)
    finally:
        source.close()
    quantity = "value"
    if counts or min(float(plane.min()) for plane in planes.values()) >= 0:
        quantity = "log(1 + count)" if counts else "log(1 + value)"
        planes = {axis: np.log1p(plane.clip(min=0)) for axis, plane in planes.items()}
    shape = (extents[0], extents[1], extents[2])
    return MiddlePlanes(source.names[0], shape, planes, voxels, quantity)


PlaneValues = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Scan:
    """Holds the three planes of a scan through the centre of what is not background.

    ``values`` of the first channel, ``true`` and ``predicted`` classes, each by the axis that the
    plane is across: ``values["depth"]`` is (height, width), and so on. ``at`` is where the planes
    lie.
    """

    sample: str
    shape: tuple[int, ...]
    at: Mapping[str, int]
    values: Mapping[str, PlaneValues]
    true: Mapping[str, PlaneValues]
    predicted: Mapping[str, PlaneValues]
    voxels: Voxels
    quantity: str


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
    source = _find_sample(run, sample)
    try:
        if sample not in source.names:
            raise DataError(f"{run.setting('data.path')} has no {sample} (any more)")
        index = list(source.names).index(sample)
        extents = source.shape_of(index)[1:]
        true = source.labels(index, Box.whole(extents))
        if true.shape != predicted.shape:
            raise DataError(f"{source.where(index)}: {true.shape} voxels, a mask {predicted.shape}")
        voxels = voxels_of(source, index)
        at = dict(zip(SPATIAL_AXES, _foreground_centre(true), strict=True))
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
    planes = (_planes_at(true, at), _planes_at(predicted, at))
    return Scan(sample, extents, at, values, *planes, voxels, quantity)


def _planes_at(classes: PlaneValues, at: Mapping[str, int]) -> dict[str, PlaneValues]:
    return {axis: classes.take(at[axis], dim) for dim, axis in enumerate(SPATIAL_AXES)}


def _find_sample(run: Run, sample: str) -> Source:
    """Opens the file that has the sample, or the source that makes it."""
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


def _foreground_centre(true: NDArray[np.uint8]) -> list[int]:
    """Finds the centre of what is not background, or of the whole without any."""
    places = np.argwhere(true > 0)
    if not len(places):
        return [extent // 2 for extent in true.shape]
    return [int(place) for place in places.mean(0).round()]
