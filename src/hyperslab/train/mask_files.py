"""Writes masks that no rank holds: all ranks fill one file of bytes, of which the result is made.

In reading order: the file of bytes, in which each rank writes its boxes and which a stopped run
finds again; what a format has to know of a mask; HDF5 and OME-Zarr, which all ranks write; and
`publish`, which writes any of them, NIfTI layer by layer on the main rank.

All ranks have to see the output folder, as they do that of checkpoints.

Legend: (D, H, W) voxels.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.comm import Grid
from hyperslab.comm.agreement import broadcast_from_main, collective_try
from hyperslab.errors import DataError
from hyperslab.formats import optional
from hyperslab.formats.nifti.image import Mask
from hyperslab.formats.nifti.resample import nearest_box, spacing
from hyperslab.formats.storage import read_strided
from hyperslab.formats.targets import SCAN_KEYS
from hyperslab.geometry import Box, Cut
from hyperslab.train.input_files import MASK_SUFFIXES
from hyperslab.util.atomic_files import make_scratch, partial_path, remove_scratch

MaskFormat = Literal["nifti", "hdf5", "zarr"]

UINT8 = np.dtype(np.uint8)

SIDE = 64  # [voxels] of a chunk in Zarr; below that no coarser level is made
PIECE = 32 << 20  # the most voxels that a rank copies at a time; one layer at least


def check_replaceable(path: Path, format: MaskFormat) -> None:
    """Refuse a folder in the place of a mask that is none, before anything is predicted.

    Raises:
        DataError: it is there.
    """
    if path.is_dir() and not (format == "zarr" and (path / "zarr.json").is_file()):
        raise DataError(f"{path} is a folder with other things, and stays as it is: move it away")


def has_bytes(path: Path, shape: Sequence[int]) -> bool:
    """Tell whether a stopped run has left the file of a mask of ``shape`` (D, H, W)."""
    there = path.is_file() and not path.is_symlink()
    return there and path.stat().st_size == math.prod(shape)


class MaskBytes:
    """The classes of a volume of ``shape`` (D, H, W), a byte each, in a file that all ranks share.

    Each rank writes boxes of its own, and reads any once all have written.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], kept: int = 0) -> None:
        """Every rank calls it. The first ``kept`` layers of a stopped run stay, if they are there.

        Raises:
            DataError: on every rank: the file cannot be made, or another rank does not see it.
        """
        self.path = path
        self.shape = shape
        self.kept = broadcast_from_main(lambda: self._make(kept), failing=f"cannot write {path}")
        self._file = collective_try(
            lambda: os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC),
            failing=f"cannot write {path}, which all ranks have to see",
        )

    def _make(self, kept: int) -> int:
        if 0 < kept <= self.shape[0] and has_bytes(self.path, self.shape):
            return kept
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with self.path.open("xb") as file:
            file.truncate(math.prod(self.shape))
        return 0

    def write(self, box: Box, classes: Mask) -> None:
        """Write the classes (d, h, w) of a box, and see that they reach the disk."""
        if box.empty:
            return
        write_strided(self._file, 0, self.shape, box, classes)
        os.fdatasync(self._file)

    def read(self, box: Box) -> Mask:
        return read_strided(self._file, 0, self.shape, UINT8, box)

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        """Remove the file; the main rank calls it."""
        self.path.unlink(missing_ok=True)


def write_strided(file: int, start: int, stored: Sequence[int], box: Box, values: Mask) -> None:
    """Write a box of the array ``stored`` of bytes, whose first is the file's at ``start``.

    ``file`` is its number, open for writing.
    """
    values = np.ascontiguousarray(values)
    inner = len(stored)  # the dims from here on lie in one piece
    while inner and (inner == len(stored) or box.shape[inner] == stored[inner]):
        inner -= 1
    strides = [int(np.prod(stored[dim + 1 :])) for dim in range(len(stored))]
    first = start + sum(lo * stride for lo, stride in zip(box.lo, strides, strict=True))
    for index in np.ndindex(*box.shape[:inner]):
        place = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        rest = values[index].data.cast("B")
        while rest:
            done = os.pwrite(file, rest, place)
            rest = rest[done:]
            place += done


def strips(extents: Sequence[int], ranks: int) -> dict[int, Box]:
    """Divide a volume among ranks along its longer side of H and W; some may get nothing.

    Not along D: windows move along it, and all ranks are to have a part of each window.
    """
    dim = 1 if extents[1] >= extents[2] else 2
    cut = Cut.balanced("rank", extents[dim], ranks)
    found = {}
    for rank, interval in enumerate(cut.intervals):
        intervals = [(0, extent) for extent in extents]
        intervals[dim] = interval
        found[rank] = Box.of(intervals)
    return {rank: box for rank, box in found.items() if not box.empty}


@dataclass(frozen=True)
class FinishedMask:
    """A mask whose bytes are all written, on the lattice ``extents`` (D, H, W) of its volume.

    ``affine`` (4, 4) maps (d, h, w, 1) to [mm] in RAS+, where it is known.
    """

    mask: MaskBytes
    extents: tuple[int, ...]
    classes: tuple[str, ...]
    affine: NDArray[Any] | None

    def read(self, box: Box) -> Mask:
        """Read the classes (d, h, w) of a box, the nearest ones on the network's own lattice."""
        return nearest_box(self.mask.read, self.mask.shape, box, self.extents)


