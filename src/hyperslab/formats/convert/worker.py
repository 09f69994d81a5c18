"""Converts one volume in a process of its own: writes its samples and has them read back.

A `Request` says what is asked of a conversion, an `Outcome` what became of a volume.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.formats import registry
from hyperslab.formats.convert.journal import REMEDY
from hyperslab.formats.files import Stamp, file_checksum, recorded_stamps
from hyperslab.formats.manifest import Entry
from hyperslab.formats.registry import Format, sources_of
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.storage import ChunkSides
from hyperslab.formats.views import selected
from hyperslab.formats.writer import SampleToWrite, Writer, checksums, slab_thickness


@dataclass(frozen=True, slots=True)
class Outcome:
    """Reports what became of a volume; ``reason`` names the file and what is wrong with it."""

    state: Literal["converted", "kept", "failed"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """Describes the conversion that is asked for; what does not exist is refused."""

    format: str
    cut: tuple[int, ...] | None = None  # by grids, along D, H and W; chunks are made for it
    width: int | None = None  # of the sub-volumes that are made of each volume
    compression: str = "none"
    redshifts: tuple[float, ...] | None = None  # that go along, as do targets; None takes all
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        registry.check_written(self.format, self.compression)
        if self.cut is not None and not self.writer.chunked:
            raise DataError(f"{self.format} files have no chunks; leave out the cut")
        if self.cut is not None and (len(self.cut) != 3 or min(self.cut) < 1):
            raise DataError(f"cut {self.cut}: needs three numbers of parts, of at least 1")

    def samples(self, volumes: Source) -> Source:
        """Views volumes as they are to be written, and as the format will give them back."""
        shown = selected(volumes, self.redshifts, self.targets, self.width)
        return self.writer.view(shown)

    @property
    def writer(self) -> Writer:
        """Returns the writer of the format."""
        writer = registry.named(self.format).writer
        assert writer is not None, "it was looked up when the request was made"
        return writer


Todo = tuple[tuple[int, str], ...]
Doubtful = tuple[tuple[int, Entry], ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One volume of ``root``, a source of its own, and its samples.

    Pickle can send all of it to another process, where the format may not be registered.
    """

    name: str
    volume: str
    root: Path
    source: Source
    request: Request
    format: Format
    chunk: ChunkSides | None
    scratch: Path  # a folder for this job alone
    todo: Todo  # the number of each sample within the volume, and its name
    doubtful: Doubtful  # finished ones, of a file that does not look as it did


@dataclass(frozen=True, slots=True)
class Done:
    """Holds what is to be recorded of a job that is done, or why there is nothing."""

    job: Job
    entries: tuple[Entry, ...] = ()
    reason: str = ""


def run(job: Job) -> Done:
    """Writes and verifies what is to be done of a volume; the files are left in ``scratch``.

    Raises a DataError if a file cannot be written; other failures are reported.
    """
    registry.adopt(job.format)
    whole = job.source
    try:
        source = job.request.samples(whole)
        before = recorded_stamps(whole.files(0), job.root)
        entries = [_checked(source, number, entry) for number, entry in job.doubtful]
        entries += _written(source, job)
        if recorded_stamps(whole.files(0), job.root) != before:
            raise DataError(f"{whole.where(0)}: has changed while it was read")
        return Done(job, tuple(entry | {"stamps": before} for entry in entries))
    except DataError as error:
        shutil.rmtree(job.scratch, ignore_errors=True)
        return Done(job, reason=str(error))
    except MemoryError as error:
        shutil.rmtree(job.scratch, ignore_errors=True)
        return Done(job, reason=f"{whole.where(0)}: no memory is left for it: {error}")
    except OSError as error:
        shutil.rmtree(job.scratch, ignore_errors=True)  # it would fill a full disk
        raise DataError(
            f"{job.scratch.parents[1]}: {job.name} cannot be written as {job.format.name}: "
            f"{error.strerror or error}; finished files are kept, run the command again to continue"
        ) from error
    finally:
        whole.close()


def _written(source: Source, job: Job) -> list[Entry]:
    """Write samples and verify them."""
    if not job.todo:
        return []
    samples = {}
    writer, compression = job.request.writer, job.request.compression
    job.scratch.mkdir()
    for number, name in job.todo:
        extras = source.extras(number)
        sample = SampleToWrite(source, number, extras, job.chunk, compression)
        for file in writer.files(name, compression):
            (job.scratch / file).parent.mkdir(parents=True, exist_ok=True)
        writer.write(job.scratch, name, sample)
        samples[name] = sample
    verify_written(job.scratch, writer, samples)
    return [_entry(job, name, sample) for name, sample in samples.items()]


def _entry(job: Job, name: str, sample: SampleToWrite) -> Entry:
    files = job.request.writer.files(name, job.request.compression)
    entry: Entry = {
        "name": name,
        "files": {file: Stamp.of(job.scratch / file).size for file in files},
        "sums": {file: file_checksum(job.scratch / file) for file in files},
        "source": job.name,
        "crc32c": str(sample.tally),
    }
    if job.volume != name:
        entry["volume"] = job.volume
    if sample.source.classes:
        entry["labels_crc32c"] = str(sample.label_tally)
    else:
        entry["target"] = sample.target.tolist()
    return entry


def _checked(source: Source, number: int, entry: Entry) -> Entry:
    """Returns the entry, if what is read now is what was read then."""
    step = slab_thickness(source.shape, source.dtype.itemsize)
    found: Entry = {**checksums(source, number, step)}
    if not source.classes:
        found["target"] = source.target(number).tolist()
    for key, value in found.items():
        if entry[key] != value:
            raise DataError(
                f"{source.where(number)}: has changed since {entry['name']!r} was made of it "
                f"({key} was {entry[key]}, now {value}): delete that or {REMEDY}"
            )
    return entry


def verify_written(folder: Path, writer: Writer, written: Mapping[str, SampleToWrite]) -> None:
    """Opens the folder, and refuses it if what is read of it is not what was to be written."""
    expected = next(iter(written.values())).source
    options = ScanOptions(writer.told(expected), writer.read_as, own=True)
    found = sources_of([folder], Grid(), options)
    try:
        _same(folder, "names", sorted(found.names), sorted(written))
        for sample, name in enumerate(found.names):
            _compare_written(found, sample, writer, written[name])
    finally:
        found.close()


def _compare_written(found: Source, sample: int, writer: Writer, wanted: SampleToWrite) -> None:
    where = found.where(sample)
    source = wanted.source
    for word in ("shape", "dtype", "classes"):
        _same(where, word, getattr(found, word), getattr(source, word))
    sums = checksums(found, sample, wanted.step)
    _same(where, "checksum", sums["crc32c"], str(wanted.tally))
    if source.classes:
        _same(where, "checksum of the labels", sums["labels_crc32c"], str(wanted.label_tally))
        return
    if writer.named:
        _same(where, "parameters", found.parameters.names, source.parameters.names)
    exact = writer.stored_target(wanted.target).tolist()
    _same(where, "targets", found.target(sample).tolist(), exact)


def _same(where: Path | str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise DataError(f"{where}: {what} read back as {found}, but were {wanted}: not kept")
