"""Verification: what was written is read back, as its users will, before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.comm import Grid
from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.errors import DataError
from hyperslab.formats import slabs
from hyperslab.formats.registry import source_of
from hyperslab.formats.source import Array, Source
from hyperslab.formats.writer import SampleToWrite, Writer
from hyperslab.geometry import Box, Cut, Partition, transfers

Shares = tuple[int, ...]


def verify(folder: Path, writer: Writer, written: Mapping[str, SampleToWrite], cut: Shares) -> None:
    """Open the folder, and compare all that is read of it with what was to be written.

    Volumes are read box by box, as ranks on a grid of ``cut`` (depth, height, width) would.

    Raises:
        DataError: the folder cannot be read, or what is read differs.
    """
    expected = next(iter(written.values())).source
    found = source_of(folder, Grid(), writer.told(expected), writer.read_as)
    try:
        _same(folder, "names", sorted(found.names), sorted(written))
        for sample, name in enumerate(found.names):
            _verify(found, sample, writer, written[name], cut)
    finally:
        found.close()


def _verify(found: Source, sample: int, writer: Writer, wanted: SampleToWrite, cut: Shares) -> None:
    where = found.where(sample)
    source = wanted.source
    for word in ("shape", "dtype", "classes"):
        _same(where, word, getattr(found, word), getattr(source, word))
    step = slabs.thickness(
        source.shape, source.dtype.itemsize, wanted.chunk[0] if wanted.chunk else 1
    )
    columns = _columns(source.shape, cut)

    def boxes(slab: Box, read: Callable[[int, Box], Array], dtype: np.dtype[Any]) -> Array:
        """The slab, put together of the boxes of the ranks that would share it."""
        whole = np.empty(slab.shape, dtype)
        first = len(source.shape) - slab.ndim  # labels have no channels
        owned = [Box(box.lo[first:], box.hi[first:]) for box in columns]
        for part in transfers(slab, enumerate(owned)):
            whole[part.box.slices(slab)] = read(sample, part.box)
        return whole

    def read(slab: Box) -> Array:
        return boxes(slab, found.read, found.dtype)

    def read_labels(slab: Box) -> Array:
        return boxes(slab, found.labels, np.dtype(np.uint8))

    tally = slabs.Tally()
    slabs.pass_by(slabs.values(found, sample, step, tally, read))
    _same(where, "checksum", str(tally), str(wanted.tally))
    if source.classes:
        tally = slabs.Tally()
        slabs.pass_by(slabs.labels(found, sample, step, tally, read_labels))
        _same(where, "checksum of the labels", str(tally), str(wanted.label_tally))
        return
    if writer.named:
        _same(where, "parameters", found.parameters.names, source.parameters.names)
    exact = writer.stored_target(wanted.target).tolist()
    _same(where, "targets", found.target(sample).tolist(), exact)


def _columns(shape: tuple[int, ...], cut: Shares) -> list[Box]:
    """What the ranks of each row and column would hold of a volume (C, D, H, W), all D of it."""
    height, width = (
        Cut.balanced(*dim) for dim in zip(SPATIAL_AXES[1:], shape[2:], cut[1:], strict=True)
    )
    partition = Partition(shape, (None, None, height, width))
    return [partition.box(coords) for coords in partition.peers({})]


def _same(where: Path | str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise DataError(f"{where}: {what} read back as {found}, but were {wanted}: not kept")
