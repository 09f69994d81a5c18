"""The place of a rank that mpirun started (tier: no process; with MPI: tests/mpi)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hyperslab.comm.launchers import adopt_mpi, finish_mpi
from hyperslab.errors import HyperslabError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
MET = {"MASTER_ADDR": "node7", "MASTER_PORT": "29400"}


class World:
    """What a rank sees of MPI; the others say what the test says."""

    def __init__(self, rank: int, hosts: list[str], place: Any = None) -> None:
        self.rank, self.hosts, self.place = rank, hosts, place

    def allgather(self, _: str) -> list[str]:
        return self.hosts

    def bcast(self, place: Any) -> Any:
        return self.place if place is None else place

    def Get_rank(self) -> int:
        return self.rank


def pretend(monkeypatch: pytest.MonkeyPatch, **mpi: Any) -> None:
    """Put another mpi4py in place of the one there is or is not."""
    package = ModuleType("mpi4py")
    package.MPI = SimpleNamespace(**mpi)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", package.MPI)


@pytest.mark.parametrize("started", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_a_rank_takes_its_place(started: dict[str, str]) -> None:
    environ = {**started, **MET}
    adopt_mpi(environ)
    assert environ == {**started, **MET, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun's goes first
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_PROCID": "5"},  # srun's task: no hydra
    ],
    ids=str,
)
def test_everybody_else_stays_as_it_is(environ: dict[str, str]) -> None:
    after = dict(environ)
    adopt_mpi(after)
    assert after == environ


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_"),
        ({"OMPI_COMM_WORLD_RANK": "five"}, "OMPI_COMM_WORLD_RANK='five' is not a whole number"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK='-1' is not in the"),
    ],
    ids=str,
)
def test_odd_variables_are_named(changed: dict[str, str | None], words: str) -> None:
    environ = {k: v for k, v in (OPEN_MPI | MET | changed).items() if v is not None}
    with pytest.raises(HyperslabError, match=f"^{words}"):
        adopt_mpi(environ)


def test_a_rank_knows_its_job() -> None:
    environ = {**OPEN_MPI, **MET, "PMIX_NAMESPACE": "prterun-node7-1@1"}
    adopt_mpi(environ)
    assert environ["HYPERSLAB_RUN"] == "MPI job prterun-node7-1@1"


def test_the_first_rank_says_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, COMM_WORLD=World(5, ["node7", "node8"], ("node7", 41000)))
    environ = dict(OPEN_MPI)
    adopt_mpi(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("node7", "41000")
    for hosts, expected in ((["node7", "node8"], "node7"), (["node7"] * 8, "localhost")):
        pretend(monkeypatch, COMM_WORLD=World(0, hosts))
        environ = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
        adopt_mpi(environ)
        assert environ["MASTER_ADDR"] == expected
        assert 1024 <= int(environ["MASTER_PORT"]) < 65536


def test_without_mpi4py_somebody_has_to_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(HyperslabError, match=r'(?s)pip install "mpi4py.*", or set MASTER_A'):
        adopt_mpi(dict(OPEN_MPI))


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_mpi_is_ended_once_and_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, started: bool, ended: bool
) -> None:
    calls: list[str] = []
    pretend(
        monkeypatch,
        Is_initialized=lambda: started,
        Is_finalized=lambda: ended,
        Finalize=lambda: calls.append("Finalize"),
    )
    finish_mpi()
    assert calls == ["Finalize"] * (started and not ended)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    finish_mpi()
