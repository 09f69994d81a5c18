"""Reads and writes files, box by box, and lists the storage formats.

A `Source` reads boxes of samples, a `Writer` writes samples; `register` makes a format of the
two that `hyperslab.open`, recipes and every command know (docs/formats.md). `arrays` holds HDF5,
Zarr and numpy's files, `tfrecord` and `nifti` those formats, `convert` leads from one to
another. A name is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperslab.util import importing_names

if TYPE_CHECKING:
    from hyperslab.formats.arrays.source import Hdf5Folder, MappedFolder, NpyFolder, ZarrFolder
    from hyperslab.formats.files import DataMap, list_files
    from hyperslab.formats.nifti.source import NiftiFolder
    from hyperslab.formats.registry import Format, register
    from hyperslab.formats.source import Extras, ScanOptions, Source
    from hyperslab.formats.storage import Storage
    from hyperslab.formats.storage_order import StorageOrder
    from hyperslab.formats.synthetic import SyntheticVolumes
    from hyperslab.formats.targets import Parameters
    from hyperslab.formats.tfrecord.source import TfRecordFolder
    from hyperslab.formats.views import Subvolumes
    from hyperslab.formats.writer import SampleToWrite, Writer

__all__ = [
    "DataMap",
    "Extras",
    "Format",
    "Hdf5Folder",
    "MappedFolder",
    "NiftiFolder",
    "NpyFolder",
    "Parameters",
    "SampleToWrite",
    "ScanOptions",
    "Source",
    "Storage",
    "StorageOrder",
    "Subvolumes",
    "SyntheticVolumes",
    "TfRecordFolder",
    "Writer",
    "ZarrFolder",
    "list_files",
    "register",
]

__getattr__ = importing_names(__name__)
