"""From a `Source` to mini-batches of `Sharded`, each rank with its own boxes.

The way of a voxel, in reading order: `open_dataset` finds the files and `build` wires what follows;
`dataset` shows mini-batches; `sampler` says which samples make one; `batch_assembler` puts this
rank's part of it together, sample by sample (`sample_assembly`), of what `reader` reads from the
`Source` and of what `store` keeps or brings from other ranks. `prefetch` does so ahead of the step,
`to_device` copies it in its storage type, and `transforms` makes the network's input of it.
"""

from hyperslab.data.build import StorePolicy
from hyperslab.data.dataset import Dataset
from hyperslab.data.open_dataset import open
from hyperslab.data.prefetch import PrefetchPolicy
from hyperslab.data.reader import os_bytes_read
from hyperslab.data.splits import Folds, Listed
from hyperslab.formats.keyed.hdf5 import Hdf5Folder
from hyperslab.formats.keyed.zarr import ZarrFolder
from hyperslab.formats.nifti.source import NiftiFolder
from hyperslab.formats.npy.source import NpyFolder
from hyperslab.formats.parameters import Parameters
from hyperslab.formats.source import Source
from hyperslab.formats.subvolumes import Subvolumes
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.formats.tfrecord.source import TfRecordFolder

__all__ = [
    "Dataset",
    "Folds",
    "Hdf5Folder",
    "Listed",
    "NiftiFolder",
    "NpyFolder",
    "Parameters",
    "PrefetchPolicy",
    "Source",
    "StorePolicy",
    "Subvolumes",
    "SyntheticVolumes",
    "TfRecordFolder",
    "ZarrFolder",
    "open",
    "os_bytes_read",
]
