"""A rank's place, from the environment variables that torchrun, srun and mpirun come down to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hyperslab.errors import HyperslabError

STORE = "HYPERSLAB_STORE"
"""In a rank's environment: the file by which the ranks that `hyperslab` started find each other."""

RUN = "HYPERSLAB_RUN"
"""In a rank's environment: words for the run that it belongs to, the same on all of its ranks."""

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of torchrun's ranks; the launcher of `hyperslab` takes it out of its own."""

VALID_PORTS = range(1, 65536)

GIVEN = ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""By which an error says why another variable is missed."""

_REMEDY = (
    "    torchrun, srun, mpirun and --ranks set what a rank needs; by hand it is RANK,\n"
    "    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
)


@dataclass(frozen=True, slots=True)
class RankVariables:
    """The place of a rank, and where it meets the others."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    store: str | None

    @property
    def where(self) -> str:
        """The words by which an error names the meeting place."""
        if self.store is not None:
            return "the store of their launcher"
        return f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"


def read_variables(environ: Mapping[str, str]) -> RankVariables | None:
    """What the environment says of this rank; None where it says that there is only one.

    Raises:
        HyperslabError: a variable is missing, no number or out of range; names it.
    """
    if "RANK" not in environ:
        if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE", range(1, 1 << 31)) > 1:
            raise _bad(environ, "WORLD_SIZE", "asks for several ranks, but RANK is not set")
        return None
    size = _number(environ, "WORLD_SIZE", range(1, 1 << 31))
    rank = _number(environ, "RANK", range(size), f"of WORLD_SIZE={size} ranks")
    local = 0
    if "LOCAL_RANK" in environ:
        local = _number(environ, "LOCAL_RANK", range(size), f"of WORLD_SIZE={size} ranks")
    if STORE in environ and TORCHRUN not in environ:  # or a rank has started torchrun
        return RankVariables(rank, size, local, "", 0, environ[STORE])
    if size == 1 and "MASTER_PORT" not in environ:  # nobody to meet
        return RankVariables(rank, size, local, "localhost", 0, None)
    port = _number(environ, "MASTER_PORT", VALID_PORTS)
    return RankVariables(rank, size, local, _text(environ, "MASTER_ADDR"), port, None)


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """A variable that has to be a number from 0 on, such as those of Slurm and of MPI.

    Raises:
        HyperslabError: it is not there, or something else; names it.
    """
    return _number(environ, name, range(1 << 32))


def check_thread_count(environ: Mapping[str, str]) -> None:
    """
    Raises:
        HyperslabError: OMP_NUM_THREADS is not a number of threads; OpenMP would take all cores.
    """
    for part in environ.get("OMP_NUM_THREADS", "1").split(","):  # one for each level of nesting
        if not part.strip().isdecimal() or int(part) < 1:
            raise _bad(environ, "OMP_NUM_THREADS", "is no number of threads", "    unset it")


def _number(environ: Mapping[str, str], name: str, allowed: range, of: str = "") -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _bad(environ, name, "is no whole number")
    number = int(text)
    if number not in allowed:
        most = f" to {allowed[-1]}" if allowed.stop < 1 << 31 else " on"
        raise _bad(environ, name, f"is not in the range from {allowed[0]}{most} {of}".rstrip())
    return number


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        others = [n for n in GIVEN if n in environ and n != name]
        given = f", but {others[0]}={environ[others[0]]} is" if others else ""
        raise HyperslabError(f"{name} is not set{given}\n{_REMEDY}")
    return text


def _bad(
    environ: Mapping[str, str], name: str, problem: str, remedy: str = _REMEDY
) -> HyperslabError:
    return HyperslabError(f"{name}={environ[name]!r} {problem}\n{remedy}")
