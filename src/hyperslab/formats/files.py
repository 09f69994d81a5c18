"""Lists the files of a data set and guards them: access, changes, damage, other processes.

`list_files` and `walk_folder` find files, `sift` leaves out those that cannot be read, and
`naming` turns errors of libraries into errors that name the file. A `DataMap` is what a user says
of where volumes and targets are, a `FileAccess` how far files may refer to others. A `Stamp`
notices that a file has changed since its folder was scanned, and `lock_folder` lets one process
fill a folder at a time. `read_box` and `check_finite` look at values that were read.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import google_crc32c

from hyperslab.errors import DataError, HyperslabError, system_errors_as
from hyperslab.util.atomic_files import try_lock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hyperslab.geometry import Box

ErrorKinds = tuple[type[Exception], ...]

OF_LIBRARIES: ErrorKinds = (
    OSError,
    EOFError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    zlib.error,
    csv.Error,
)
"""Errors that libraries raise about a file that is not what it should be."""

ANY: ErrorKinds = (Exception,)
"""Errors of libraries in which damaged bytes can raise anything."""


@contextmanager
def naming(where: Path | str, what: str, kinds: ErrorKinds = OF_LIBRARIES) -> Iterator[None]:
    """Turns what a library raises about a file of the format ``what`` into an error that names it.

    One of these ``kinds`` becomes a DataError; errors of our own and want of memory pass.
    """
    try:
        yield
    except (HyperslabError, MemoryError):
        raise
    except kinds as error:
        raise DataError(
            f"{where}: cannot be read as {what}, perhaps truncated or of another format: {error}"
        ) from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turns an OSError or EOFError into a DataError that names the sample; our own errors pass."""
    try:
        yield
    except HyperslabError:
        raise
    except (OSError, EOFError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from error


def read_box(
    read: Callable[[int, Box], NDArray[Any]],
    sample: int,
    box: Box,
    name: str,
    dtype: np.dtype[Any] | None = None,
) -> tuple[NDArray[Any], str]:
    """Returns what ``read`` reads of a sample called ``name``, and where it is from, for errors.

    With ``dtype``, the storage type, it is converted to that: boxes of one type have one size. An
    error of the system is one of the sample here, not of a disk that is written to.

    Raises:
        DataError: it cannot be read, is not as much as the box has, or has whole numbers that the
            storage type does not hold.
    """
    import numpy as np

    with reading(name):
        found = np.asarray(read(sample, box))
    where = f"{name}: {box}"
    if found.shape != box.shape:
        raise DataError(f"{where} was read as {found.shape}")
    if dtype is None or found.dtype == dtype:
        return found, where
    with np.errstate(invalid="ignore", over="ignore"):
        stored = found.astype(dtype)
    if dtype.kind in "iu" and (stored != found).any():
        raise DataError(f"{where} was read as {found.dtype} with values that are no {dtype}")
    return stored, where


def check_finite(values: NDArray[Any], where: str) -> tuple[Any, Any]:
    """Returns the least and the greatest of the values; refuses NaN and infinite ones."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        low = values.min()
        high = values.max()
    if values.dtype.kind == "f" and not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{where} holds NaN or infinite values")
    return low, high


Item = TypeVar("Item")
Found = TypeVar("Found")

Refuse = Callable[[DataError], None]
"""A callback for each file that is left out; without one the first bad file is the error."""


def list_files(folder: Path, suffixes: Sequence[str]) -> tuple[str, ...]:
    """Lists the files with one of these suffixes in a folder and below, sorted, none hidden.

    A ``.zarr`` counts as one, and nothing in it.

    Raises:
        DataError: the folder is missing or holds none, or a name is of no file.
    """
    check_folder(folder)
    files = [file for file in walk_folder(folder) if file.endswith(tuple(suffixes))]
    for file in files:
        path = folder / file
        if path.suffix != ".zarr" and not path.is_file():
            raise DataError(f"{path}: {_kind_of_entry(path)}; repair or remove it")
    if not files:
        raise DataError(f"{folder}: no file *{' or *'.join(suffixes)} in it or below")
    check_names(folder, files)
    return tuple(files)


def check_names(folder: Path, names: Sequence[str]) -> None:
    """Refuses names that are not UTF-8: they could not be written into tables and records."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{folder / name}: its name is not UTF-8; give it another one"
            ) from None


