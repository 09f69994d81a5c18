"""Scans of one size of a voxel from scans of many: a new data set with a `dataset.json`.

What a network learns of sizes it learns in voxels, so scans of different spacings are brought to
one [mm]. Files are plain NIfTI, of which each rank reads its box alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from hyperslab.ct.import_scans import ScanOutcome
from hyperslab.ct.scan_file import as_hu
from hyperslab.errors import DataError
from hyperslab.formats.nifti import image, lattice
from hyperslab.formats.nifti.dataset_json import DATASET_JSON, write_dataset_json
from hyperslab.formats.nifti.pairs import Pair
from hyperslab.formats.nifti.source import listed_scans
from hyperslab.formats.shared.filled_folder import filling
from hyperslab.formats.shared.reach import STRICT, Allowed

Voxel = tuple[float, float, float]
"""Its size along D, H and W [mm]."""


def respace_scans(
    path: Path,
    folder: Path,
    voxel: Voxel,
    *,
    allowed: Allowed = STRICT,
    done: Callable[[ScanOutcome], None] = lambda outcome: None,
) -> list[ScanOutcome]:
    """Bring the scans of ``path``, a folder or a list, to about ``voxel`` [mm], into ``folder``.

    A scan keeps its extent, of which a whole number of voxels is made: `blurred_linear` of its
    values, the nearest of its labels. ``imagesTr``, ``labelsTr`` and a ``dataset.json`` are filled;
    scans that are there are kept. What is not what it should be is skipped, and the others go on.

    Raises:
        DataError: a size is not positive, the list is no good, or the folder cannot be written.
        HyperslabError: the extra ``medical`` is not installed.
    """
    if not (np.isfinite(voxel).all() and min(voxel) > 0):
        raise DataError(f"spacing {voxel}: needs three sizes [mm] above 0")
    listed = listed_scans(path, allowed)
    outcomes = []
    good = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filling(folder, "conversion"):
            for pair in listed.pairs:
                outcome, made = _respaced(pair, folder, voxel, len(listed.classes))
                outcomes.append(outcome)
                good += [] if made is None else [made]
                done(outcome)
            names = (listed.classes, listed.channels)
            if good:
                write_dataset_json(folder / DATASET_JSON, good, *names, listed.splits)
    except OSError as error:
        raise DataError(f"cannot write into {folder}: {error.strerror}") from error
    return outcomes


def _respaced(
    pair: Pair, folder: Path, voxel: Voxel, classes: int
) -> tuple[ScanOutcome, Pair | None]:
    made = Pair(
        pair.name,
        folder / "imagesTr" / f"{pair.name}.nii",
        folder / "labelsTr" / f"{pair.name}.nii",
    )
    if pair.problem:
        return ScanOutcome(pair, "skipped", pair.problem), None
    if made.image.exists() and made.labels.exists():
        return ScanOutcome(pair, "kept"), made
    try:
        scan = image.read_channels(pair.images)
        labels = image.read_labels(pair.labels, replace(scan, values=scan.values[0]), classes)
    except DataError as error:
        return ScanOutcome(pair, "skipped", str(error)), None
    old = scan.values.shape[1:]
    sizes = zip(old, scan.spacing, voxel, strict=True)
    new = tuple(max(1, round(float(n * size / wanted))) for n, size, wanted in sizes)
    values = np.stack([lattice.blurred_linear(channel, new) for channel in scan.values])
    affine = lattice.resampled(scan.affine, old, new)[:, [2, 1, 0, 3]]
    stored = as_hu(values) if scan.values.dtype == np.int16 else values
    xyz = stored.transpose(3, 2, 1, 0)
    for path in (made.image, made.labels):
        path.parent.mkdir(parents=True, exist_ok=True)
    mask = lattice.nearest(labels, new).transpose(2, 1, 0)
    image.save_image(made.labels, mask, mask.dtype, affine, None)
    image.save_image(made.image, xyz if len(stored) > 1 else xyz[..., 0], xyz.dtype, affine, None)
    return ScanOutcome(pair, "converted"), made
