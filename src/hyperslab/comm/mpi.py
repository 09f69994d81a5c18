"""Ranks that `mpirun` has started: the variables from which `torch.distributed` starts."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

from hyperslab.errors import HyperslabError

NAMES = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PMI_SIZE": ("PMI_RANK", "MPI_LOCALRANKID"),
}
"""Open MPI's, and MPICH's and Intel's."""


def adopt_mpi(environ: MutableMapping[str, str]) -> None:
    """Under ``mpirun`` with several ranks, set the variables that torchrun would.

    Where they meet is agreed by MPI: the first rank's machine, and a port that is free there.

    Raises:
        HyperslabError: mpi4py is not installed, and nothing says where the ranks meet.
    """
    size = next((name for name in NAMES if name in environ), None)
    if "RANK" in environ or size is None or environ[size] == "1":
        return
    rank, local = NAMES[size]
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        address, port = _meeting_place()
        environ["MASTER_ADDR"], environ["MASTER_PORT"] = address, str(port)
    environ["RANK"], environ["WORLD_SIZE"] = environ[rank], environ[size]
    environ["LOCAL_RANK"] = environ.get(local, "0")


def _meeting_place() -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HyperslabError(
            f"mpirun started this rank, and where the ranks meet is not known ({error})\n"
            "    pip install hyperslab[mpi], or set MASTER_ADDR and MASTER_PORT"
        ) from error
    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    place = None
    if world.Get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            name = "localhost" if len({*hosts}) == 1 else hosts[0]
            place = (name, free.getsockname()[1])
    found: tuple[str, int] = world.bcast(place)
    return found
