"""Reads a rank's place from the environment that torchrun, srun, jsrun or mpirun has set.

`read_variables` reads torchrun's variables and those of hyperslab's own launcher. `adopt_slurm`,
`adopt_lsf` and `adopt_mpi` set these for ranks that Slurm's `srun`, LSF's `jsrun` or `mpirun` has
started. `AXES` are those of the grid that they form. Nothing here needs torch.
"""

from __future__ import annotations

import itertools
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hyperslab.errors import HyperslabError
from hyperslab.util.optional_libraries import how_to_install

AXES = ("data", "depth", "height", "width")
"""Lists the axes of the grid, outermost first: neighbours in width have neighbouring ranks."""

STORE_VARIABLE = "HYPERSLAB_STORE"
"""Names the file, in a rank's environment, by which ranks that `hyperslab` started meet."""

RUN_VARIABLE = "HYPERSLAB_RUN"
"""Names the run, in a rank's environment, that it belongs to, the same on all of its ranks."""

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Marks torchrun's ranks in the environment; the launcher of `hyperslab` removes it there."""

VALID_PORTS = range(1, 65536)

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "SLURM_JOB_ID",
    "LSB_JOBID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
)
"""Tells in an error why another variable is missed."""

_REMEDY = (
    "    torchrun, srun, mpirun and --ranks set what a rank needs; by hand, set RANK,\n"
    "    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
)


@dataclass(frozen=True, slots=True)
class RankVariables:
    """Holds the place of a rank, and where it meets the others."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    store: str | None

    @property
    def where(self) -> str:
        """Return the words by which an error names the meeting place."""
        if self.store is not None:
            return "the store of their launcher"
        return f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"


def read_variables(environ: Mapping[str, str]) -> RankVariables | None:
    """Read the environment's words on this rank; None where it is the only one.

    Raises:
        HyperslabError: a variable is missing, no number or out of range; names it.
    """
    if "RANK" not in environ:
        if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE", range(1, 1 << 31)) > 1:
            raise _bad(environ, "WORLD_SIZE", "asks for several ranks, but RANK is not set")
        return None
    size = _number(environ, "WORLD_SIZE", range(1, 1 << 31))
    of = f"of WORLD_SIZE={size} ranks"
    rank = _number(environ, "RANK", range(size), of)
    local = _number(environ, "LOCAL_RANK", range(size), of) if "LOCAL_RANK" in environ else 0
    # With torchrun's variable the store is that of a rank which has started torchrun.
    if STORE_VARIABLE in environ and TORCHRUN_VARIABLE not in environ:
        return RankVariables(rank, size, local, "", 0, environ[STORE_VARIABLE])
    if size == 1 and "MASTER_PORT" not in environ:  # nobody to meet
        return RankVariables(rank, size, local, "localhost", 0, None)
    port = _number(environ, "MASTER_PORT", VALID_PORTS)
    return RankVariables(rank, size, local, _text(environ, "MASTER_ADDR"), port, None)


def check_thread_count(environ: Mapping[str, str]) -> None:
    """
    Raises:
        HyperslabError: OMP_NUM_THREADS is not a number of threads; OpenMP would take all cores.
    """
    for part in environ.get("OMP_NUM_THREADS", "1").split(","):  # one for each level of nesting
        if not part.strip().isdecimal() or int(part) < 1:
            raise _bad(environ, "OMP_NUM_THREADS", "is not a number of threads", "    unset it")


def _number(
    environ: Mapping[str, str], name: str, allowed: range = range(1 << 32), of: str = ""
) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _bad(environ, name, "is not a whole number")
    number = int(text)
    if number not in allowed:
        most = f" to {allowed[-1]}" if allowed.stop < 1 << 31 else " on"
        raise _bad(environ, name, f"is not in the range from {allowed[0]}{most} {of}".rstrip())
    return number


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        others = [n for n in LAUNCHER_VARIABLES if n in environ and n != name]
        given = f", but {others[0]}={environ[others[0]]} is" if others else ""
        raise HyperslabError(f"{name} is not set{given}\n{_REMEDY}")
    return text


def _bad(
    environ: Mapping[str, str], name: str, problem: str, remedy: str = _REMEDY
) -> HyperslabError:
    return HyperslabError(f"{name}={environ[name]!r} {problem}\n{remedy}")


JOB_PORTS = range(20000, 30000)
"""Below those that Linux gives to programs that ask for any."""

STEP_STRIDE = 97
"""Between the ports of a job's steps: next to each other they would be those of the next jobs."""


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """Set the variables that torchrun would, under ``srun`` with several tasks.

    Job and step give the port, so that two steps that run on one machine do not meet; and the
    words for the run, by which a rank of another one is refused if they do.

    Raises:
        HyperslabError: one of Slurm's is missing or odd; names it.
    """
    if "RANK" in environ or "SLURM_STEP_NODELIST" not in environ:
        return  # a batch script has some of Slurm's variables too, but is no rank
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    ranks = next((_number(environ, name) for name in names if name in environ), 1)
    if ranks == 1:
        return
    rank, local = (_number(environ, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    job, step = (_number(environ, name) if name in environ else 0 for name in names)
    nodes = environ["SLURM_STEP_NODELIST"]
    address = first_slurm_host(nodes)
    if not address:
        raise HyperslabError(f"SLURM_STEP_NODELIST={nodes!r} names no machine")
    environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(local))
    environ.setdefault("MASTER_ADDR", address)
    environ.setdefault("MASTER_PORT", str(job_port(job, step)))
    environ.setdefault(RUN_VARIABLE, f"Slurm job {job} step {step}")


def job_port(job: int, step: int) -> int:
    """Return where the ranks of a step meet.

    >>> job_port(123456, 0), job_port(123456, 1), job_port(123457, 0)
    (23456, 23553, 23457)
    """
    return JOB_PORTS[(job + STEP_STRIDE * step) % len(JOB_PORTS)]


def first_slurm_host(nodes: str) -> str:
    """Return the first name in Slurm's list of nodes.

    >>> first_slurm_host("gpu[007-012,020],login1")
    'gpu007'
    """
    match = re.match(r"([^,\[]*)(?:\[([^-,\]]*)[^\]]*\])?([^,]*)", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())


JSRUN_RANK_VARIABLES = (
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
)
"""Rank, number of ranks and rank on the machine, which LSF's job step manager sets."""


def adopt_lsf(environ: MutableMapping[str, str]) -> None:
    """Set the variables that torchrun would, under LSF's ``jsrun`` with several tasks.

    The ranks meet at the job's first compute node, at a port that the job gives. Spectrum MPI sets
    Open MPI's variables beside those of ``jsrun``: call this before `adopt_mpi`, which would need
    mpi4py.

    Raises:
        HyperslabError: one of LSF's variables is missing or odd, or its file of hosts cannot be
            read; names it.
    """
    if "RANK" in environ or not any(name in environ for name in JSRUN_RANK_VARIABLES):
        return
    rank, size, local = (_number(environ, name) for name in JSRUN_RANK_VARIABLES)
    if size == 1:
        return
    job = _number(environ, "LSB_JOBID")
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = _first_lsf_host(environ)
    environ.setdefault("MASTER_PORT", str(job_port(job, 0)))
    environ.setdefault(RUN_VARIABLE, f"LSF job {job}")
    environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))


