"""Collective reads on four ranks of MPI: `make test-mpi` (tier: MPI; pytest does not collect it).

Files are written by h5py alone, what is read is compared with numpy arrays.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import hyperslab as hs
from hyperslab.data import mpio

WORLD = MPI.COMM_WORLD
COUNT = 5
GRIDS = [
    {"depth": 2, "height": 2},
    {"data": 2, "depth": 2},
    {"data": 2, "width": 2},
    {"depth": 4},
    {"data": 4},
]


def volume(seed: int) -> Any:
    """(C, D, H, W)"""
    return np.random.default_rng(seed).poisson(1.0, (4, 7, 7, 7)).astype("int16")


def unit(seed: int) -> Any:
    return np.random.default_rng(1000 + seed).uniform(-1, 1, 4)


def public(path: Path, seed: int) -> None:
    with h5py.File(path.with_suffix(".hdf5"), "w") as file:
        file["full"], file["unitPar"] = np.moveaxis(volume(seed), 0, -1), unit(seed)


def benchmark(path: Path, seed: int) -> None:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        x = np.moveaxis(volume(seed), 0, -1)
        file.create_dataset("x", data=x, chunks=(4, 3, 7, 4), compression="gzip")
        file["y"] = unit(seed)


def lbann(path: Path, seed: int) -> None:
    with h5py.File(path.with_name(f"{path.name}_0_0_0.hdf5"), "w") as file:
        file["full"], file["unitPar"] = volume(seed).transpose(0, 3, 2, 1), unit(seed)


def scans(path: Path, seed: int) -> None:
    with h5py.File(path.with_suffix(".hdf5"), "w") as file:
        file["volume"], file["segmentation"] = volume(seed), volume(seed)[:1] % 3


LAYOUTS: dict[str, Callable[[Path, int], None]] = {
    "public": public,
    "benchmark, gzip": benchmark,
    "LBANN": lbann,
    "scans": scans,
}


def folder_of(write: Callable[[Path, int], None]) -> Path:
    """A folder that the first rank makes and all know."""
    folder = Path(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None))
    if WORLD.rank == 0:
        for seed in range(COUNT):
            write(folder / f"u{seed}", seed)
    WORLD.barrier()
    return folder


def check_bytes(folder: Path, extents: dict[str, int], mode: str) -> int:
    """Two epochs; returns the collective transfers of this rank."""
    transfers = 0
    fetch = mpio.MpioFolder._fetch

    def counted(self: mpio.MpioFolder, dataset: Any, *what: Any) -> Any:
        nonlocal transfers
        transfers += dataset.file.driver == "mpio"
        return fetch(self, dataset, *what)

    mpio.MpioFolder._fetch = counted  # type: ignore[method-assign]
    how: Any = {"batch_size": 3, "split": "all", "shuffle": True, "transform": None}
    try:
        with hs.open(folder, hs.Grid(**extents), driver="mpio", mode=mode, **how) as data:
            for epoch in range(2):
                for x, y in data.epoch(epoch):
                    expected = np.stack([volume(seed) for seed in data.shown])
                    np.testing.assert_array_equal(x.full().numpy(), expected)
                    if data.classes:
                        np.testing.assert_array_equal(y.full().numpy(), expected[:, 0] % 3)
    finally:
        mpio.MpioFolder._fetch = fetch  # type: ignore[method-assign]
    return transfers


def check_failure(folder: Path, spoil: Callable[[Path], None], words: str) -> None:
    """One file is spoilt after the folder was scanned: all ranks get an error that names it."""
    data = hs.open(folder, hs.Grid(depth=2, height=2), batch_size=1, split="all", driver="mpio")
    victim = folder / "u3.hdf5"
    WORLD.barrier()
    if WORLD.rank == 1:
        spoil(victim)
    WORLD.barrier()
    seen = []
    with pytest.raises(hs.DataError, match=rf"u3\.hdf5.*{words}"):
        seen.extend(data.shown for _ in data.epoch(0))
    assert seen == [(0,), (1,), (2,)]
    WORLD.barrier()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def main() -> None:
    assert WORLD.size == 4, "start it with mpirun -n 4"
    for name, write in LAYOUTS.items():
        folder = folder_of(write)
        for extents in GRIDS:
            for mode in ("direct", "store"):
                transfers = check_bytes(folder, extents, mode)
                assert transfers > 0
                if WORLD.rank == 0:
                    print(f"{name} on {extents}, {mode}: equal, {transfers} collective reads")
    check_failure(folder_of(public), Path.unlink, "No such file")
    check_failure(folder_of(public), truncate, "")
    if WORLD.rank == 0:
        print("a file that vanished and one that was cut short: named on all ranks")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
