"""The volumes of a run's data set, each file opened alone: the others stay closed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from hyperslab.data import Hdf5Folder, Parameters, Source, Subvolumes
from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import HDF5_SUFFIXES, Catalog, stamps_of
from hyperslab.formats.keyed.header import lbann_of, read_header
from hyperslab.formats.mapped.source import MappedFolder
from hyperslab.formats.registry import find_format, named
from hyperslab.formats.selection import selected
from hyperslab.formats.shared.data_map import DataMap
from hyperslab.formats.shared.reach import Allowed, Reach
from hyperslab.formats.source import ScanOptions
from hyperslab.recipe.data import DataSection
from hyperslab.recipe.synthetic import SyntheticSection
from hyperslab.report.run_folder import Run


def first_volume(run: Run) -> Source:
    """A source whose first sample is the run's first volume.

    Raises:
        DataError: the folder of volumes is not there, holds none, or the file is broken.
    """
    if source := run.setting("data.target") or run.setting("data.python_class"):
        raise DataError(f"its volumes come from {source}, which a report does not run")
    found = synthetic_volumes(run) or other_volumes(run)
    return found or open_volume(run, min(volume_files(run)))


def synthetic_volumes(run: Run) -> Source | None:
    """The volumes of a run that has none in files.

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
    return _parts(run, source)


def other_volumes(run: Run) -> Source | None:
    """The samples of a run whose volumes are in files of another format than HDF5, or under keys.

    Raises:
        DataError: one of the files is broken.
    """
    path = Path(str(run.setting("data.path")))
    if not path.exists():
        return None
    mapping = _mapping(run)
    if mapping is not None:
        options = ScanOptions(run.setting("data.channels"), allowed=_allowed(run), mapping=mapping)
        return _parts(run, MappedFolder.open_folder(path, options))
    name = run.setting("data.format")
    found = named(str(name)) if name else find_format(path)[0]
    if found.source is Hdf5Folder:
        return None
    options = ScanOptions(run.setting("data.channels"), name, allowed=_allowed(run))
    return _parts(run, found.source.open_folder(path, options))


def volume_files(run: Run) -> list[Path]:
    """The run's volumes.

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
    """One file of the run's folder as a source of its own.

    Raises:
        DataError: the file is broken.
    """
    folder = Path(str(run.setting("data.path")))
    name = file.relative_to(folder).as_posix()
    stamps = stamps_of(folder, name)
    allowed = _allowed(run)
    lbann = lbann_of(run.setting("data.format"))
    header = read_header(file, run.setting("data.channels"), lbann, Reach(folder, allowed))
    names = header.layout.names
    catalog = Catalog(
        folder=folder,
        files=(name,),
        layout=header.layout,
        unit=np.array([header.unit]),
        parameters=Parameters.normalised(names),
        stamps=stamps,
        redshifts=header.redshifts,
        allowed=allowed,
    )
    return _parts(run, Hdf5Folder(catalog))


def _mapping(run: Run) -> DataMap | None:
    """What the recipe says of where volumes and targets are.

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


def _allowed(run: Run) -> Allowed:
    return Allowed(
        outside_files=bool(run.setting("data.outside_files")),
        missing_chunks=bool(run.setting("data.missing_chunks")),
    )


def _parts(run: Run, source: Source) -> Source:
    """The samples: the volumes, of the channels that were shown, or what they are cut into."""
    source = selected(source, run.setting("data.redshifts"), run.setting("data.targets"))
    width = run.setting("data.subvolume")
    return Subvolumes(source, int(width)) if width else source
