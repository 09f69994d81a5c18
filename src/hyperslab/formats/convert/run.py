"""Converts a folder to another format: what is missing is made, the rest is kept.

In reading order: the `Manifest` as it grows, and the `Shards` that many samples share; a `Request`
says what is asked of a conversion, an `Outcome` what became of a volume; `run` converts one volume
in a process of its own: it writes its samples and has them read back; a `Plan` has the samples,
their names and chunks, and which are finished; `convert`.

A sample is recorded in the manifest (`formats.manifest`) before its files get their names: what
has a name and no line is somebody else's, what has a line and no name is made again.

Files that many samples share are appended, one sample after the other. What has been appended is
on the disk before the manifest says so. So what lies behind the last recorded sample of a file is
what a killed run has begun, and is cut off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import google_crc32c

from hyperslab.errors import DataError, system_errors_as
from hyperslab.formats import registry
from hyperslab.formats.files import STRICT, AccessPolicy, Stamp, file_checksum, recorded_stamps
from hyperslab.formats.manifest import MANIFEST_FILE, Entry, read_manifest
from hyperslab.formats.registry import Format, sources_here
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.storage import ChunkSides, chunk_sides
from hyperslab.formats.storage_order import Channels
from hyperslab.formats.views import selected
from hyperslab.formats.writer import SampleToWrite, Writer, checksums, slab_thickness
from hyperslab.util import atomic_files
from hyperslab.util.worker_pool import map_tasks

REMEDY = "convert into another folder"

CONTINUE = "; finished files are kept, run the command again to continue"


def _writing(folder: Path, then: str = "") -> AbstractContextManager[None]:
    """Names the folder in errors of the system."""
    return system_errors_as(DataError, f"{folder}: cannot be written", named=False, then=then)


class Manifest:
    """The manifest in ``folder``. ``entries``: of each sample, by name, the last one written."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.entries = {entry["name"]: entry for entry in entries}

    def add(self, entries: Sequence[Entry]) -> None:
        """Notes samples, all of them or, with an OSError, none."""
        atomic_files.append_whole(self.folder / MANIFEST_FILE, atomic_files.json_lines(entries))
        self.entries |= {entry["name"]: entry for entry in entries}