def check_folder(folder: Path) -> None:
    """Refuses a folder that is missing, or is none."""
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder}: {state}; give the folder that holds the data")


def table_file(folder: Path, table: Path) -> Path:
    """Finds a table of targets, in the folder of the data or from here; refuses one that is not."""
    for path in (folder / table, table):
        if path.is_file():
            return path
    raise DataError(
        f"data.table: there is no {table}, in {folder} or from here ({OWN_DATA}, tables)"
    )


def walk_folder(folder: Path) -> list[str]:
    """Lists relative names of all in a folder and below, sorted; not what is hidden or in Zarr.

    Names of folders are among them.
    """
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        there = Path(place).relative_to(folder)
        names = [name for name in (*folders, *files) if not name.startswith(".")]
        found.extend((there / name).as_posix() for name in names)
        folders[:] = [f for f in folders if not f.startswith(".") and not f.endswith(".zarr")]
    return sorted(found)


def sift(
    items: Sequence[Item], read: Callable[[Item], Found], refuse: Refuse | None = None
) -> list[tuple[Item, Found]]:
    """Keeps the items that can be read, each with what was read of it; ``refuse`` gets the others.

    If there is no ``refuse`` or none can be read, the error of the first is raised.
    """
    found = []
    errors = []
    for item in items:
        try:
            found.append((item, read(item)))
        except DataError as error:
            if refuse is None:
                raise
            refuse(error)
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def check_alike(
    where: Path | str, found: Mapping[str, object], first: Path | str, wanted: Mapping[str, object]
) -> None:
    """Refuses a file or folder that is not stored like the first one, by the word that differs."""
    for word, value in found.items():
        if value != wanted[word]:
            raise DataError(
                f"{where}: {word} is {value} but {wanted[word]} in {first}; all files of a data "
                "set are stored alike"
            )


def _kind_of_entry(path: Path) -> str:
    """Describes what is under the name of a file that is none."""
    if path.is_dir():
        return "is a folder, not an ordinary file"
    return "is a link to nowhere" if path.is_symlink() else "is not a file"


ALLOW_OUTSIDE = (
    "if you trust it, allow it: data.outside_files=true in a recipe (for a run's on the command "
    "line), --outside-files, or "
    "hyperslab.open(..., outside_files=True)"
)

