"""Reading back what was written, as its users will, before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.formats.registry import source_of
from hyperslab.formats.shared import slabs
from hyperslab.formats.shared.chunking import AXES
from hyperslab.formats.source import Array, Source
from hyperslab.formats.writer import SampleToWrite, Writer
from hyperslab.geometry import Box, Cut

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
    where, source = found.where(sample), wanted.source
    for word in ("shape", "dtype", "classes"):
        _same(where, word, getattr(found, word), getattr(source, word))
    step = slabs.thickness(
        source.shape, source.dtype.itemsize, wanted.chunk[0] if wanted.chunk else 1
    )
    rows, columns = (
        Cut.balanced(*dim).intervals
        for dim in zip(AXES[1:], source.shape[2:], cut[1:], strict=True)
    )

    def boxes(slab: Box, read: Callable[[int, Box], Array], dtype: np.dtype[Any]) -> Array:
        """The slab, put together of the boxes of the ranks that would share it."""
        whole = np.empty(slab.shape, dtype)
        for top, bottom in rows:
            for left, right in columns:
                box = Box((*slab.lo[:-2], top, left), (*slab.hi[:-2], bottom, right))
                whole[box.slices(slab)] = read(sample, box)
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


def _same(where: Path | str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise DataError(f"{where}: {what} read back as {found}, but were {wanted}: not kept")
