"""Where HDF5 files cannot be read collectively (tier: no process; with MPI: tests/mpi)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import h5py
import pytest

from hyperslab.data import open
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.arrays.mpio import replica_of
from tests.formats.universes import Seat, folder
from tests.formats.writers import npy


def pretend(monkeypatch: pytest.MonkeyPatch, built: bool, rank: int, size: int) -> list[Any]:
    """An mpi4py that says so, and an h5py that is built for MPI or not; how it was split."""
    splits: list[Any] = []
    world = SimpleNamespace(
        Get_rank=lambda: rank,
        Get_size=lambda: size,
        allgather=lambda mine: [mine] * size,
        Split=lambda **how: splits.append(how) or "communicator",
    )
    package = ModuleType("mpi4py")
    package.MPI = SimpleNamespace(COMM_WORLD=world)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setattr(h5py, "get_config", lambda: SimpleNamespace(mpi=built))
    return splits


def test_without_mpi4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, 2)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(HyperslabError, match=r'pip install "mpi4py.*"'):
        open(tmp_path, Seat(), batch_size=1, driver="mpio")


def test_with_an_h5py_without_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, 2)
    pretend(monkeypatch, False, 0, 1)
    with pytest.raises(HyperslabError, match=r"(?s)built for a parallel HDF5.*HDF5_MPI=ON"):
        open(tmp_path, Seat(), batch_size=1, driver="mpio")


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (2, 4), (3, 8)])
def test_ranks_that_mpi_numbers_otherwise(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    splits = pretend(monkeypatch, True, rank, size)
    words = rf"(?s)torch's rank 3 of 4 is MPI's {rank} of {size}.*mpirun -n 4"
    with pytest.raises(HyperslabError, match=words):
        replica_of(Seat(3, data=2, depth=2))
    assert splits == []


def test_a_replica_has_one_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = pretend(monkeypatch, True, 3, 4)
    seat = Seat(3, data=2, depth=2)
    assert [replica_of(seat), replica_of(seat)] == ["communicator"] * 2
    assert splits == [{"color": 1, "key": 3}]


def test_other_formats_and_other_drivers(tmp_path: Path) -> None:
    npy("first")(tmp_path / "npy")
    with pytest.raises(DataError, match=r"(?s)v0.npy: driver='mpio' is for HDF5.*convert"):
        open(tmp_path / "npy", Seat(), batch_size=1, driver="mpio")
    folder(tmp_path / "hdf5", 2)
    with pytest.raises(DataError, match="driver='sec2': choose from mpio"):
        open(tmp_path / "hdf5", Seat(), batch_size=1, driver="sec2")  # type: ignore[arg-type]
