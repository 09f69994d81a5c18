"""Opens the volumes to be predicted, reads their boxes and writes their masks.

A volume by the kind of its file says who reads what of it and how its mask is written.

Legend: C channels, (D, H, W) voxels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm import Grid
from hyperslab.comm.agreement import all_gather, broadcast_from_main, collective_try
from hyperslab.data import Source
from hyperslab.errors import DataError
from hyperslab.formats.convert.scans import as_hu
from hyperslab.formats.files import Stamp, check_finite, unchanged
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.resample import blurred_linear_box, spacing
from hyperslab.formats.source import Array
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.formats.views import read_filled
from hyperslab.geometry import Box, Cut
from hyperslab.recipe.data import DataSection
from hyperslab.train.input_files import InputFile, is_scan, open_arrays, open_scan
from hyperslab.util.atomic_files import created_aside

FEW_LEVELS = 50
"""A scan of fewer whole numbers is hardly one in the unit of scans that were int16."""


class NiftiVolume:
    """Reads a volume of ``shape`` (C, D, H, W) from NIfTI files, on the lattice of the network.

    Every rank reads, and resamples, its own boxes. A packed file can be read from its beginning
    only, so the main rank first unpacks it, piece by piece, into ``scratch``, a folder that all
    ranks see; `close` removes it there. ``paths``: one, or one for each channel. ``extents``
    (D, H, W) are those of the files.

    Raises:
        DataError: on every rank: as `open_scan`; or the volume holds NaN or infinite values, or one
            and the same everywhere.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        about: DataCard,
        grid: Grid,
        scratch: Path,
        *,
        native: bool,
        fill: float = 0,
    ) -> None:
        self.paths = paths
        self.grid = grid
        self.fill = fill
        self.dtype = np.dtype(about.dtype)
        self.stamps: list[Stamp] = []
        self.unpacked: list[Path] = []
        try:
            self._open(about, scratch, native)
        except BaseException:
            self.close()
            raise

    def _open(self, about: DataCard, scratch: Path, native: bool) -> None:
        failing = f"{self.paths[0]}: cannot be read"

        def plain() -> tuple[list[Stamp], list[Path]]:
            stamps = [Stamp.of(path) for path in self.paths]  # before any is read
            open_scan(self.paths, about)  # before anything is unpacked
            known = zip(self.paths, stamps, strict=True)
            return stamps, [self._plain(path, stamp, scratch) for path, stamp in known]

        self.stamps, places = broadcast_from_main(plain, failing=failing)
        self.files = collective_try(lambda: [*map(image.open_nifti, places)], failing=failing)
        first = self.files[0]
        self.extents = first.shape[1:]
        self.affine = first.affine
        self._check_values()
        self.lattice = self.extents
        if not native:
            self.lattice = _trained_lattice(first, about) or self.extents
        self.shape = (about.whole[0], *self.lattice)

    def _plain(self, path: Path, stamp: Stamp, scratch: Path) -> Path:
        """Return a file that can be read anywhere: itself, or what it is unpacked to."""
        if not path.name.endswith(".gz"):
            return path
        place = scratch / f".{path.name.removesuffix('.gz')}.{len(self.unpacked)}.partial.nii"
        scratch.mkdir(parents=True, exist_ok=True)
        self.unpacked.append(place)
        with created_aside(place) as file, unchanged(path, path.name, stamp):
            image.unpack(path, file)
        return place

    def _check_values(self) -> None:
        """Refuse values that no scan has; each rank looks at its share of the files' layers."""
        found = all_gather(collective_try(self._extremes))
        low = min(low for low, _, _ in found)
        high = max(high for _, high, _ in found)
        if low == high:
            raise DataError(f"{self.paths[0]}: is empty: every voxel is {low:g}")
        if high - low < FEW_LEVELS and not all(whole for _, _, whole in found):
            self.grid.log(
                f"{self.paths[0]}: its values, {low:g} to {high:g}, are rounded to whole numbers, "
                "as those of the training are: they seem to be in another unit",
                logging.WARNING,
            )

    def _extremes(self) -> tuple[float, float, bool]:
        """Return the least and the greatest value, and whether rounding, if any, changes none."""
        slowest = "DHW".index(self.files[0].order.dims[2])
        begin, end = Cut.balanced("rank", self.extents[slowest], self.grid.size).interval(
            self.grid.rank
        )
        layer = math.prod(self.extents) // self.extents[slowest]
        many = max(1, image.MASK_BLOCK // layer)
        low, high, whole = math.inf, -math.inf, True
        for number, (path, file) in enumerate(zip(self.paths, self.files, strict=True)):
            intervals = [(0, extent) for extent in file.shape]
            for lo in range(begin, end, many):
                intervals[1 + slowest] = (lo, min(lo + many, end))
                values = self._read(number, Box.of(intervals))
                least, most = check_finite(values, f"{path}:")
                low, high = min(low, float(least)), max(high, float(most))
                if self.dtype == np.int16 and values.dtype.kind == "f" and high - low < FEW_LEVELS:
                    whole = whole and bool((values == np.rint(values)).all())
        return low, high, whole

    def block(self, grid: Grid, wanted: Box) -> Array:
        """Read this rank's box (1, C, d, h, w) of the box ``wanted``; every rank calls it.

        Beyond the volume, where ``wanted`` may reach, it holds the fill value.
        """
        where = str(self.paths[0])
        return read_block(self.read, self.shape, self.dtype, where, grid, wanted, self.fill)

    def read(self, box: Box) -> Array:
        """Read a box (C, d, h, w) as training does, so that the network sees what it knows."""
        if self.lattice == self.extents:
            values = self._stored(box)
        else:
            values = np.concatenate([self._resampled(c, box) for c in range(box.lo[0], box.hi[0])])
        return as_hu(values) if self.dtype == np.int16 else values.astype(self.dtype, copy=False)

    def _stored(self, box: Box) -> Array:
        if len(self.files) == 1:
            return self._read(0, box)
        inside = Box((0, *box.lo[1:]), (1, *box.hi[1:]))
        return np.concatenate([self._read(c, inside) for c in range(box.lo[0], box.hi[0])])

    def _read(self, number: int, box: Box) -> Array:
        """Read a box of a file that must not change meanwhile; what was unpacked does not."""
        path, file = self.paths[number], self.files[number]
        if file.path != path:
            return file.read(box)
        with unchanged(path, path.name, self.stamps[number]):
            return file.read(box)

    def _resampled(self, channel: int, box: Box) -> Array:
        def read(inside: Box) -> Array:
            return self._stored(Box((channel, *inside.lo), (channel + 1, *inside.hi)))[0]

        inside = Box(box.lo[1:], box.hi[1:])
        return blurred_linear_box(read, self.extents, inside, self.lattice)[None]

    def write(self, read: Callable[[Box], image.Mask], path: Path) -> None:
        """Write a mask, of which ``read`` gives boxes, on the file's own lattice."""
        image.write_mask(path, read, self.files[0])

    def close(self) -> None:
        for place in self.unpacked:
            place.unlink(missing_ok=True)


class ArrayVolume:
    """Reads volumes of arrays in files, every rank its own hyperslab; targets need not be there.

    ``source`` has the volumes of the file. ``affine`` is what `hyperslab convert` left of a scan.
    """

    def __init__(self, source: Source, fill: float, affine: NDArray[Any] | None = None) -> None:
        self.source = source
        self.fill = fill
        self.affine = None if affine is None else np.asarray(affine)
        self.shape = source.shape
        self.extents = source.shape[1:]

    def block(self, grid: Grid, wanted: Box) -> Array:
        """Read as `NiftiVolume.block`."""
        with closing(self.source):
            return block_of_sample(self.source, 0, grid, wanted, self.fill)

    def write(self, read: Callable[[Box], image.Mask], path: Path) -> None:
        """Write as `NiftiVolume.write`; without an affine where the file knows none."""
        affine = None if self.affine is None else self.affine[:, [2, 1, 0, 3]]
        image.write_layers(path, read, self.extents, StorageOrder("WHD"), affine, None)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def open_volume(
    entry: InputFile,
    about: DataCard,
    data: DataSection,
    grid: Grid,
    scratch: Path,
    *,
    native: bool = False,
    fill: float = 0,
) -> NiftiVolume | ArrayVolume:
    """Open a scan, arrays of one of the layouts that are known, or what a recipe says of its own.

    A packed scan is unpacked into the folder ``scratch``; every rank calls it.

    Raises:
        DataError: on every rank: not such a file, or of another size than the network's.
    """
    if is_scan(entry, about):
        return NiftiVolume(entry.paths, about, grid, scratch, native=native, fill=fill)
    source, affine = broadcast_from_main(
        lambda: open_arrays(entry, about, data, native=native),
        failing=f"{entry.path}: cannot be read",
    )
    return ArrayVolume(source, fill, affine)


def block_of_sample(source: Source, sample: int, grid: Grid, wanted: Box, fill: float = 0) -> Array:
    """Read this rank's box (1, C, d, h, w) of a sample of a source, as `read_block` does."""
    shape, dtype, where = source.shape, source.dtype, source.where(sample)
    read = partial(source.read, sample)
    return read_block(read, shape, dtype, where, grid, wanted, fill)


def read_block(
    read: Callable[[Box], Array],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    where: str,
    grid: Grid,
    wanted: Box,
    fill: float = 0,
) -> Array:
    """Read this rank's box (1, C, d, h, w) of the box ``wanted`` of a volume; all ranks call it.

    ``read`` gives boxes of the volume of ``shape``; beyond it the result holds ``fill``.

    Raises:
        DataError: on every rank, if one cannot read its box.
    """
    box = grid.partition((1, *wanted.shape)).box(grid.coords)
    mine = Box(box.lo[1:], box.hi[1:]).shift(wanted.lo)
    return collective_try(
        # of a scan whose axes run backwards torch takes no view
        lambda: np.ascontiguousarray(read_filled(read, Box.whole(shape), mine, fill, dtype))[None],
        failing=f"{where}: cannot be read",
    )


def _trained_lattice(scan: image.NiftiFile, about: DataCard) -> tuple[int, ...] | None:
    """Return the voxels (D, H, W) of a scan as the network was trained to see it; None: its own.

    Volumes of one shape have that; those of one size of a voxel have as many as that makes.
    """
    if not about.varied:
        return about.whole[1:]
    size = spacing(scan.affine)[:3]
    if not about.voxel or np.allclose(size, about.voxel, rtol=5e-2):
        return None
    extents = np.array(scan.shape[1:]) * size / np.array(about.voxel)
    return tuple(max(1, round(float(extent))) for extent in extents)
