"""Ranks that `mpirun` has started: the variables from which `torch.distributed` starts."""

from __future__ import annotations

import socket
import sys
from collections.abc import MutableMapping

from hyperslab.comm.start.variables import RUN, whole_number
from hyperslab.errors import HyperslabError
from hyperslab.optional_libraries import how_to_install

VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Rank, number of ranks, and rank on the machine: Open MPI's names, and MPICH's and Intel's. Slurm
sets the first two of the latter for its own tasks."""

JOB = "PMIX_NAMESPACE"
"""Open MPI's name for the run, the same on all its ranks."""


def adopt_mpi(environ: MutableMapping[str, str]) -> None:
    """Under ``mpirun`` with several ranks, set the variables that torchrun would.

    Where they meet is agreed by MPI: the first rank's machine, and a port that is free there. Call
    it before what takes a rank's place from Slurm: that describes mpirun's own daemons.

    Raises:
        HyperslabError: mpi4py is not installed, and nothing says where the ranks meet; or one of
            mpirun's variables is missing or odd.
    """
    if "RANK" in environ:
        return
    found = next((names for names in VARIABLES if all(name in environ for name in names)), None)
    if found is None and not any(name in environ for name in VARIABLES[0]):
        return
    rank, size, local = (whole_number(environ, name) for name in found or VARIABLES[0])
    if size == 1:
        return
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        address, port = _meeting_place()
        environ["MASTER_ADDR"] = address
        environ["MASTER_PORT"] = str(port)
    if JOB in environ:
        environ.setdefault(RUN, f"MPI job {environ[JOB]}")
    environ["RANK"] = str(rank)
    environ["WORLD_SIZE"] = str(size)
    environ["LOCAL_RANK"] = str(local)


def finish_mpi() -> None:
    """End MPI where it was started, as a rank must that leaves without the interpreter's shutdown.

    Waits for the other ranks; one that does not call it is a failure, for which mpirun ends all.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _meeting_place() -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HyperslabError(
            f"mpirun started this rank, and where the ranks meet is not known ({error})\n"
            f"    {how_to_install('mpi')}, or set MASTER_ADDR and MASTER_PORT"
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
