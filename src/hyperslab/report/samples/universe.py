"""Volumes of a run's data set, read only where they are shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyperslab.data import Hdf5Folder, Parameters, Source, Subvolumes
from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import SUFFIXES, Catalog, stamps_of
from hyperslab.formats.keyed.header import lbann_of, read_header
from hyperslab.geometry import Box, Window
from hyperslab.models.cosmoflow_variants import variant_of
from hyperslab.report.figures.slices import AXES, Planes
from hyperslab.report.run_folder import Run


def middle_planes(run: Run) -> Planes:
    """The three middle planes of one sample, first channel, as log(1 + count).

    Raises:
        DataError: the folder of universes is not there, holds none, or the file is broken.
    """
    source = _one_sample(run)
    _, *extents = source.shape
    planes = {}
    try:
        for i, axis in enumerate(AXES):
            lo, hi = [0, 0, 0, 0], [1, *extents]
            lo[i + 1] = extents[i] // 2
            hi[i + 1] = lo[i + 1] + 1
            values = source.read(0, Box(tuple(lo), tuple(hi))).squeeze((0, i + 1))
            planes[axis] = np.log1p(values.astype(np.float64))
    finally:
        source.close()
    return Planes(source.names[0], (extents[0], extents[1], extents[2]), planes)


def _one_sample(run: Run) -> Source:
    """The first file of the run's folder as a source of its own: the others are not opened."""
    return source_of(run, min(files_of(run)))


def files_of(run: Run) -> list[Path]:
    """The run's volumes.

    Raises:
        DataError: the folder is not there or holds none.
    """
    folder = Path(str(run.setting("data.path")))
    files = [p for p in folder.rglob("*") if p.suffix in SUFFIXES] if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} is not a folder of volumes (any more)")
    return files


def source_of(run: Run, file: Path) -> Source:
    """One file of the run's folder as a source of its own.

    Raises:
        DataError: the file is broken.
    """
    folder = Path(str(run.setting("data.path")))
    name = file.relative_to(folder).as_posix()
    stamps = stamps_of(folder, name)
    header = read_header(file, run.setting("data.channels"), lbann_of(run.setting("data.format")))
    names = header.layout.names
    catalog = Catalog(
        folder,
        (name,),
        header.layout,
        np.array([header.unit]),
        Parameters.normalised(names),
        stamps,
    )
    width = run.setting("data.subvolume")
    source = Hdf5Folder(catalog)
    return Subvolumes(source, int(width)) if width else source


def first_window(run: Run, shape: tuple[int, int, int]) -> Window | None:
    """What the first convolution reads; None for a network that is not one of ours."""
    if run.setting("model.name") == "unet3d":
        return Window(3, before=1, after=1)
    try:
        first = variant_of(str(run.setting("model.variant")), shape[0]).convolutions[0]
    except ValueError:
        return None
    return Window(first.kernel, stride=first.stride, before=first.padding, after=first.padding)
