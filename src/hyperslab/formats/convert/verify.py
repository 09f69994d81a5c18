"""Reads samples back: converted ones against what was written, any others against their checksums.

`verify_written` opens a folder as its users will, before it gets its name; `verify_samples`
reads whole samples, so that every checksum that there is of them is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.comm import Grid
from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.errors import DataError
from hyperslab.formats.manifest import Entry, read_manifest
from hyperslab.formats.registry import source_of
from hyperslab.formats.source import Array, Source
from hyperslab.formats.writer import SampleToWrite, Writer, checksums, slab_thickness
from hyperslab.geometry import Box, Cut, Partition, transfers

RankShares = tuple[int, ...]


def verify_written(
    folder: Path, writer: Writer, written: Mapping[str, SampleToWrite], cut: RankShares
) -> None:
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
            _compare_written(found, sample, writer, written[name], cut)
    finally:
        found.close()


def _compare_written(
    found: Source, sample: int, writer: Writer, wanted: SampleToWrite, cut: RankShares
) -> None:
    where = found.where(sample)
    source = wanted.source
    for word in ("shape", "dtype", "classes"):
        _same(where, word, getattr(found, word), getattr(source, word))
    columns = _columns(source.shape, cut)

    def boxes(slab: Box, read: Callable[[int, Box], Array], dtype: np.dtype[Any]) -> Array:
        """Returns the slab, put together of the boxes of the ranks that would share it."""
        whole = np.empty(slab.shape, dtype)
        first = len(source.shape) - slab.ndim  # labels have no channels
        owned = [Box(box.lo[first:], box.hi[first:]) for box in columns]
        for part in transfers(slab, enumerate(owned)):
            whole[part.box.slices(slab)] = read(sample, part.box)
        return whole

    tallies = checksums(
        found,
        sample,
        wanted.step,
        lambda slab: boxes(slab, found.read, found.dtype),
        lambda slab: boxes(slab, found.labels, np.dtype(np.uint8)),
    )
    _same(where, "checksum", tallies["crc32c"], str(wanted.tally))
    if source.classes:
        _same(where, "checksum of the labels", tallies["labels_crc32c"], str(wanted.label_tally))
        return
    if writer.named:
        _same(where, "parameters", found.parameters.names, source.parameters.names)
    exact = writer.stored_target(wanted.target).tolist()
    _same(where, "targets", found.target(sample).tolist(), exact)


def _columns(shape: tuple[int, ...], cut: RankShares) -> list[Box]:
    """Lists the boxes that each row and column of ranks would hold of (C, D, H, W), all D of it."""
    height, width = (
        Cut.balanced(*dim) for dim in zip(SPATIAL_AXES[1:], shape[2:], cut[1:], strict=True)
    )
    partition = Partition(shape, (None, None, height, width))
    return [partition.box(coords) for coords in partition.peers({})]


def _same(where: Path | str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise DataError(f"{where}: {what} read back as {found}, but were {wanted}: not kept")


@dataclass(frozen=True, slots=True)
class Verified:
    """A sample that was read whole; ``problem``: what is wrong with it, empty if nothing is.

    ``recorded``: its values were also compared with the journal of the conversion that made it.
    """

    name: str
    problem: str = ""
    recorded: bool = False


def verify_samples(source: Source, folder: Path | None) -> Iterator[Verified]:
    """Each sample, read whole; sums of chunks, records and gzip are compared by who reads them.

    ``folder``: of the samples, where a conversion may have left their checksums.

    Raises:
        DataError: its journal cannot be read.
    """
    entries = [] if folder is None else read_manifest(folder)[1]
    recorded = {entry["name"]: entry for entry in entries}
    for sample, name in enumerate(source.names):
        entry = recorded.get(name)
        try:
            _verify_sample(source, sample, entry)
        except (DataError, OSError) as error:
            yield Verified(name, str(error))
        else:
            yield Verified(name, recorded=entry is not None and "crc32c" in entry)


def _verify_sample(source: Source, sample: int, entry: Entry | None) -> None:
    # In one slab, where a sum is over all of it.
    shape = source.shape_of(sample)
    step = shape[1] if source.summed_whole else slab_thickness(shape, source.dtype.itemsize)
    found = checksums(source, sample, step)
    if not source.classes:
        source.target(sample)
    for key, value in found.items():
        if entry is not None and entry.get(key, value) != value:
            raise DataError(
                f"{source.where(sample)}: is damaged: its values are not those that were converted "
                f"({key} was {entry[key]}, now {value})\n    delete it and convert it again"
            )