def _first_lsf_host(environ: Mapping[str, str]) -> str:
    """Return the first host behind the launch node, which LSF lists first and runs no task on."""
    if "LSB_DJOB_RANKFILE" in environ:
        name = "LSB_DJOB_RANKFILE"
        try:
            with open(environ[name], encoding="utf-8") as file:
                hosts = file.read(1 << 24).split()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "    set MASTER_ADDR to the first compute node's name"
            raise _bad(environ, name, f"cannot be read: {error}", remedy) from error
    else:
        name = "LSB_HOSTS"
        hosts = _text(environ, name).split()
    if not hosts:
        raise _bad(environ, name, "names no machine")
    # One host alone is where the tasks are, too.
    return next((host for host in hosts if host != hosts[0]), hosts[0])


MPI_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Rank, number of ranks, and rank on the machine: Open MPI's names, and MPICH's and Intel's. Slurm
sets the first two of the latter for its own tasks."""

MPI_JOB_VARIABLE = "PMIX_NAMESPACE"
"""Open MPI's name for the run, the same on all its ranks."""


def adopt_mpi(environ: MutableMapping[str, str]) -> None:
    """Set the variables that torchrun would, under ``mpirun`` with several ranks.

    Where they meet is agreed by MPI: the first rank's machine, and a port that is free there. Call
    it before what takes a rank's place from Slurm: that describes mpirun's own daemons.

    Raises:
        HyperslabError: mpi4py is not installed, and nothing says where the ranks meet; or one of
            mpirun's variables is missing or odd.
    """
    if "RANK" in environ:
        return
    found = next(
        (names for names in MPI_RANK_VARIABLES if all(name in environ for name in names)), None
    )
    if found is None and not any(name in environ for name in MPI_RANK_VARIABLES[0]):
        return
    rank, size, local = (_number(environ, name) for name in found or MPI_RANK_VARIABLES[0])
    if size == 1:
        return
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        address, port = _mpi_meeting_place()
        environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    if MPI_JOB_VARIABLE in environ:
        environ.setdefault(RUN_VARIABLE, f"MPI job {environ[MPI_JOB_VARIABLE]}")
    environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))


def adopt_launcher(environ: MutableMapping[str, str]) -> RankVariables | None:
    """Set the variables that torchrun would, if srun, jsrun or mpirun has started this process.

    Return what `read_variables` then reads.

    Raises:
        HyperslabError: one of theirs, or of torchrun's, is missing or odd; names it.
    """
    adopt_lsf(environ)
    adopt_mpi(environ)
    adopt_slurm(environ)
    return read_variables(environ)


def forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Let this process be the only one again, after it was one of several ranks."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", RUN_VARIABLE]
    names += ["SLURM_STEP_NODELIST", *JSRUN_RANK_VARIABLES]
    for name in itertools.chain(names, *MPI_RANK_VARIABLES):
        environ.pop(name, None)


def finish_mpi() -> None:
    """End MPI where it was started, as a rank must that leaves without the interpreter's shutdown.

    Waits for the other ranks; one that does not call it is a failure, for which mpirun ends all.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _mpi_meeting_place() -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HyperslabError(
            f"mpirun started this rank, but did not say where the ranks meet ({error})\n"
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