ALLOW_MISSING = (
    "if the values are missing on purpose, allow it: data.missing_chunks=true in a recipe, "
    "--missing-chunks, or hyperslab.open(..., missing_chunks=True)"
)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Permits what files may do because the user says so.

    ``outside_files``: take values from files outside of the folder. ``missing_chunks``: lack what
    is not stored, which is then read as the fill value: many programs leave out chunks of zeros.
    """

    outside_files: bool = False
    missing_chunks: bool = False


STRICT = AccessPolicy()


@dataclass(frozen=True, slots=True)
class FileAccess:
    """Files may name others that lie in ``folder``, the data path; or as it is ``allowed``.

    What a file says is its author's, and could have any file that this user can read
    taken for a volume. Links of the file system that lie in the folder itself are followed: they
    are its owner's, and data sets are often put together of them. ``referring``: those that were
    found to name others.
    """

    folder: Path
    allowed: AccessPolicy = STRICT
    referring: set[Path] = field(default_factory=set, compare=False)

    def check(self, path: Path, what: str, target: Path) -> None:
        """Refuses that the file ``path`` refers to ``target``, by ``what`` of it, if it may not."""
        self.referring.add(path)
        real = Path(os.path.realpath(target))
        inside = real.is_relative_to(os.path.realpath(self.folder))
        if not inside and not self.allowed.outside_files:
            raise DataError(
                f"{path}: {what} refers to {real}, which is not in the folder {self.folder}\n"
                f"    {ALLOW_OUTSIDE}"
            )
        if not real.is_file():
            raise DataError(
                f"{path}: {what} refers to {target}, which does not exist, and would be read as "
                "zeros\n    put it back"
            )


OWN_DATA = "docs/own-data.md"
FIELDS_AS_TARGETS = "fields of numbers are learnt in your own loop: docs/coming-from/fourier.md"


@dataclass(frozen=True, slots=True)
class DataMap:
    """Says where the volumes of a folder, or of one file, and their targets are.

    ``files``: a pattern of the files with volumes, relative to the folder; by default all arrays
    in it. ``volume``: the array's path in an HDF5 file, Zarr group or .npz. ``targets``: paths in
    the same file of arrays, or of attributes, ``group@name``. ``table``: a text or .npy file with
    a row of targets for each sample, in the folder or anywhere else. ``columns``: their names.
    ``labels``: the path in the same file of an array with the class of every voxel, in place of
    targets; ``classes`` names the classes. ``fields``: several patterns, or several paths of
    arrays, in place of ``files`` or ``volume``; the channels of each become channels of the volume.
    ``ranges``: by name, the values that become -1 and 1; by default those of a published data set
    if its table is recognised, or else the least and the greatest of all rows.

    Raises:
        DataError: targets are in two places, labels have no names of classes, or a range is wrong.
    """

    files: str = ""
    volume: str = ""
    targets: tuple[str, ...] = ()
    table: Path | None = None
    columns: tuple[str, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    labels: str = ""
    classes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    of_files: bool = True  # the fields are patterns of files, not paths of arrays

    def __post_init__(self) -> None:
        if self.targets and self.table is not None:
            raise DataError(
                "data.keys.targets and data.table are two places of targets; give one of them"
            )
        if self.labels and (self.targets or self.table is not None):
            raise DataError("data.keys.labels and targets: a network learns one of the two")
        names = len(set(self.classes))
        if bool(self.labels) != bool(names) or (names and not 2 <= names == len(self.classes)):
            raise DataError(
                "data.keys.labels and data.classes go together: two different names or more, by "
                "the labels' numbers, the background's first, such as data.classes: "
                f"[background, liver]\n    {FIELDS_AS_TARGETS}"
            )
        for name, (low, high) in self.ranges.items():
            if not (math.isfinite(high - low) and low < high):
                raise DataError(f"data.ranges.{name}={[low, high]}: give two numbers, low to high")

    @property
    def of_fields(self) -> list[DataMap]:
        """Lists the map of each field; without fields, the map itself."""
        if not self.fields:
            return [self]
        alone = replace(self, fields=())
        if self.of_files:
            return [replace(alone, files=pattern) for pattern in self.fields]
        return [replace(alone, volume=array) for array in self.fields]

    @property
    def without_targets(self) -> DataMap:
        """Returns the map of volumes alone, as a trained network is shown them."""
        nothing: dict[str, Any] = {"targets": (), "table": None, "columns": (), "ranges": {}}
        return replace(self, labels="", classes=(), **nothing)


SUMMED_AT_ONCE = 4 << 20
"""[B]"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies a version of a file: its size [B] and the time of its change [ns since 1970].

    The number of the file (inode) would tell one more case, a file put in its place with equal size
    and time, but nodes may number the files of a network's file system differently.
    """

    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Takes the file's stamp now; of a folder the size of all of it, and the last change."""
        found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode):
            return cls(found.st_size, found.st_mtime_ns)
        inside = [file.stat() for file in path.rglob("*") if file.is_file()]
        modified = max((state.st_mtime_ns for state in inside), default=0)
        return cls(sum(state.st_size for state in inside), modified)

    def __str__(self) -> str:
        second, rest = divmod(self.modified, 10**9)
        when = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.size} bytes of {when}.{rest:09d} UTC"


def recorded_stamps(files: Sequence[Path], root: Path) -> dict[str, list[int]]:
    """Records the stamps of files for JSON, by their names relative to ``root``."""
    found = {}
    for path in files:
        with naming(path, "a file"):
            stamp = Stamp.of(path)
        found[Path(os.path.relpath(path, root)).as_posix()] = [stamp.size, stamp.modified]
    return found


