"""From files to `Sharded`: what exists, who needs which box, reading ahead, decoding.

The way of a voxel: `catalog` lists the files, `schedule` says which samples make a mini-batch,
`owners` which replica keeps which of them. `supply` puts this rank's block together: of what
`reader` reads from a `Source` (of files: `formats`), what `store` keeps, and what `courier` brings
from other ranks. `prefetch` does so ahead of the step, `device` moves the block in its storage
type, `decode` makes the network's input of it.
"""

from hyperslab.data.dataset import Dataset
from hyperslab.data.open_dataset import open
from hyperslab.data.reader import os_bytes_read
from hyperslab.formats.keyed.hdf5 import Hdf5Folder
from hyperslab.formats.keyed.zarr import ZarrFolder
from hyperslab.formats.nifti.source import NiftiFolder
from hyperslab.formats.npy.source import NpyFolder
from hyperslab.formats.parameters import Parameters
from hyperslab.formats.source import Source
from hyperslab.formats.subvolumes import Subvolumes
from hyperslab.formats.tfrecord.source import TfRecordFolder

__all__ = [
    "Dataset",
    "Hdf5Folder",
    "NiftiFolder",
    "NpyFolder",
    "Parameters",
    "Source",
    "Subvolumes",
    "TfRecordFolder",
    "ZarrFolder",
    "open",
    "os_bytes_read",
]
