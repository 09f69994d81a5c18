"""Defines `Writer`, in which a format writes samples; makes and verifies their checksums.

A sample passes in slabs along depth, each a multiple of a chunk thick, so that no process holds
a whole volume, and its checksum is taken as they pass.

[Note: checksum] The CRC32C of a sample's values in the order (D, H, W, C), little-endian,
whatever the file's own order is; of its labels, that of (D, H, W) as uint8. Slabs of any
thickness give the same, and of a public CosmoFlow file it is the checksum of ``full`` as it is
stored.
"""

from __future__ import annotations

import gzip
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

import google_crc32c
import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.files import check_finite, read_box
from hyperslab.formats.manifest import Entry, read_manifest
from hyperslab.formats.source import Array, Extras, Source
from hyperslab.formats.storage import ChunkSides
from hyperslab.formats.storage_order import Channels
from hyperslab.formats.targets import check_classes
from hyperslab.geometry import Box

SLAB_BYTES = 64 * 1024 * 1024
"""A slab has at most so many bytes, unless one chunk is thicker [B]."""

Slabs = Iterator[tuple[int, Array]]


class Checksum:
    """The checksum of what has passed."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, values: Array) -> None:
        """Take values (d, H, W, C) or (d, H, W) into account."""
        little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        self._sum = google_crc32c.extend(self._sum, little.reshape(-1).view(np.uint8))

    def __str__(self) -> str:
        return f"{self._sum:08x}"


def slab_thickness(shape: tuple[int, ...], itemsize: int, side: int = 1) -> int:
    """Counts the planes of a slab of (C, D, H, W): a multiple of a chunk's ``side``."""
    plane = math.prod(shape) // shape[1] * itemsize
    return max(1, SLAB_BYTES // (plane * side)) * side


def sample_slabs(
    source: Source, sample: int, step: int, tally: Checksum, *, labels: bool = False
) -> Slabs:
    """Yields where each slab begins, and its values (C, d, H, W), or its labels (d, H, W).

    NaN and infinite values, and labels that are no classes, are refused.
    """
    channels, depth, height, width = source.shape_of(sample)
    front = () if labels else (channels,)
    name = source.where(sample)
    for lo in range(0, depth, step):
        first = (0, lo, 0, 0)[1 - len(front) :]
        box = Box(first, (*front, min(lo + step, depth), height, width))
        if labels:
            slab, where = read_box(source.labels, sample, box, name)
            check_classes(slab, source.classes, where)
        else:
            slab, where = read_box(source.read, sample, box, name, np.dtype(source.dtype))
            check_finite(slab, where)
        tally.add(slab if labels else np.moveaxis(slab, 0, -1))
        yield lo, slab


def checksums(source: Source, sample: int, step: int) -> dict[str, str]:
    """Reads all of a sample, and returns its checksums by their keys in a manifest."""
    found = {}
    for key, labels in (("crc32c", False), ("labels_crc32c", True)):
        if source.classes or not labels:
            tally = Checksum()
            for _ in sample_slabs(source, sample, step, tally, labels=labels):
                pass
            found[key] = str(tally)
    return found


@dataclass(frozen=True, slots=True)
class Verified:
    """A sample that was read whole."""

    name: str
    problem: str = ""  # what is wrong with it
    recorded: bool = False  # compared with the journal of the conversion that made it


def verify_samples(source: Source, folder: Path | None) -> Iterator[Verified]:
    """Yields each sample, read whole; reading compares the sums of chunks, records and gzip.

    ``folder``: of the samples, where a conversion may have left their checksums.
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


GZIP_LEVEL = 6
"""The level of gzip that TensorFlow takes."""


@dataclass(frozen=True, slots=True)
class SampleToWrite:
    """A sample of ``source`` to write. Its checksums are known when its slabs have passed."""

    source: Source
    sample: int
    extras: Extras
    chunk: ChunkSides | None
    compression: str
    tally: Checksum = field(default_factory=Checksum)
    label_tally: Checksum = field(default_factory=Checksum)

    @property
    def target(self) -> Array:
        """Returns the targets (P,)."""
        return self.source.target(self.sample)

    @property
    def step(self) -> int:
        """Counts the planes of its slabs."""
        side = self.chunk[0] if self.chunk else 1
        return slab_thickness(self.source.shape, self.source.dtype.itemsize, side)

    def values(self) -> Slabs:
        """Yields where along the depth each slab begins, and its values (C, d, H, W)."""
        return sample_slabs(self.source, self.sample, self.step, self.tally)

    def labels(self) -> Slabs:
        """Yields where each slab begins along the depth, and its labels (d, H, W)."""
        return sample_slabs(self.source, self.sample, self.step, self.label_tally, labels=True)


class Writer(ABC):
    """Writes samples in one format; pickle can send it to another process.

    ``compressions``: those that it has. ``chunked``: its files are cut into chunks, for grids.
    ``labels``: it holds a class for every voxel. ``named``: it holds parameters' names.
    ``read_as``: the format's name, if the reader should be told it instead of finding it out and
    logging it. ``suffix``: that of a sample's file, unless `files` says otherwise. ``per_file``:
    the number of samples that share a file ``NUMBER{suffix}``; that of each is appended to it when
    it is finished.
    """

    compressions: ClassVar[tuple[str, ...]] = ("none",)
    labels: ClassVar[bool] = False
    named: ClassVar[bool] = True
    read_as: ClassVar[str | None] = None
    chunked: ClassVar[bool] = False
    per_file: ClassVar[int] = 1
    suffix: ClassVar[str] = ""

    def misfit(self, source: Source) -> str:
        """Names what the format cannot hold of the samples without a loss; empty if nothing.

        A format that adds to this asks its base class first.
        """
        return "labels" if source.classes and not self.labels else ""

    def view(self, source: Source) -> Source:
        """Returns the source as the format stores it: the same, or in other units or types."""
        return source

    def told(self, source: Source) -> Channels | None:
        """Returns what a reader has to be told of the channels, where the files do not say it."""
        return None

    def stored_target(self, exact: Array) -> Array:
        """Returns the targets (P,) as the format has them."""
        return exact

    def names(self, source: Source, root: str) -> Sequence[str]:
        """Names the samples, in their order; ``root`` is the name of their folder."""
        return source.names

    def files(self, name: str, compression: str) -> Sequence[str]:
        """Returns the files of a sample, relative, in the order in which they get their names."""
        return (name + self.suffix,)

    @abstractmethod
    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        """Write a sample into a folder that exists; so do those of its `files`.

        All slabs of ``sample.values()`` have to be taken, and those of its labels if it has such.

        Raises:
            DataError: it cannot be read.
            OSError: it cannot be written.
        """

    def begin(self, out: Path, parameters: Sequence[str], entries: Sequence[Entry]) -> None:  # noqa: B027
        """Prepares a run; ``entries`` are those of the finished samples."""

    def finish(self, out: Path, entries: Sequence[Entry]) -> None:  # noqa: B027
        """Hears that these samples are about to get their names."""


@contextmanager
def open_gzip_writer(path: Path, compression: str) -> Iterator[IO[bytes]]:
    """Gives a new file, of which gzip's bytes depend on the content alone."""
    with path.open("xb") as file:
        if compression == "none":
            yield file
            return
        with gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as pack:
            yield pack  # type: ignore[misc]
