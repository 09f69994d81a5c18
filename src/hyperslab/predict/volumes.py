"""A volume to be predicted: who reads what of it, and how its mask is written.

Legend: C channels, (D, H, W) voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
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
from hyperslab.formats.keyed.keyed_file import kind_of
from hyperslab.formats.keyed.zarr import ZarrFolder
from hyperslab.formats.mapped.source import MappedFolder
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.lattice import blurred_linear
from hyperslab.formats.padded import read_filled, take_filled
from hyperslab.formats.selection import Selected
from hyperslab.formats.shared.channels import Channels
from hyperslab.formats.shared.reach import STRICT, Allowed
from hyperslab.formats.source import Array, ScanOptions
from hyperslab.geometry import Box, Partition
from hyperslab.tensor.main_rank import scatter_from_main

Mask = NDArray[np.uint8]


class Volume(Protocol):
    """``shape`` (C, D, H, W) on the lattice that the network sees."""

    shape: tuple[int, ...]

    def block(self, grid: Grid, wanted: Box) -> Array:
        """This rank's box (1, C, d, h, w) of the box ``wanted``, as stored; every rank calls it.

        Beyond the volume, where ``wanted`` may reach, it holds the fill value.
        """
        ...

    def write(self, mask: Mask, path: Path) -> None:
        """Write the mask (D, H, W) on the file's own lattice; the main rank calls it."""
        ...


class Nifti:
    """A scan in NIfTI files: the main rank reads it, resamples it to the network's lattice and
    scatters it.

    A compressed file can be read from its beginning only, so the others would gain nothing.
    ``paths``: one, or one for each channel.

    Raises:
        DataError: on every rank; see `image.read_channels`.
    """

    def __init__(
        self, paths: Sequence[Path], about: DataCard, *, native: bool, fill: float = 0
    ) -> None:
        self.values: Array | None = None
        self.scan: image.CtVolume | None = None
        self.about = about
        self.fill = fill
        self.shape = from_main(
            lambda: self._read(paths, native),
            failing=f"{paths[0]}: cannot be read",
            error=DataError,
        )
        if self.shape[0] != about.whole[0]:
            found = f"{self.shape[0]} channel{'' if self.shape[0] == 1 else 's'}"
            words = "is 4-D and has" if len(paths) == 1 and self.shape[0] > 1 else "has"
            raise DataError(
                f"{paths[0]}: {words} {found} but the network was trained on "
                f"{', '.join(about.channels) or about.whole[0]}\n    {_give_channels(about)}"
            )

    def _read(self, paths: Sequence[Path], native: bool) -> tuple[int, ...]:
        """As training reads it, so that the network sees what it was trained on."""
        self.scan = image.read_channels(paths)
        values = self.scan.values
        lattice = None if native else _lattice(self.scan, self.about)
        if lattice is not None and lattice != values.shape[1:]:
            values = np.stack([blurred_linear(channel, lattice) for channel in values])
        stored = np.dtype(self.about.dtype)
        self.values = as_hu(values) if stored == np.int16 else values.astype(stored, copy=False)
        return self.values.shape

    def block(self, grid: Grid, wanted: Box) -> Array:
        part = None
        if self.values is not None:
            part = take_filled(self.values, wanted, self.fill)[None]
        dtype = np.dtype(self.about.dtype)
        return scatter_from_main(part, partition(wanted.shape, grid), dtype, grid)

    def write(self, mask: Mask, path: Path) -> None:
        assert self.scan is not None
        image.write_mask(path, mask, self.scan)


