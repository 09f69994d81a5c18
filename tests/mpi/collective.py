"""Collective reads on four ranks of MPI: `make test-mpi` (tier: MPI; pytest does not collect it).

Files are written by h5py alone, what is read is compared with numpy arrays, and HDF5 is asked
whether the transfer was collective.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import hyperslab as hs
from hyperslab.formats.arrays import mpio
from tests.mpi.files import LAYOUTS, public, volume

WORLD = MPI.COMM_WORLD
COUNT = 5
GRIDS = [
    {"depth": 2, "height": 2},
    {"data": 2, "depth": 2},
    {"data": 2, "width": 2},
    {"depth": 4},
    {"data": 4},
]
COLLECTIVE = (2, 4)
"""H5D_MPIO_CHUNK_COLLECTIVE and H5D_MPIO_CONTIGUOUS_COLLECTIVE of HDF5's H5Ppublic.h."""

Spoil = Callable[[Path], None]


def say(words: str) -> None:
    if WORLD.rank == 0:
        print(words, flush=True)


@contextmanager
def folder_of(write: Callable[[Path, int], None]) -> Iterator[Path]:
    """A folder that the first rank makes and all know."""
    folder = Path(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None))
    if WORLD.rank == 0:
        for seed in range(COUNT):
            write(folder / f"u{seed}", seed)
    WORLD.barrier()
    yield folder
    WORLD.barrier()
    if WORLD.rank == 0:
        shutil.rmtree(folder)


def mode_of(dataset: Any) -> int:
    """How HDF5 has done the last transfer; h5py has no name for the function."""
    ask = ctypes.CDLL(h5py.h5p.__file__).H5Pget_mpio_actual_io_mode
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int)]
    mode = ctypes.c_int(-1)
    assert ask(dataset._dxpl.id, ctypes.byref(mode)) >= 0
    return mode.value


@contextmanager
def fetching(instead: Callable[..., Any]) -> Iterator[None]:
    """Call ``instead`` with the ordinary function and its arguments."""
    fetch = mpio.MpioReader._fetch
    mpio.MpioReader._fetch = lambda *what: instead(fetch, *what)
    try:
        yield
    finally:
        mpio.MpioReader._fetch = fetch


def check_bytes(folder: Path, extents: dict[str, int], mode: str) -> int:
    """Two epochs; returns the collective transfers of this rank."""
    modes: list[int] = []

    def watched(fetch: Callable[..., Any], opener: Any, dataset: Any, *what: Any) -> Any:
        assert dataset.file.driver == "mpio"
        values = fetch(opener, dataset, *what)
        modes.append(mode_of(dataset))
        return values

    how: Any = {"batch_size": 3, "split": "all", "shuffle": True, "transform": None}
    data = hs.open(folder, hs.Grid(**extents), driver="mpio", mode=mode, **how)
    with fetching(watched), data:
        for epoch in range(2):
            for x, y in data.epoch(epoch):
                expected = np.stack([volume(seed) for seed in data.shown])
                np.testing.assert_array_equal(x.full().numpy(), expected)
                if data.classes:
                    np.testing.assert_array_equal(y.full().numpy(), expected[:, 0] % 3)
    assert {*modes} <= {*COLLECTIVE}
    return len(modes)


def check_augmented(folder: Path) -> None:
    """Flips and turns change the boxes; the same ones are read with and without MPI."""
    grid = hs.Grid(depth=2, width=2)
    how: Any = {"batch_size": 2, "split": "all", "augment": True, "shuffle": True}
    with hs.open(folder, grid, driver="mpio", **how) as ours, hs.open(folder, grid, **how) as plain:
        for (x, y), (other, targets) in zip(ours.epoch(3), plain.epoch(3), strict=True):
            assert x.local.numpy().tobytes() == other.local.numpy().tobytes()
            assert y.full().tolist() == targets.full().tolist()


