"""Leads from a `Source` to mini-batches of `Sharded`, each rank with its own boxes.

The way of a voxel, in reading order: `open_dataset` finds the files and wires what follows;
`dataset` shows mini-batches, loaded ahead of the step; `sampler` says which samples make one, and
how they are flipped; `assemble` puts this rank's part of it together, sample by sample, of what it
reads from the `Source` and of what `store` keeps or brings from other ranks; `transforms` makes the
network's input of it. A name is imported when it is first asked for: what chooses samples needs no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperslab.util import importing_names

if TYPE_CHECKING:
    from hyperslab.data.assemble import os_bytes_read
    from hyperslab.data.dataset import Dataset, PrefetchPolicy
    from hyperslab.data.open_dataset import StorePolicy, open
    from hyperslab.data.sampler import Folds, Listed
    from hyperslab.formats.arrays.source import Hdf5Folder, NpyFolder, ZarrFolder
    from hyperslab.formats.nifti.source import NiftiFolder
    from hyperslab.formats.source import Source
    from hyperslab.formats.synthetic import SyntheticVolumes
    from hyperslab.formats.targets import Parameters
    from hyperslab.formats.tfrecord.source import TfRecordFolder
    from hyperslab.formats.views import Subvolumes

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

__getattr__ = importing_names(__name__)
