"""`Writer`: what a format can hold, and how a sample is written in it."""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from hyperslab.formats import slabs
from hyperslab.formats.extras import Extras
from hyperslab.formats.shared.channels import Channels
from hyperslab.formats.shared.chunking import Sides
from hyperslab.formats.shared.manifest import Entry
from hyperslab.formats.source import Array, Source

LEVEL = 6
"""Of gzip: TensorFlow's."""


@dataclass(frozen=True, slots=True)
class SampleToWrite:
    """A sample of ``source`` to write. Its checksums are known when its slabs have passed."""

    source: Source
    sample: int
    extras: Extras
    chunk: Sides | None
    compression: str
    tally: slabs.Tally = field(default_factory=slabs.Tally)
    label_tally: slabs.Tally = field(default_factory=slabs.Tally)

    @property
    def target(self) -> Array:
        """The targets (P,)."""
        return self.source.target(self.sample)

    def values(self) -> slabs.Slabs:
        """Where each slab begins along the depth, and its values (C, d, H, W): whole chunks."""
        return slabs.values(self.source, self.sample, self._step(), self.tally)

    def labels(self) -> slabs.Slabs:
        """Where each slab begins along the depth, and its labels (d, H, W)."""
        return slabs.labels(self.source, self.sample, self._step(), self.label_tally)

    def _step(self) -> int:
        source = self.source
        side = self.chunk[0] if self.chunk else 1
        return slabs.thickness(source.shape, source.dtype.itemsize, side)


class Writer(ABC):
    """Writes samples in one format; pickle can send it to another process.

    ``compressions``: that it has. ``chunked``: its files are cut into chunks, for grids.
    ``labels``: it holds a class for every voxel. ``named``: it holds parameters' names.
    ``read_as``: the format's name, where the reader has to be told it, because it would find it out
    and write it to the log. ``per_file``: so many samples share a file ``NUMBER{suffix}``, into
    which the one file of each is appended when it is finished.
    """

    compressions: ClassVar[tuple[str, ...]] = ("none",)
    labels: ClassVar[bool] = False
    named: ClassVar[bool] = True
    read_as: ClassVar[str | None] = None
    chunked: ClassVar[bool] = False
    per_file: ClassVar[int] = 1
    suffix: ClassVar[str] = ""

    def misfit(self, source: Source) -> str:
        """What of the samples the format cannot hold without a loss; empty if there is nothing.

        A format that adds to this asks its base class first.
        """
        return "labels" if source.classes and not self.labels else ""

    def view(self, source: Source) -> Source:
        """The source as the format can give it back: the same, or in other units or types."""
        return source

    def told(self, source: Source) -> Channels | None:
        """What a reader has to be told of the channels, where the files do not say it."""
        return None

    def stored_target(self, exact: Array) -> Array:
        """The targets (P,) as the format has them."""
        return exact

    def names(self, source: Source, root: str) -> Sequence[str]:
        """What the samples will be called, in their order; ``root`` is the name of their folder."""
        return source.names

    @abstractmethod
    def files(self, name: str, compression: str) -> Sequence[str]:
        """The files of a sample, relative, in the order in which they get their names."""

    @abstractmethod
    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        """Write a sample into a folder that exists; so do those of its `files`.

        All slabs of ``sample.values()`` have to be taken, and those of its labels if it has such.

        Raises:
            DataError: it cannot be read.
            OSError: it cannot be written.
        """

    def begin(self, out: Path, parameters: Sequence[str], entries: Sequence[Entry]) -> None:  # noqa: B027
        """Before a run: ``entries`` are of the samples that are finished."""

    def finish(self, out: Path, entries: Sequence[Entry]) -> None:  # noqa: B027
        """These samples are about to get their names."""


@contextmanager
def packed(path: Path, compression: str) -> Iterator[IO[bytes]]:
    """A new file, of which gzip's bytes depend on the content alone."""
    with path.open("xb") as file:
        if compression == "none":
            yield file
            return
        with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as pack:
            yield pack  # type: ignore[misc]
