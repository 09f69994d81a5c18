"""The volumes of a run's data set, each opened alone: the others stay closed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyperslab.data import Hdf5Folder, Parameters, Source, Subvolumes
from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import HDF5_SUFFIXES, Catalog, stamps_of
from hyperslab.formats.keyed.header import lbann_of, read_header
from hyperslab.report.run_folder import Run


def volume_files(run: Run) -> list[Path]:
    """The run's volumes.

    Raises:
        DataError: the folder is not there or holds none.
    """
    folder = Path(str(run.setting("data.path")))
    files = [p for p in folder.rglob("*") if p.suffix in HDF5_SUFFIXES] if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} is not a folder of volumes (any more)")
    return files


def open_volume(run: Run, file: Path) -> Source:
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