class Keyed:
    """An HDF5 file or Zarr group of one of the layouts that training reads.

    Its targets need not be there.

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
        fill: float = 0,
    ) -> None:
        self.fill = fill
        folder: type[Hdf5Folder | ZarrFolder] = (
            ZarrFolder if kind_of(path) == "Zarr" else Hdf5Folder
        )
        found, self.affine = from_main(
            lambda: folder.of_volume(path, about.file_shape, channels, lbann, allowed),
            failing=f"{path}: cannot be read",
            error=DataError,
        )
        _check(path, found.shape[:1], about.file_shape[:1], "channels")
        self.source: Source = found
        if about.stored_redshifts:
            found.redshifts = found.redshifts or about.stored_redshifts
            self.source = Selected(found, redshifts=about.redshifts)
        self.shape = self.source.shape
        if not native and not about.varied:
            _check(path, self.shape[1:], about.whole[1:], "voxels")

    def block(self, grid: Grid, wanted: Box) -> Array:
        with closing(self.source):
            return read_block(self.source, 0, grid, wanted, self.fill)

    def write(self, mask: Mask, path: Path) -> None:
        """With the affine that `hyperslab convert` left; without one the file knows none."""
        affine = None if self.affine is None else np.asarray(self.affine)[:, [2, 1, 0, 3]]
        image.save_image(path, mask.transpose(2, 1, 0), np.dtype(np.uint8), affine, None)


class Mapped:
    """A file of arrays that a recipe's keys find, or an .npy or .npz; its targets need not be
    there. ``paths``: one, or one for each field that is a channel.

    Every rank reads its own hyperslab. ``source`` has the volumes of the file.

    Raises:
        DataError: on every rank: not such a file, or of another size than the network's.
    """

    def __init__(
        self, paths: Sequence[Path], about: DataCard, options: ScanOptions, *, fill: float = 0
    ) -> None:
        self.fill = fill
        path = paths[0]
        self.source: Source = from_main(
            lambda: MappedFolder.of_volumes(paths, options, about.whole[0]),
            failing=f"{path}: cannot be read",
            error=DataError,
        )
        self.shape = self.source.shape
        _check(path, self.shape[:1], about.whole[:1], "channels")
        _check(path, self.shape[1:], about.whole[1:], "voxels")
        if about.classes and len(self.source.names) > 1:
            raise DataError(
                f"{path}: holds {len(self.source.names)} volumes; a mask is that of one\n"
                "    write each into a file of its own"
            )

    def block(self, grid: Grid, wanted: Box) -> Array:
        with closing(self.source):
            return read_block(self.source, 0, grid, wanted, self.fill)

    def write(self, mask: Mask, path: Path) -> None:
        """Without an affine: such a file knows none."""
        image.save_image(path, mask.transpose(2, 1, 0), np.dtype(np.uint8), None, None)


def read_block(source: Source, sample: int, grid: Grid, wanted: Box, fill: float = 0) -> Array:
    """This rank's box (1, C, d, h, w) of the box ``wanted`` of a sample; every rank calls it.

    Beyond the sample it holds ``fill``.

    Raises:
        DataError: on every rank, if one cannot read its box.
    """
    box = partition(wanted.shape, grid).box(grid.coords)
    mine = Box(box.lo[1:], box.hi[1:]).shift(wanted.lo)
    whole = Box.whole(source.shape)
    where = source.where(sample)
    return all_or_raise(
        lambda: read_filled(
            lambda inside: source.read(sample, inside), whole, mine, fill, source.dtype
        )[None],
        failing=f"{where}: cannot be read",
        error=DataError,
    )


def partition(shape: tuple[int, ...], grid: Grid) -> Partition:
    """How one volume (C, D, H, W) is cut, as a mini-batch of one.

    Raises:
        LayoutError: it has fewer voxels along a side than the grid has ranks.
    """
    return grid.partition((1, *shape))


def _lattice(scan: image.CtVolume, about: DataCard) -> tuple[int, ...] | None:
    """The voxels (D, H, W) of a scan as the network was trained to see it; None: its own.

    Volumes of one shape have that; those of one size of a voxel have as many as that makes.
    """
    if not about.varied:
        return about.whole[1:]
    if not about.voxel or np.allclose(scan.spacing, about.voxel, rtol=5e-2):
        return None
    extents = np.array(scan.values.shape[1:]) * scan.spacing / np.array(about.voxel)
    return tuple(max(1, round(float(extent))) for extent in extents)


def _give_channels(about: DataCard) -> str:
    if about.whole[0] == 1:
        return "give the one that it takes in a file of its own, 3-D"
    return "give them along the fourth dim of a file, or as NAME_0000.nii.gz, NAME_0001.nii.gz"


def _check(path: Path, found: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: has {found} {what} but the network was trained on {wanted}")
