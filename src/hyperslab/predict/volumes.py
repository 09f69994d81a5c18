"""A volume to be predicted: who reads what of it, and how its mask is written.

Legend: C channels, (D, H, W) voxels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.comm import Grid
from hyperslab.comm.agreement import all_or_raise, from_main
from hyperslab.ct.scan_file import as_hu
from hyperslab.data import Source
from hyperslab.errors import DataError
from hyperslab.formats.keyed.hdf5 import Hdf5Folder
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.lattice import linear
from hyperslab.formats.selection import Selected
from hyperslab.formats.shared.channels import Channels
from hyperslab.formats.shared.reach import STRICT, Allowed
from hyperslab.formats.source import Array
from hyperslab.geometry import Box, Partition
from hyperslab.tensor.main_rank import scatter_from_main

Mask = NDArray[np.uint8]


class Volume(Protocol):
    """``shape`` (C, D, H, W) as the network will see it."""

    shape: tuple[int, ...]

    def block(self, grid: Grid) -> Array:
        """This rank's box (1, C, d, h, w), as stored; every rank calls it."""
        ...

    def write(self, mask: Mask, path: Path) -> None:
        """Write the mask (D, H, W) on the file's own lattice; the main rank calls it."""
        ...


class Nifti:
    """A NIfTI file: the main rank reads it, resamples it to the network's lattice and scatters it.

    A compressed file can be read from its beginning only, so the others would gain nothing.

    Raises:
        DataError: on every rank; see `image.read`.
    """

    def __init__(self, path: Path, about: DataCard, *, native: bool) -> None:
        self.values: NDArray[np.int16] | None = None
        self.scan: image.CtVolume | None = None
        lattice = None if native else about.whole[1:]
        self.shape = from_main(
            lambda: self._read(path, lattice), failing=f"{path}: cannot be read", error=DataError
        )
        _check(path, self.shape[:1], about.whole[:1], "channels")

    def _read(self, path: Path, lattice: tuple[int, ...] | None) -> tuple[int, ...]:
        """As `hyperslab convert` does it, so that the network sees what it was trained on."""
        self.scan = image.read(path)
        values = self.scan.values if lattice is None else linear(self.scan.values, lattice)
        self.values = as_hu(values)[None, None]
        return self.values.shape[1:]

    def block(self, grid: Grid) -> Array:
        return scatter_from_main(self.values, partition(self.shape, grid), np.dtype(np.int16), grid)

    def write(self, mask: Mask, path: Path) -> None:
        assert self.scan is not None
        image.write_mask(path, mask, self.scan)


class Hdf5:
    """An HDF5 file of one of the layouts that training reads; its targets need not be there.

    Every rank reads its own hyperslab. ``source`` has the file as its only sample.

    Raises:
        DataError: on every rank: not such a file, or of another size than the network's.
    """

    def __init__(
        self,
        path: Path,
        about: DataCard,
        *,
        native: bool,
        channels: Channels | None,
        lbann: bool | None = None,
        allowed: Allowed = STRICT,
    ) -> None:
        found, self.affine = from_main(
            lambda: Hdf5Folder.of_volume(path, about.file_shape, channels, lbann, allowed),
            failing=f"{path}: cannot be read",
            error=DataError,
        )
        _check(path, found.shape[:1], about.file_shape[:1], "channels")
        self.source: Source = found
        if about.stored_redshifts:
            found.redshifts = found.redshifts or about.stored_redshifts
            self.source = Selected(found, redshifts=about.redshifts)
        self.shape = self.source.shape
        if not native:
            _check(path, self.shape[1:], about.whole[1:], "voxels")

    def block(self, grid: Grid) -> Array:
        try:
            return read_block(self.source, 0, grid)
        finally:
            self.source.close()

    def write(self, mask: Mask, path: Path) -> None:
        """With the affine that `hyperslab convert` left; without one the file knows none."""
        affine = None if self.affine is None else np.asarray(self.affine)[:, [2, 1, 0, 3]]
        image.save_image(path, mask.transpose(2, 1, 0), np.dtype(np.uint8), affine, None)


def read_block(source: Source, sample: int, grid: Grid) -> Array:
    """This rank's box (1, C, d, h, w) of a sample; every rank calls it.

    Raises:
        DataError: on every rank, if one cannot read its box.
    """
    box = partition(source.shape, grid).box(grid.coords)
    wanted = Box(box.lo[1:], box.hi[1:])
    where = source.where(sample)
    return all_or_raise(
        lambda: source.read(sample, wanted)[None],
        failing=f"{where}: cannot be read",
        error=DataError,
    )


def partition(shape: tuple[int, ...], grid: Grid) -> Partition:
    """How one volume (C, D, H, W) is cut, as a mini-batch of one.

    Raises:
        LayoutError: it has fewer voxels along a side than the grid has ranks.
    """
    return grid.partition((1, *shape))


def _check(path: Path, found: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: has {found} {what} but the network was trained on {wanted}")