def publish(
    found: FinishedMask,
    path: Path,
    format: MaskFormat,
    grid: Grid,
    to_nifti: Callable[[Callable[[Box], Mask], Path], None],
) -> None:
    """Write a mask in its format, whole or not at all; every rank calls it.

    ``to_nifti`` writes it from boxes, on the main rank.

    Raises:
        DataError: on every rank: it cannot be written.
        HyperslabError: the extra ``zarr`` is not installed.
    """
    failing = f"cannot write {path}"
    try:
        if format == "nifti":
            broadcast_from_main(lambda: to_nifti(found.read, path), failing=failing)
        elif format == "hdf5":
            _write_hdf5(found, path, grid, failing)
        else:
            _write_zarr(found, path, grid, failing)
    except DataError:  # a part of it would fill a full disk
        broadcast_from_main(lambda: remove_scratch(partial_path(path)))
        raise


def _write_hdf5(found: FinishedMask, path: Path, grid: Grid, failing: str) -> None:
    """Write a data set in one piece, of which each rank fills some layers in place.

    Distribution scheme: 1. the main rank makes the file with room for all voxels and says where
    that is, 2. each rank writes its layers there, 3. the main rank gives the file its name.
    """
    aside = partial_path(path)

    def make() -> int:
        aside.unlink(missing_ok=True)
        with h5py.File(aside, "x") as file:
            kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            kind.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            kind.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple(found.extents)
            key = SCAN_KEYS[1].encode()
            stored = h5py.h5d.create(file.id, key, h5py.h5t.STD_U8LE, space, kind)
            file.attrs["classes"] = np.array([name.encode() for name in found.classes])
            if found.affine is not None:
                file.attrs["affine"] = found.affine
            return int(stored.get_offset())

    start = broadcast_from_main(make, failing=failing)

    def fill() -> None:
        depth, *plane = found.extents
        many = max(1, PIECE // int(np.prod(plane)))
        begin, end = Cut.balanced("rank", depth, grid.size).interval(grid.rank)
        with aside.open("r+b", buffering=0) as file:
            for lo in range(begin, end, many):
                box = Box((lo, 0, 0), (min(lo + many, end), *plane))
                write_strided(file.fileno(), start, found.extents, box, found.read(box))

    collective_try(fill, failing=failing)
    broadcast_from_main(lambda: aside.replace(path), failing=failing)


def _write_zarr(found: FinishedMask, path: Path, grid: Grid, failing: str) -> None:
    """Write an OME-Zarr image of labels: the mask, and coarser levels of every second voxel.

    Distribution scheme: 1. the main rank makes the group, 2. level by level each rank writes its
    share of the chunks, the coarser ones from the level before.
    """
    zarr = optional.zarr()
    aside = partial_path(path)
    levels = list(_levels(found.extents))

    def make() -> None:
        make_scratch(aside)
        group = zarr.create_group(aside, zarr_format=3, attributes=_ome(found, path, levels))
        for level, shape in enumerate(levels):
            group.create_array(
                str(level),
                shape=shape,
                chunks=tuple(min(SIDE, extent) for extent in shape),
                dtype=UINT8,
                compressors=[zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()],
                dimension_names=("z", "y", "x"),
                # So that a chunk that is lost is missed.
                config={"write_empty_chunks": True},
            )

    broadcast_from_main(make, failing=failing)

    def fill(level: int) -> None:
        group = zarr.open_group(aside, mode="r+")
        array = group[str(level)]
        depth, height, width = levels[level]
        corners = itertools.product(range(0, depth, SIDE), range(0, height, SIDE))
        for d, h in itertools.islice(corners, grid.rank, None, grid.size):
            box = Box((d, h, 0), (min(d + SIDE, depth), min(h + SIDE, height), width))
            if level == 0:
                array[box.slices()] = found.read(box)
            else:
                finer = tuple(slice(2 * part.start, 2 * part.stop) for part in box.slices())
                array[box.slices()] = group[str(level - 1)][finer][::2, ::2, ::2]

    for level in range(len(levels)):
        collective_try(partial(fill, level), failing=failing)

    def finish() -> None:
        remove_scratch(path)
        aside.replace(path)

    broadcast_from_main(finish, failing=failing)


def _levels(extents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the extents of a mask and its coarser levels, until one is a single chunk.

    >>> list(_levels((200, 65, 64)))
    [(200, 65, 64), (100, 33, 32), (50, 17, 16)]
    """
    yield extents
    while max(extents) > SIDE:
        extents = tuple(-(-extent // 2) for extent in extents)
        yield extents


def _ome(found: FinishedMask, path: Path, levels: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return the attributes of the group, as OME-Zarr 0.5 wants them, with ours beside."""
    known = found.affine is not None
    sizes = spacing(found.affine).tolist()[:3] if found.affine is not None else [1.0, 1.0, 1.0]
    unit = {"unit": "millimeter"} if known else {}
    datasets = [
        {
            "path": str(level),
            "coordinateTransformations": [
                {"type": "scale", "scale": [size * 2**level for size in sizes]}
            ],
        }
        for level in range(len(levels))
    ]
    image = {
        "name": path.name.removesuffix(MASK_SUFFIXES["zarr"]),
        "axes": [{"name": name, "type": "space", **unit} for name in "zyx"],
        "datasets": datasets,
        "type": "nearest",
    }
    affine = {} if found.affine is None else {"affine": np.asarray(found.affine).tolist()}
    ome = {"version": "0.5", "multiscales": [image], "image-label": {"version": "0.5"}}
    return {"ome": ome, "classes": list(found.classes), **affine}
