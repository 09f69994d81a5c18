"""Reads and writes files, box by box, and lists the storage formats.

A `Source` reads boxes of samples, a `Writer` writes samples; `register` makes a format of the
two that `hyperslab.open`, recipes and every command know (docs/formats.md). `arrays` holds HDF5,
Zarr and numpy's files, `tfrecord` and `nifti` those formats, `convert` leads from one to
another.
"""

from hyperslab.formats.arrays.source import Hdf5Folder, MappedFolder, NpyFolder, ZarrFolder
from hyperslab.formats.arrays.writer import Hdf5Writer, LbannWriter, NpyWriter, ZarrWriter
from hyperslab.formats.files import list_files
from hyperslab.formats.nifti.source import NiftiFolder, NiftiWriter
from hyperslab.formats.registry import Format, register
from hyperslab.formats.source import DataMap, Extras, ScanOptions, Source
from hyperslab.formats.storage import Storage
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.formats.targets import Parameters
from hyperslab.formats.tfrecord.mlperf import TfRecordFolder
from hyperslab.formats.tfrecord.sc18 import Sc18Folder
from hyperslab.formats.tfrecord.writer import Sc18Writer, TfRecordWriter
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

register(
    "hdf5",
    suffixes=Hdf5Folder.suffixes,
    source=Hdf5Folder,
    writer=Hdf5Writer(),
    help="public CosmoFlow and LiTS HDF5",
)
register("lbann", source=Hdf5Folder, writer=LbannWriter(), help="LBANN's parts, dims reversed")
register(
    "npy",
    suffixes=NpyFolder.suffixes,
    source=NpyFolder,
    writer=NpyWriter(),
    help="numpy's arrays and a table of targets",
)
register(
    "tfrecord",
    suffixes=TfRecordFolder.suffixes,
    source=TfRecordFolder,
    writer=TfRecordWriter(),
    help="MLPerf's CosmoFlow",
)
register(
    "zarr",
    suffixes=ZarrFolder.suffixes,
    source=ZarrFolder,
    writer=ZarrWriter(),
    help="Zarr v3 groups with the keys of HDF5",
)
register(
    "nifti",
    suffixes=NiftiFolder.suffixes,
    source=NiftiFolder,
    writer=NiftiWriter(),
    help="scans with labels: dataset.json, CSV, or named as LiTS or MSD",
)
register(
    "sc18",
    source=Sc18Folder,
    writer=Sc18Writer(),
    help="TFRecords of Mathuriya et al. 2018, many samples a file",
)