def check_failure(folder: Path, spoil: Spoil, words: str, before: tuple[int, ...]) -> None:
    """One file is spoilt after the folder was scanned: all ranks get an error that names it."""
    data = hs.open(folder, hs.Grid(depth=2, height=2), batch_size=1, split="all", driver="mpio")
    WORLD.barrier()
    if WORLD.rank == 1:
        spoil(folder / "u3.hdf5")
    WORLD.barrier()
    seen: list[int] = []
    with pytest.raises(hs.DataError, match=rf"(?s)u3\.hdf5.*{words}"):
        seen.extend(sample for _ in data.epoch(0) for sample in data.shown)
    assert tuple(seen) == before
    data.close()


def check_skipped(folder: Path) -> None:
    """The same sample is left out on all ranks."""
    how: Any = {"batch_size": 2, "split": "all", "on_error": "skip", "transform": None}
    with hs.open(folder, hs.Grid(depth=2, height=2), driver="mpio", **how) as data:
        WORLD.barrier()
        if WORLD.rank == 3:
            (folder / "u2.hdf5").unlink()
        WORLD.barrier()
        assert [sample for _ in data.epoch(0) for sample in data.shown] == [0, 1, 3, 4]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def damage(path: Path) -> None:
    """The first two planes: of one rank's chunks some cannot be unpacked. Size and time stay."""
    with h5py.File(path) as file:
        chunk = file["full"].id.get_chunk_info(0)
    with path.open("r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\xff" * chunk.size)


def chunked(path: Path, seed: int) -> None:
    public(path, seed, chunks=(1, 7, 7, 4), compression="gzip")
    if seed == 3:
        damage(path.with_suffix(".hdf5"))


def check_lonely_failure(folder: Path) -> None:
    """What only one rank runs into is an error on all; the others name that rank."""
    words = "no room for the box" if WORLD.rank == 2 else r"rank 2 says: .*no room for the box"

    def failing(fetch: Callable[..., Any], *what: Any) -> Any:
        if WORLD.rank == 2:
            what[1].file["full"]  # it takes part up to here
            raise MemoryError("no room for the box")
        with what[1].collective:
            return None

    with (
        hs.open(folder, hs.Grid(depth=4), batch_size=1, split="all", driver="mpio") as data,
        fetching(failing),
        pytest.raises(hs.DataError, match=words),
    ):
        next(data.epoch(0))


def check_numbering() -> None:
    """Torch's ranks 0 and 1 are MPI's 1 and 0: all ranks are told, and none waits for another."""
    rank = [1, 0, 2, 3][WORLD.rank]

    class Numbered:
        rank, size, coords = [1, 0, 2, 3][WORLD.rank], 4, {"data": 0}

    grid: Any = Numbered()
    with pytest.raises(hs.HyperslabError, match=rf"torch's rank {rank} of 4 is MPI's {WORLD.rank}"):
        mpio.replica_of(grid)


def main() -> None:
    assert WORLD.size == 4, "start it with mpirun -n 4"
    for name, write in LAYOUTS.items():
        with folder_of(write) as folder:
            for extents in GRIDS:
                for mode in ("direct", "store"):
                    transfers = check_bytes(folder, extents, mode)
                    assert transfers > 0
                    say(f"{name} on {extents}, {mode}: equal, {transfers} collective transfers")
    with folder_of(public) as folder:
        check_augmented(folder)
        check_lonely_failure(folder)
        check_numbering()
        check_skipped(folder)
    say("augmented as without MPI; an error of one rank is one of all; a sample may be left out")
    for spoil, words in ((Path.unlink, "'u3' has gone"), (truncate, "'u3' has changed")):
        with folder_of(public) as folder:
            check_failure(folder, spoil, words, (0, 1, 2))
    with folder_of(chunked) as folder:
        check_failure(folder, lambda _: None, "cannot be read as HDF5", (0, 1, 2))
    say("a file that has gone, was cut short or damaged: named on all ranks")


if __name__ == "__main__":
    main()