@contextmanager
def lock_manifest(folder: Path, asked: Entry, needed: Sequence[str]) -> Iterator[Manifest]:
    """Gives the manifest of a folder that is made if there is none, kept from other runs.

    ``needed``: keys without which a line is none of this conversion.

    Raises:
        DataError: the folder is another conversion's, none at all, in use, or cannot be written.
    """
    found, _, _ = read_manifest(folder)
    if found is None:
        _check_empty(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(atomic_files.open_to_append(folder / MANIFEST_FILE), "ab")
    with file:
        if not atomic_files.try_lock(file.fileno()):
            raise DataError(f"{folder}: another conversion into it is under way")
        found, entries, size = read_manifest(folder)
        for entry in entries:  # what a run that goes on needs beyond what a reader does
            if missing := [key for key in needed if key not in entry]:
                raise DataError(
                    f"{folder / MANIFEST_FILE}: is not a record of a conversion (the line of "
                    f"{entry['name']!r} has no {missing[0]})"
                )
        with _writing(folder):
            file.truncate(size)  # a line that a killed run has begun
            if found is None:
                atomic_files.append_whole(folder / MANIFEST_FILE, atomic_files.json_lines([asked]))
        for key, value in asked.items() if found else ():
            if found and found.get(key) != value:
                raise DataError(
                    f"{folder}: was converted with {key} {found.get(key)}, not {value}: {REMEDY}"
                )
        yield Manifest(folder, entries)


def _check_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is not a folder")
    others = sorted(p.name for p in folder.glob("*") if not p.name.startswith(".")) or [""]
    if others[0] not in ("", MANIFEST_FILE):
        raise DataError(f"{folder}: holds {others[0]!r}, which no conversion has written: {REMEDY}")


Shard = tuple[str, int, int]
"""The file of a sample, and where in it that begins and ends [B]."""

SHARD_DIGITS = 5


def is_written(folder: Path, entry: Entry, places: Sequence[Shard], *, shared: bool) -> bool:
    """Tells if a recorded sample is in its files; ``shared``: others may lie behind it.

    A file that is shorter or longer than it was, or damaged, is refused.
    """
    name = entry["name"]
    for file, start, end in places:
        path = folder / file
        if not os.path.exists(path):  # False of names that no system takes
            return False
        size = Stamp.of(path).size
        if size < end or (size != end and not shared):
            raise DataError(
                f"{path}: has {size} bytes but had {end} when {name!r} was written: delete it and "
                "run the command again"
            )
        then = entry.get("sums", {}).get(file)  # earlier versions noted none
        if then is not None and file_checksum(path, start, end) != then:
            raise DataError(
                f"{path}: is damaged: its checksum of {name!r} has changed since it was written: "
                "delete it and run the command again"
            )
    return True


def check_places(folder: Path, entries: Iterable[Entry], suffix: str) -> None:
    """Refuses files whose recorded samples are not one behind the other from the start.

    A file where a line is missing or is said of others would end up with a sample twice, or with
    one that nobody knows of.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        file, start, end = entry["shard"]
        if not file.removesuffix(suffix).isdecimal():
            raise DataError(
                f"{folder / MANIFEST_FILE}: is not a record of a conversion ({file} is not "
                "a file of it)"
            )
        places.setdefault(file, []).append((start, end))
    for file, found in places.items():
        at = 0
        for start, end in sorted(found):
            if start != at and os.path.exists(folder / file):
                raise DataError(
                    f"{folder / MANIFEST_FILE}: is not a record of a conversion (a sample of "
                    f"{file} begins at byte {start}, and the one before it ends at {at}): delete "
                    "both and run the command again"
                )
            at = end


class Shards:
    """The files ``NUMBER{suffix}`` of a folder, with up to ``most`` samples each.

    The samples called ``names`` are dealt to them at random (Mathuriya et al. 2018, section IV-C),
    by a hash of each name, so that a reader which goes from file to file does not see the parts of
    one volume together, and a run that goes on deals as the one before. What a killed run has begun
    is cut off.
    """

    def __init__(
        self, folder: Path, entries: Iterable[Entry], names: Iterable[str], most: int, suffix: str
    ) -> None:
        self.folder = folder
        self.most = most
        self.suffix = suffix
        places = [entry["shard"] for entry in entries]
        self._held = Counter(file for file, _, _ in places)
        ends: dict[str, int] = {}
        for file, _, end in places:
            ends[file] = max(end, ends.get(file, 0))
        for file, end in ends.items():
            path = folder / file
            if os.path.exists(path) and path.stat().st_size > end:
                os.truncate(path, end)
        dealt = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        self._numbers = {name: place // most for place, name in enumerate(dealt)}
        # Into a file that has gone nothing is put: its samples are made again, elsewhere.
        self._gone = {file for file in ends if not os.path.exists(folder / file)}
        known = (int(file.removesuffix(suffix)) for file in ends)
        self._spare = 1 + max(known, default=-1)

    def _file(self, number: int) -> str:
        return f"{number:0{SHARD_DIGITS}}{self.suffix}"

    def append(self, name: str, part: Path) -> Shard:
        """Puts the one file of a sample behind those before, and compares what is then there.

        In the file to which it was dealt or, where that is full or gone, in a spare one. Full it is
        where samples have come since others were dealt.
        """
        number = self._numbers[name]
        while self._held[self._file(number)] >= self.most or self._file(number) in self._gone:
            number = max(number + 1, self._spare)
        file = self._file(number)
        data = part.read_bytes()
        with (self.folder / file).open("r+b" if self._held[file] else "wb") as shard:
            start = shard.seek(0, os.SEEK_END)
            shard.write(data)
            shard.flush()
            os.fsync(shard.fileno())
        with (self.folder / file).open("rb") as shard:
            shard.seek(start)
            if google_crc32c.value(shard.read()) != google_crc32c.value(data):
                raise DataError(f"{self.folder / file}: is not what was written at byte {start}")
        self._held[file] += 1
        return file, start, start + len(data)


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
    todo: tuple[tuple[int, str], ...]  # the number of each sample within the volume, and its name
    doubtful: tuple[tuple[int, Entry], ...]  # finished ones, of a file that does not look as it did


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
            f"{error.strerror or error}{CONTINUE}"
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
    found = sources_here([folder], options)
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


Spread = Callable[[Callable[[Job], Done], Sequence[tuple[Job]]], Generator[Done, None, None]]
"""Does jobs on several processes, and yields what comes of each as it ends."""

SCRATCH = ".partial"
"""The folder of what is being written, hidden from readers, in the one that is filled."""


class Plan:
    """The samples that ``request`` makes of the volumes of ``source``, which lies in ``root``.

    Raises:
        DataError: the format cannot hold them, or two would have one name.
        LayoutError: the extents are no multiple of the sub-volumes' width, or less than the cut.
    """

    def __init__(self, root: Path, source: Source, request: Request) -> None:
        if source.shapes:
            raise DataError(
                f"{root}: holds volumes of different shapes, and a converted folder has one\n"
                "    data.batch_size: 1 trains on them as they are; of scans `hyperslab convert "
                "scans` changes\n    the size of a voxel, and `hyperslab convert lits` gives those "
                "of LiTS one shape"
            )
        self.root = root
        self.source = source
        self.request = request
        self.samples = request.samples(source)
        if misfit := request.writer.misfit(self.samples):
            writers = [(one.name, one.writer) for one in registry.formats() if one.writer]
            others = [name for name, writer in writers if not writer.misfit(self.samples)]
            raise DataError(
                f"{self.samples.where(0)}: {request.format} cannot hold {misfit}; "
                f"{', '.join(others)} can"
            )
        self.names = request.writer.names(self.samples, root.resolve().name)
        self.per_volume = len(self.names) // len(source.names)
        name, count = Counter(self.names).most_common(1)[0]
        if count > 1:
            raise DataError(
                f"{root}: {count} samples would be {name!r} as {request.format}, which has no "
                "sub-folders for them: convert one folder at a time"
            )
        self.chunk = None
        self.word = ""
        if request.writer.chunked:
            channels, *extents = self.samples.shape
            voxel = channels * self.samples.dtype.itemsize
            self.chunk, self.word = chunk_sides(extents, request.cut or (1, 1, 1), voxel)

    def asked(self) -> Entry:
        """Collects what identifies the folder in another run, as JSON has it."""
        request = self.request
        samples = self.samples
        chosen = {
            key: list(value)
            for key, value in (("redshifts", request.redshifts), ("targets", request.targets))
            if value is not None
        }
        return {
            "format": request.format,
            **chosen,
            "cut": request.cut and list(request.cut),
            "subvolumes": request.width,
            "compression": request.compression,
            "shape": list(samples.shape),
            "dtype": samples.dtype.name,
            "parameters": list(samples.parameters.names),
            "classes": list(samples.classes),
        }

    def recorded(self) -> tuple[str, ...]:
        """Lists the keys of a finished sample's line."""
        values = "labels_crc32c" if self.samples.classes else "target"
        place = ("shard",) if self.request.writer.per_file > 1 else ()
        return ("files", "stamps", "crc32c", values, *place)

    def notices(self) -> list[str]:
        """Collects words that a user should read beforehand."""
        told = self.request.writer.told(self.samples)
        words = f'the shape does not tell where the channels are; open it with channels="{told}"'
        return [*filter(None, [self.word]), *([words] if told else [])]

    def jobs(self, manifest: Manifest) -> tuple[list[Outcome], list[Job], list[Entry]]:
        """Splits volumes into those done at once and those to do; returns finished samples, too.

        A folder that is not as it was recorded, or another conversion's, is refused.
        """
        self._check_sources(manifest)
        writer = self.request.writer
        if writer.per_file > 1:
            check_places(manifest.folder, manifest.entries.values(), writer.suffix)
            self._check_names(manifest)
        outcomes = []
        jobs = []
        finished = []
        for volume in range(len(self.source.names)):
            first = volume * self.per_volume
            todo = []
            there = []
            for number, name in enumerate(self.names[first : first + self.per_volume]):
                if self._is_there(manifest, name):
                    there.append((number, manifest.entries[name]))
                else:
                    todo.append((number, name))
            finished += [entry for _, entry in there]
            try:
                now = recorded_stamps(self.source.files(volume), self.root)
            except DataError as error:  # it has gone since the folder was scanned
                outcomes.append(Outcome("failed", str(error)))
                continue
            # Of a source that names no files nobody knows whether it is what it was.
            same = [bool(now) and entry["stamps"] == now for _, entry in there]
            doubtful = [one for one, kept in zip(there, same, strict=True) if not kept]
            if todo or doubtful:
                job = Job(
                    name=self.source.names[volume],
                    volume=self.source.volume(volume),
                    root=self.root,
                    source=self.source.alone(volume),
                    request=self.request,
                    format=registry.named(self.request.format),
                    chunk=self.chunk,
                    scratch=manifest.folder / SCRATCH / str(volume),
                    todo=tuple(todo),
                    doubtful=tuple(doubtful),
                )
                jobs.append(job)
            else:
                outcomes.append(Outcome("kept"))
        return outcomes, jobs, finished

    def _is_there(self, manifest: Manifest, name: str) -> bool:
        """Tells if a sample is finished; refuses what has its name and is not it."""
        entry = manifest.entries.get(name)
        folder = manifest.folder
        if self.request.writer.per_file > 1:
            return entry is not None and is_written(folder, entry, [entry["shard"]], shared=True)
        files = self.request.writer.files(name, self.request.compression)
        if entry is None:
            for file in files:
                if (folder / file).exists():
                    raise DataError(
                        f"{folder / file}: no conversion has written it: remove it or {REMEDY}"
                    )
            return False
        for file in files:
            if file not in entry["files"] and (folder / file).exists():
                raise DataError(
                    f"{folder / MANIFEST_FILE}: is not a record of a conversion (the line of "
                    f"{name!r} has no size of {file})"
                )
        places = [(file, 0, entry["files"].get(file, 0)) for file in files]
        return is_written(folder, entry, places, shared=False)

    def _check_names(self, manifest: Manifest) -> None:
        """Refuses a sample recorded by another name, which would be appended a second time."""
        volumes = set(self.source.names)  # not those that are damaged since
        names = set(self.names)
        for name, entry in manifest.entries.items():
            if name not in names and entry.get("source") in volumes:
                raise DataError(
                    f"{manifest.folder / MANIFEST_FILE}: is not a record of a conversion ({name!r} "
                    f"is no sample of {entry['source']!r}): {REMEDY}"
                )

    def _check_sources(self, manifest: Manifest) -> None:
        for entry in manifest.entries.values():
            for file in entry["stamps"]:
                if not os.path.exists(self.root / file):  # False of names that no system takes
                    raise DataError(
                        f"{manifest.folder / MANIFEST_FILE}: {entry['name']!r} was made of {file}, "
                        f"which is not in {self.root}: {REMEDY}"
                    )


def convert(
    root: Path,
    out: Path,
    request: Request,
    *,
    channels: Channels | None = None,
    source_format: str | None = None,
    allowed: AccessPolicy = STRICT,
    workers: int = 1,
    spread: Spread | None = None,
    begun: Callable[[int, Sequence[str]], None] = lambda count, notices: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Convert each volume of the folder ``root``, as `hyperslab.open` takes it, into ``out``.

    A volume that cannot be read is left out, and the others go on. Samples that are there already
    are kept, if they are of the same source. ``allowed``: what files may do. ``begun`` is told how
    many volumes there are and what a user should know; ``done`` of each outcome, when it is known.
    A worker holds a few slabs of a volume; of a gzipped TFRecord, all of it. ``spread`` does the
    volumes elsewhere, in place of ``workers`` processes here.

    Raises:
        DataError: ``root`` cannot be read, or the format cannot hold what is in it; ``out`` is in
            ``root``, is another conversion's or holds files that are not as they were written; it
            cannot be written. What is finished stays.
        LayoutError: the extents are no multiple of the sub-volumes' width, or less than the cut.
        HyperslabError: a worker died, or an extra is not installed.
    """
    if workers < 1:
        raise DataError(f"{workers} workers: need at least 1")
    _check_apart(root, out)
    bad: list[DataError] = []
    options = ScanOptions(channels, source_format, bad.append, allowed)
    source = sources_here([root], options)
    plan = Plan(root, source, request)
    with lock_manifest(out, plan.asked(), plan.recorded()) as manifest:
        begun(len(source.names) + len(bad), plan.notices())
        outcomes = [Outcome("failed", str(error)) for error in bad]
        for outcome in outcomes:
            done(outcome)
        spread = spread or partial(map_tasks, workers=workers)
        with closing(_outcomes(plan, manifest, spread)) as others:
            for outcome in others:
                outcomes.append(outcome)
                done(outcome)
    return outcomes


def _outcomes(plan: Plan, manifest: Manifest, spread: Spread) -> Generator[Outcome, None, None]:
    outcomes, jobs, finished = plan.jobs(manifest)
    yield from outcomes
    scratch = manifest.folder / SCRATCH
    try:
        with _writing(manifest.folder, CONTINUE):
            atomic_files.make_scratch(scratch)  # of a run that was killed nothing stays
            names = plan.samples.parameters.names
            writer = plan.request.writer
            writer.begin(manifest.folder, names, finished)
            shards = None
            if writer.per_file > 1:
                entries = manifest.entries.values()
                shards = Shards(
                    manifest.folder, entries, plan.names, writer.per_file, writer.suffix
                )
        with closing(spread(run, [(job,) for job in jobs])) as results:
            for result in results:
                with _writing(manifest.folder, CONTINUE):
                    _finish(plan, manifest, result, shards)
                if result.reason:
                    yield Outcome("failed", result.reason)
                else:
                    yield Outcome("converted" if result.job.todo else "kept")
    finally:
        atomic_files.remove_scratch(scratch)


def _finish(plan: Plan, manifest: Manifest, result: Done, shards: Shards | None) -> None:
    """Note samples, then give their files their names; or put them into shared files first."""
    made = {name for _, name in result.job.todo}
    new = [entry for entry in result.entries if entry["name"] in made]
    if shards is not None:
        for entry in new:
            (file,) = entry.pop("files")
            entry["shard"] = list(shards.append(entry["name"], result.job.scratch / file))
            entry["sums"] = {entry["shard"][0]: entry["sums"][file]}
            entry["files"] = {}
    manifest.add(result.entries)
    plan.request.writer.finish(manifest.folder, new)
    for entry in new:
        for file in entry["files"]:
            path = manifest.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(result.job.scratch / file, path)
    shutil.rmtree(result.job.scratch, ignore_errors=True)


def _check_apart(root: Path, out: Path) -> None:
    """Refuses a folder in the other, which would be read as part of it the next time."""
    one = root.resolve()
    other = out.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise DataError(f"{root} and {out}: one lies in the other; convert into a folder beside it")
