"""Files and boxes: a folder for each storage format, and the list of all formats.

A `Source` reads boxes of samples, a `Writer` writes samples; `register` makes a format of the two
that `hyperslab.open`, recipes and every command know (docs/formats.md).
"""

from hyperslab.formats.extras import Extras
from hyperslab.formats.io_cost import Storage
from hyperslab.formats.keyed.hdf5 import Hdf5Folder
from hyperslab.formats.keyed.hdf5_writer import Hdf5Writer, LbannWriter
from hyperslab.formats.keyed.zarr import ZarrFolder
from hyperslab.formats.keyed.zarr_writer import ZarrWriter
from hyperslab.formats.mapped.source import MappedFolder
from hyperslab.formats.nifti.source import NiftiFolder
from hyperslab.formats.nifti.writer import NiftiWriter
from hyperslab.formats.npy.source import NpyFolder
from hyperslab.formats.npy.writer import NpyWriter
from hyperslab.formats.parameters import Parameters
from hyperslab.formats.registry import Format, register
from hyperslab.formats.shared.data_map import DataMap
from hyperslab.formats.shared.listing import list_files
from hyperslab.formats.shared.storage_order import StorageOrder
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.subvolumes import Subvolumes
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.formats.tfrecord.sc18 import Sc18Folder
from hyperslab.formats.tfrecord.sc18_writer import Sc18Writer
from hyperslab.formats.tfrecord.source import TfRecordFolder
from hyperslab.formats.tfrecord.writer import TfRecordWriter
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
