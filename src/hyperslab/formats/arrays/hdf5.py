"""Checks what an HDF5 file says of where its arrays are, before HDF5 is asked for values.

HDF5 gives zeros, without a word, for what was never written and for files that it does not find;
it follows links and virtual data sets to any file; and it holds whole chunks in memory.

Bytes that are damaged, or made so, can have HDF5 walk in circles for ever, or crash. Nothing
ends a call of a library within a process, and nothing cheap tells beforehand. So a
`HeaderChild`, a child process, goes through the header of each file of a scan first, and says no
more than that it came back: a fork a scan, and a byte and a second look a file. It is a file ahead.

HDF5 takes memory for as much as comes out of deflate, whatever the chunk says that it holds. So
the chunks that may become large are unpacked here, up to what they say and no further: once, as
HDF5 reads what was found honest. Small ones, and chunks that are not there, are HDF5's, as is what
deflate finds to be damaged: it names that.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import math
import os
import posixpath
import resource
import select
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar

import h5py
import numpy as np
from h5py._objects import phil

from hyperslab.errors import DataError
from hyperslab.formats.files import ALLOW_MISSING, DEFLATE_RATIO, FileAccess, naming
from hyperslab.formats.source import Array
from hyperslab.geometry import Box
from hyperslab.util.startup import tie_to_parent

MOST_LINKS = 16
"""Links, and virtual data sets of virtual ones, that are followed one after the other."""

MOST_PACKED_CHUNK = 256 << 20
"""The largest chunk with filters that is unpacked; each box needs the whole of it [B]."""

NEW_SUPERBLOCK = 3
"""The version of the first block of a file whose other blocks have checksums."""

MOST_ATTRIBUTE = 1 << 20
"""The largest attribute that is read [B]."""

LOOK = 16 << 20
"""Bytes that are searched at a time for a value that somebody has written [B]."""


def linked(path: Path, file: Any, key: str, reach: FileAccess) -> Any:
    """Returns the object under a key of an open file.

    Raises:
        DataError: a link on the way there leaves the folder, leads nowhere or in a circle.
        KeyError: there is none.
    """
    _follow(path, file, key, reach, MOST_LINKS)
    return file[key]


def _follow(path: Path, file: Any, name: str, reach: FileAccess, left: int) -> None:
    """Checks every link before HDF5 follows it."""
    if left == 0:
        raise DataError(
            f"{path}: {name!r} is a chain of too many links; put the data set itself there"
        )
    group = file
    place = "/"
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for number, part in enumerate(parts):
        link = group.get(part, getlink=True)
        rest = parts[number + 1 :]
        match link:
            case None:
                raise KeyError(f"{name!r} is not in it")
            case h5py.ExternalLink():
                target = named_file(path, link.filename)
                reach.check(path, f"the external link {name!r}", target)
                with h5py.File(target, "r", locking=False) as other:
                    _follow(target, other, "/".join([link.path, *rest]), reach, left - 1)
                return
            case h5py.SoftLink():
                _follow(path, file, posixpath.join(place, link.path, *rest), reach, left - 1)
                return
            case h5py.HardLink():
                pass
            case _:
                raise DataError(f"{path}: {name!r} is a link of a kind that is not followed")
        if rest:
            group = group[part]
            place = posixpath.join(place, part)
            if not isinstance(group, h5py.Group):
                raise KeyError(f"{name!r} is not in it")


def check_attributes(path: Path, found: Any) -> None:
    """Refuses a group or data set with an attribute that is not small.

    Words of variable length do not say how long they are: these are read, which a `HeaderChild`
    does within its memory.
    """
    # HDF5 before 1.12 counts no attributes by the name of a file.
    place = found["/"].id if isinstance(found, h5py.File) else found.id
    for number in range(h5py.h5a.get_num_attrs(place)):
        size = h5py.h5a.get_info(place, index=number).data_size
        if size > MOST_ATTRIBUTE:
            raise DataError(
                f"{path}: an attribute of {found.name!r} has {size} bytes; at most "
                f"{MOST_ATTRIBUTE} are read of one"
            )
        attribute = h5py.h5a.open(place, index=number)
        with suppress(TypeError):  # of a type that numpy has not, so that nobody reads it
            if attribute.dtype.hasobject:
                attribute.read(np.empty(attribute.shape, attribute.dtype))


def check_volume(path: Path, key: str, dataset: Any, reach: FileAccess) -> None:
    """Refuses a volume as `check_storage`, or whose space was taken beforehand and never filled."""
    check_storage(path, key, dataset, reach)
    if reach.allowed.missing_chunks:
        return
    early = dataset.id.get_create_plist().get_alloc_time() == h5py.h5d.ALLOC_TIME_EARLY
    if not early or dataset.is_virtual:
        return
    check_unpacked(path, key, dataset, Box.whole(dataset.shape), {})
    if not _any_written(dataset):
        raise _never_written(path, key, "every voxel is the fill value")


def check_storage(
    path: Path, key: str, dataset: Any, reach: FileAccess, left: int = MOST_LINKS
) -> None:
    """Refuses an array that was never written, or not all of it, or cannot be unpacked for a box.

    Nor may it lie in a file that is missing, or outside of the folder.
    """
    if dataset.is_virtual:
        _check_sources(path, key, dataset, reach, left)
    elif dataset.external:
        prefix = dataset.id.get_access_plist().get_efile_prefix().decode()
        for name, offset, size in dataset.external:
            raw = Path(prefix or ".", name).absolute()  # HDF5 looks from the working folder
            reach.check(path, f"{key!r}, stored in another file,", raw)
            if size != h5py.h5f.UNLIMITED and raw.stat().st_size < offset + size:
                raise DataError(
                    f"{path}: {key!r} is stored in {raw}, which is cut short and would be read as "
                    "zeros\n    put it back"
                )
    elif dataset.chunks is not None:
        _check_chunks(path, key, dataset, reach)
    elif reach.allowed.missing_chunks:
        return
    elif dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        raise _never_written(path, key, f"none of {dataset.shape} is stored")


def _check_chunks(path: Path, key: str, dataset: Any, reach: FileAccess) -> None:
    chunk = dataset.chunks
    size = math.prod(chunk) * dataset.dtype.itemsize
    if dataset.id.get_create_plist().get_nfilters() and size > MOST_PACKED_CHUNK:
        raise DataError(
            f"{path}: {key!r} is packed in chunks of {size >> 20} MiB, and any box needs a whole "
            f"one; at most {MOST_PACKED_CHUNK >> 20} MiB are unpacked\n    h5repack -l "
            f"{key}:CHUNK=32x32x32x4 OLD NEW makes smaller ones"
        )
    wanted = math.prod(-(-n // side) for n, side in zip(dataset.shape, chunk, strict=True))
    stored = dataset.id.get_num_chunks()
    if dataset.id.get_storage_size() > stored * (size + PACKED_LARGER):
        raise DataError(
            f"{path}: {key!r} is packed in chunks of {size} bytes, which take more than that in "
            "the file: they unpack to more than they say\n    get a fresh copy of the file"
        )
    if stored < wanted and not reach.allowed.missing_chunks:
        raise _never_written(path, key, f"{stored} of its {wanted} chunks are stored")
    if stored:
        _check_index(path, key, dataset, min(stored, wanted))


def _check_index(path: Path, key: str, dataset: Any, count: int) -> None:
    """Refuses a damaged index, which may misplace a chunk or let its checksum be passed over.

    Those of files since HDF5 1.10 have checksums themselves.
    """
    file = h5py.h5i.get_file_id(dataset.id)
    if file.get_create_plist().get_version()[0] >= NEW_SUPERBLOCK:
        return
    codes = filters_of(dataset)
    summed = 1 << codes.index(FLETCHER32) if FLETCHER32 in codes else 0
    chunks = chunks_of(dataset)
    places = np.array([chunk.chunk_offset for chunk in chunks])
    within = (places % dataset.chunks == 0).all() and (places < dataset.shape).all()
    numbers = np.ravel_multi_index(tuple((places // dataset.chunks).T), dataset.shape, "clip")
    passed = any(chunk.filter_mask & summed for chunk in chunks)
    if not within or passed or len(np.unique(numbers)) < count:
        raise DataError(
            f"{path}: {key!r} has a damaged index, which does not say where all of its {count} "
            "chunks are\n    get a fresh copy of the file"
        )


def _check_sources(path: Path, key: str, dataset: Any, reach: FileAccess, left: int) -> None:
    """Refuses a virtual data set of which a source is missing, or a part has none."""
    if left == 0:
        raise DataError(f"{path}: {key!r} is made of itself, or of too many others")
    covered = 0
    for source in dataset.virtual_sources():
        count = source.vspace.get_select_npoints()
        if not 0 <= count <= dataset.size:
            raise DataError(f"{path}: {key!r} is made of sources without fixed extents")
        covered = covered + count
        what = f"{key!r}, a virtual data set,"
        target = _file_of(path, source)
        if source.file_name != ".":
            reach.check(path, what, target)
        with (
            naming(f"{path}: {what} refers to {source.dset_name!r} of {target}", "HDF5"),
            h5py.File(target, "r", locking=False) as file,
        ):
            found = linked(target, file, source.dset_name, reach)
            if not _holds(found, source.src_space, count):
                raise DataError(
                    f"{path}: {what} takes more of {source.dset_name!r} of {target} than its "
                    f"{found.shape}; the rest would be read as zeros"
                )
            check_storage(target, source.dset_name, found, reach, left - 1)
    if covered < dataset.size and not reach.allowed.missing_chunks:
        raise _never_written(path, key, f"only {covered} of {dataset.size} values have a source")


def _file_of(path: Path, source: Any) -> Path:
    """Returns the file of a source of a virtual data set; a dot stands for the file itself."""
    name = source.file_name.replace("%%", "%")
    return path if name == "." else named_file(path, name)


def _holds(found: Any, selected: h5py.h5s.SpaceID, count: int) -> bool:
    """Tells if a data set has the ``count`` values that are selected of it."""
    if selected.get_select_type() == h5py.h5s.SEL_ALL:
        return bool(found.size == count)
    _, last = selected.get_select_bounds()
    return len(last) == found.ndim and not any(np.greater_equal(last, found.shape))


def _any_written(dataset: Any) -> bool:
    """Tells if some value is not the fill value; mostly the first look finds one."""
    packed = dataset.chunks and dataset.id.get_create_plist().get_nfilters()
    sides = list(dataset.chunks if packed else (1,) * dataset.ndim)
    for dim in reversed(range(dataset.ndim)):  # rows, then planes, and so on, as fit into a look
        fit = LOOK // (math.prod(sides) * dataset.dtype.itemsize)
        sides[dim] = min(dataset.shape[dim], sides[dim] * max(1, fit))
    places = (range(0, n, side) for n, side in zip(dataset.shape, sides, strict=True))
    blocks = (
        tuple(slice(lo, lo + side) for lo, side in zip(place, sides, strict=True))
        for place in itertools.product(*places)
    )
    fill = dataset.fillvalue
    return any((dataset[block] != fill).any() for block in blocks)


def _never_written(path: Path, key: str, why: str) -> DataError:
    return DataError(
        f"{path}: {key!r} was never written, or not all of it: {why}; the rest would be read as "
        f"zeros\n    write all of it, or remove the file; {ALLOW_MISSING}"
    )


T = TypeVar("T")

HEADER_LIMIT = 30.0
"""The time that reading a header may take [s]: a file system may be slow, too."""

HEADER_MEMORY = 192 << 20
"""The memory that reading a header may take [B]."""

DONE, TOO_LARGE = b".", b"m"
"""Say that a child came back, or that it would have needed too much memory."""

NO_MEMORY = "memory allocation failed"
"""The words of HDF5 for that."""


class HeaderChild(Generic[T]):
    """Calls ``read`` of a file's name, after a child process has come back from that.

    ``files`` are the names in the order of the calls: while this process reads one, the child goes
    through the next.
    """

    def __init__(
        self, read: Callable[[str], T], limit: float = HEADER_LIMIT, *, files: Sequence[str] = ()
    ) -> None:
        self.read = read
        self.limit = limit
        self._next = dict(itertools.pairwise(files))
        self._child = 0
        self._asked = -1
        self._answers = -1
        self._going_through: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, file: str) -> T:
        """Returns, or raises, what ``read`` does.

        Raises:
            DataError: it does not come back in time, takes too much memory, or ends the process.
        """
        if "mpi4py.MPI" not in sys.modules:  # whose transports do not all bear a fork
            self._try(file)
            if file in self._next:
                self._ask(self._next[file])
        return self.read(file)

    def _ask(self, file: str) -> None:
        if not self._child:
            self._start()
        with suppress(BrokenPipeError):  # then there will be no answer
            os.write(self._asked, json.dumps(file).encode() + b"\n")
        self._going_through = file

    def _try(self, file: str, *, again: bool = True) -> None:
        if self._going_through != file:
            if self._going_through is not None:  # its answer is not this file's
                self._end()
            self._ask(file)
        ready, _, _ = select.select([self._answers], [], [], self.limit)
        self._going_through = None
        if not ready:
            self._end()
            raise DataError(
                f"{file}: HDF5 has not read its header within {self.limit:g} s: it is "
                "damaged, or its disk is very slow\n    look at it with h5dump, or remove it"
            )
        answer = os.read(self._answers, 1)
        if answer == TOO_LARGE:
            raise DataError(
                f"{file}: reading its header takes more than {HEADER_MEMORY >> 20} MiB: it has "
                "strings of variable length\n    that claim too much, or very large packed chunks\n"
                "    get a fresh copy of the file, or write it again in smaller chunks"
            )
        if not answer:
            ended = self._end()
            if again:  # the fork of a process with threads may end for reasons of its own
                return self._try(file, again=False)
            raise DataError(
                f"{file}: HDF5 crashes on its header ({ended}): it is damaged\n    remove it"
            )

    def _start(self) -> None:
        parent = os.getpid()
        theirs, self._asked = os.pipe()
        self._answers, their_answers = os.pipe()
        with phil, warnings.catch_warnings():  # no other thread is within HDF5
            for kind in (DeprecationWarning, RuntimeWarning):  # that there are other threads
                warnings.simplefilter("ignore", kind)
            collects = gc.isenabled()
            gc.disable()  # what there is to clear away is not the child's: threads, say
            try:
                self._child = os.fork()
                if self._child == 0:  # whatever is raised here ends the child and goes no further
                    ours = self._asked, self._answers
                    _serve(self.read, theirs, their_answers, ours, parent, self.limit)
            finally:
                if collects:
                    gc.enable()
        os.close(theirs)
        os.close(their_answers)

    def _end(self) -> str:
        """Ends the child, if there is one, and says how it ended."""
        if not self._child:
            return ""
        os.close(self._asked)
        os.close(self._answers)
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(self._status())
        self._child = 0
        return f"signal {-code}" if code < 0 else f"code {code}"

    def _status(self) -> int:
        """Waits for the end of the child."""
        return os.waitpid(self._child, 0)[1]


def _serve(
    read: Callable[[str], object],
    asked: int,
    answers: int,
    of_parent: tuple[int, int],
    parent: int,
    limit: float,
) -> NoReturn:
    """Runs the child, which ends with its parent, whose ends of the pipes are closed in it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tie_to_parent(signal.SIGKILL)
        if os.getppid() != parent:  # too late to be told
            os._exit(1)
        for end in of_parent:
            os.close(end)
        for number in (signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()  # what a crash would print is not for the user
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _limit_memory(HEADER_MEMORY)
        with os.fdopen(asked) as lines:
            for line in lines:
                _limit_cpu(limit)
                answer = DONE
                try:
                    read(json.loads(line))
                except Exception as error:  # the parent will see for itself
                    if isinstance(error, MemoryError) or NO_MEMORY in str(error):
                        answer = TOO_LARGE
                os.write(answers, answer)
    finally:
        os._exit(0)


def _limit_memory(more: int) -> None:
    """Lets this process take no more than so many bytes of address space more than it has [B]."""
    with suppress(OSError, ValueError):  # elsewhere than on Linux, or beyond a limit that there is
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _limit_cpu(seconds: float) -> None:
    """Has the system end this process when it has computed for so much longer.

    A parent that is stopped, or that nothing tells of, does not end a child that walks in circles.
    """
    spent = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(spent.ru_utime + spent.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


PACKED_LARGER = 64 << 10
"""Bytes that filters may add to a chunk which they cannot pack; HDF5's own leave it as it is."""

UNPACKED_FREELY = 192 << 20
"""The size of a chunk [B] that any may unpack to, whatever it says."""

PIECE = 64 << 10
"""Bytes that are given to deflate at a time, which makes at most 66 MiB of them [B]."""

AT_ONCE = 16 << 20
"""Limits what is unpacked in one piece [B]."""

DEFLATE = h5py.h5z.FILTER_DEFLATE
SHUFFLE = h5py.h5z.FILTER_SHUFFLE
FLETCHER32 = h5py.h5z.FILTER_FLETCHER32

WORDS = {DEFLATE: "gzip", h5py.h5z.FILTER_SZIP: "szip", h5py.h5z.FILTER_LZF: "lzf"}
"""Names filters that pack, as h5py does: its own words fail on a filter that lacks its options."""

UNDONE_HERE = tuple(
    (*before, DEFLATE, *behind) for before in ((), (SHUFFLE,)) for behind in ((), (FLETCHER32,))
)
"""Filters, in the order in which they pack, that are undone without HDF5."""

Doubts = dict[tuple[Path, str], set[tuple[int, ...]]]
"""Holds where the chunks of arrays begin that may unpack to much and have not been looked at."""


def filters_of(dataset: Any) -> tuple[int, ...]:
    """Lists the codes of the filters; the masks of chunks have a bit for each."""
    filters = dataset.id.get_create_plist()
    return tuple(filters.get_filter(i)[0] for i in range(filters.get_nfilters()))


def chunks_of(dataset: Any) -> list[Any]:
    """Lists what is known of each chunk that is stored."""
    chunks: list[Any] = []
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(chunks.append)
    else:  # HDF5 before 1.10.9 has to be asked one by one
        chunks = [dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks())]
    return chunks


def named_file(path: Path, name: str) -> Path:
    """Finds the file that HDF5 opens where the file ``path`` names another one.

    One that is named absolutely and has been moved it looks for by its last part. (H5F.c,
    H5F_prefix_open_file)
    """
    last = os.path.basename(name) if os.path.isabs(name) else name
    folders = (path.parent, Path(), Path(os.path.realpath(path)).parent)
    found = [Path(name)] if os.path.isabs(name) else []
    found += [folder / last for folder in folders]
    return next((file for file in found if file.is_file()), found[0])


def read_box(path: Path, key: str, dataset: Any, box: Box, doubts: Doubts) -> Array:
    """Reads a box of an array, with native bytes; ``doubts`` keep what is left to be looked at.

    A chunk that unpacks to more than it says, or to less, is refused.
    """
    values = np.empty(box.shape, dataset.dtype.newbyteorder("="))
    doubtful = _doubtful_in(path, key, dataset, box, doubts)
    if not doubtful or not _undone_here(dataset):
        check_unpacked(path, key, dataset, box, doubts)
        dataset.read_direct(values, source_sel=box.slices())
        return values
    edges = zip(box.lo, box.hi, dataset.chunks, strict=True)
    for place in itertools.product(*(range(lo - lo % side, hi, side) for lo, hi, side in edges)):
        chunk = _chunk_at(dataset, place)
        part = chunk.intersect(box)
        found = _unpacked(path, key, dataset, chunk, part) if chunk.lo in doubtful else None
        if found is None:
            dataset.read_direct(values, part.slices(), part.slices(box))
        else:
            values[part.slices(box)] = found
            doubts[path, key].remove(chunk.lo)
    return values


def check_unpacked(path: Path, key: str, dataset: Any, box: Box, doubts: Doubts) -> None:
    """Refuses a chunk that a box of an array needs and that unpacks to more than it says.

    They are unpacked piece by piece, and the pieces thrown away; once, as ``doubts`` keep what is
    left.
    """
    if dataset.is_virtual:
        for source in dataset.virtual_sources():
            target = _file_of(path, source)
            with h5py.File(target, "r", locking=False) as file:
                found = file[source.dset_name]
                check_unpacked(target, source.dset_name, found, Box.whole(found.shape), doubts)
        return
    for place in sorted(_doubtful_in(path, key, dataset, box, doubts)):
        most = _size_of_chunk(dataset) + PACKED_LARGER
        _, packed = dataset.id.read_direct_chunk(place)
        with suppress(zlib.error):
            if sum(map(len, _inflated(packed, most))) > most:
                raise _unpacks_to_more(path, key, dataset, place, packed)
        doubts[path, key].remove(place)


def _doubtful_in(
    path: Path, key: str, dataset: Any, box: Box, doubts: Doubts
) -> set[tuple[int, ...]]:
    """Finds the chunks that a box needs and that may unpack to more than is free of doubt."""
    if dataset.is_virtual or dataset.chunks is None:
        return set()
    if (path, key) not in doubts:
        doubts[path, key] = _doubtful_chunks(path, key, dataset)
    return {
        place for place in doubts[path, key] if not _chunk_at(dataset, place).intersect(box).empty
    }


def _doubtful_chunks(path: Path, key: str, dataset: Any) -> set[tuple[int, ...]]:
    """Finds the chunks that may unpack to more than is free of doubt, and than they say."""
    codes = filters_of(dataset)
    if codes.count(DEFLATE) > 1:
        raise DataError(
            f"{path}: {key!r} is packed twice\n    h5repack -f GZIP=4 OLD NEW repairs it"
        )
    if DEFLATE not in codes:
        return set()
    bit = 1 << codes.index(DEFLATE)
    believed = max(_size_of_chunk(dataset) + PACKED_LARGER, UNPACKED_FREELY) // DEFLATE_RATIO
    return {
        chunk.chunk_offset
        for chunk in chunks_of(dataset)
        if chunk.size > believed and not chunk.filter_mask & bit
    }


def _undone_here(dataset: Any) -> bool:
    """Tells if the filters are those that are undone here, of numbers that are numpy's."""
    dtype = dataset.dtype
    if dtype.kind not in "iuf" or h5py.h5t.py_create(dtype) != dataset.id.get_type():
        return False
    if filters_of(dataset) not in UNDONE_HERE:
        return False
    _, _, (*sides,), _ = dataset.id.get_create_plist().get_filter(0)
    return filters_of(dataset)[0] != SHUFFLE or sides == [dtype.itemsize]


def _unpacked(path: Path, key: str, dataset: Any, chunk: Box, part: Box) -> Array | None:
    """Returns a part of a chunk, with the bytes of the file; None for what is damaged."""
    codes = filters_of(dataset)
    mask, packed = dataset.id.read_direct_chunk(chunk.lo)
    done = {code for bit, code in enumerate(codes) if not mask & 1 << bit}
    if FLETCHER32 in done:
        packed, end = packed[:-4], packed[-4:]
        if _fletcher32(packed) != int.from_bytes(end, "little"):
            return None
    size = _size_of_chunk(dataset)
    try:
        unpacked = b"".join(_inflated(packed, size))
    except zlib.error:
        return None
    if len(unpacked) > size:
        raise _unpacks_to_more(path, key, dataset, chunk.lo, packed)
    if len(unpacked) < size:
        raise DataError(
            f"{path}: {key!r} has a chunk at {chunk.lo} that unpacks to {len(unpacked)} bytes, "
            f"less than the {size} that it says\n    get a fresh copy of the file"
        )
    raw = np.frombuffer(unpacked, np.uint8)
    inner = part.slices(chunk)
    if SHUFFLE not in done:
        return raw.view(dataset.dtype).reshape(chunk.shape)[inner]
    values = np.empty(part.shape, dataset.dtype)
    places = values.view(np.uint8).reshape(*part.shape, -1)
    for number, plane in enumerate(raw.reshape(-1, *chunk.shape)):  # the first bytes of all, ...
        places[..., number] = plane[inner]
    return values


def _inflated(packed: bytes, most: int) -> Iterator[bytes]:
    """Yields what deflate makes of it, piece by piece, and no more than one byte above ``most``.

    Damaged bytes, or too few, are a zlib.error.
    """
    stream = zlib.decompressobj()
    step = PIECE if most > AT_ONCE else max(1, len(packed))
    for at in range(0, len(packed), step):
        piece = stream.decompress(packed[at : at + step], most + 1)
        most -= len(piece)
        yield piece
        if stream.eof or most < 0:
            return
    raise zlib.error("it is cut short")


def _fletcher32(data: bytes) -> int:
    """Computes Fletcher's sum of 16-bit words, the first byte the higher, as HDF5 does."""
    first = second = 0
    for at in range(0, len(data), PIECE):
        piece = data[at : at + PIECE]
        words = np.frombuffer(piece + b"\0" * (len(piece) % 2), ">u2").astype(np.float64)  # exact
        second += len(words) * first + int(words @ np.arange(len(words), 0, -1.0))
        first += int(words.sum())
    first, second = ((total - 1) % 0xFFFF + 1 if total else 0 for total in (first, second))
    return second << 16 | first


def _chunk_at(dataset: Any, place: tuple[int, ...]) -> Box:
    """Returns the chunk that begins there, whole even beyond the last voxel."""
    return Box.whole(dataset.chunks).shift(place)


def _size_of_chunk(dataset: Any) -> int:
    return int(math.prod(dataset.chunks) * dataset.dtype.itemsize)


def _unpacks_to_more(
    path: Path, key: str, dataset: Any, place: tuple[int, ...], packed: bytes
) -> DataError:
    return DataError(
        f"{path}: {key!r} has a chunk at {place} of {len(packed)} bytes that unpacks to more than "
        f"the {_size_of_chunk(dataset)} that it says\n    get a fresh copy of the file"
    )