def file_checksum(path: Path, lo: int = 0, hi: int | None = None) -> str:
    """Computes the CRC32C of the bytes lo to hi of a file, or of a folder's files and names."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        words = [f"{file.relative_to(path).as_posix()} {file_checksum(file)}\n" for file in files]
        return f"{google_crc32c.value(''.join(words).encode()):08x}"
    found = 0
    with path.open("rb") as file:
        file.seek(lo)
        left = (os.fstat(file.fileno()).st_size if hi is None else hi) - lo
        while left > 0 and (piece := file.read(min(left, SUMMED_AT_ONCE))):
            left = left - len(piece)
            found = google_crc32c.extend(found, piece)
    return f"{found:08x}"


@contextmanager
def unchanged(path: Path, sample: str, then: Stamp) -> Iterator[None]:
    """Refuses what is read within if the file is not the one that was scanned.

    It is looked at afterwards, so that a change during the read counts too; and also where the read
    fails, because a file that has changed explains that. A pipe in its place is not waited for.
    """
    if path.is_fifo():
        check_unchanged(path, sample, then)
    try:
        yield
    except Exception as error:
        check_unchanged(path, sample, then, error)
        raise
    check_unchanged(path, sample, then)


def check_unchanged(path: Path, sample: str, then: Stamp, cause: Exception | None = None) -> None:
    """Refuses a file that has changed or gone; names the file and the sample."""
    try:
        now = Stamp.of(path)
    except OSError as error:
        raise DataError(
            f"{path}: sample {sample!r} has gone since the folder was scanned "
            f"({error.strerror})\n    put it back, or open the folder again"
        ) from error
    if now != then:
        raise DataError(
            f"{path}: sample {sample!r} has changed since the folder was scanned: {then} then, "
            f"{now} now\n    open the folder again, and leave its files alone while they are in use"
        ) from cause


DEFLATE_RATIO = 1032
"""The most that deflate packs: 258 bytes into two bits [zlib.net/zlib_tech.html]."""

COUNTS_RATIO = 100
"""The most that counts of particles are packed; masks, of mostly one class, are packed more."""

FREE_OF_DOUBT = 64 << 20
"""Up to this size any ratio of packing is believed [B]."""

GZIP_PIECE = 1 << 20


def check_gzip_size(path: Path, size: int, most: int = DEFLATE_RATIO) -> None:
    """Refuses a gzip file that is too small to hold ``size`` bytes."""
    packed = path.stat().st_size
    if size > packed * DEFLATE_RATIO or (size > FREE_OF_DOUBT and size > packed * most):
        raise DataError(
            f"{path}: has {packed} bytes and says that it unpacks to {size}, which no volume does"
            "\n    if it is one, unpack it with gunzip first"
        )


@contextmanager
def open_gzip_to_end(path: Path) -> Iterator[gzip.GzipFile]:
    """Opens a gzip file and reads what is left over in the end, too: so its sum is compared.

    Much more in it than was read is refused; errors of gzip are its own.
    """
    with gzip.open(path) as file:
        yield file
        left = 0
        while piece := file.read(GZIP_PIECE):
            left = left + len(piece)
            if left > FREE_OF_DOUBT:
                raise DataError(f"{path}: unpacks to more than its header says; at least {left} B")


def make_folder(folder: Path) -> None:
    """Makes a folder where there is none; names it in an error."""
    with system_errors_as(DataError, f"cannot make the folder {folder}", named=False):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def lock_folder(folder: Path, what: str, *, shared: bool = False) -> Iterator[None]:
    """Keeps others out of a folder meanwhile; it is made where there is none.

    ``shared``: but for those that share it, of whom each fills a part. The folder itself is
    locked: it holds volumes and nothing else. The system lets go when the process ends.

    Raises:
        DataError: another process fills it, ``what`` says how; or it cannot be made or opened.
    """
    make_folder(folder)
    with system_errors_as(DataError, f"cannot open the folder {folder}"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor, shared=shared):
            raise DataError(
                f"{folder}: another {what} into it is under way\n"
                "    wait for its end, or choose another folder"
            )
        yield
    finally:
        os.close(descriptor)
