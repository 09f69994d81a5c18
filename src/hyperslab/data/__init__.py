"""From files to `Sharded`: what exists, who needs which box, reading ahead, decoding.

The way of a voxel: `catalog` lists the files, `schedule` says which samples make a mini-batch,
`owners` which replica keeps which of them. `supply` puts this rank's block together: of what
`reader` reads from a `Source` (of files: `formats`), what `store` keeps, and what `courier` brings
from other ranks. `prefetch` does so ahead of the step, `device` moves the block in its storage
type, `decode` makes the network's input of it.
"""

from hyperslab.data.hdf5 import Hdf5Folder
from hyperslab.data.loader import Dataset
from hyperslab.data.nifti import NiftiFolder
from hyperslab.data.npy import NpyFolder
from hyperslab.data.opening import open
from hyperslab.data.parameters import Parameters
from hyperslab.data.reader import os_bytes_read
from hyperslab.data.source import Source
from hyperslab.data.subvolumes import Subvolumes
from hyperslab.data.tfrecord import TfRecordFolder
from hyperslab.data.zarrs import ZarrFolder

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
