"""Ranks that Slurm's `srun` has started: the variables from which `torch.distributed` starts."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from hyperslab.comm.start.variables import RUN, whole_number
from hyperslab.errors import HyperslabError

NEEDED = ("SLURM_PROCID", "SLURM_LOCALID")

PORTS = range(20000, 30000)
"""Below those that Linux gives to whoever asks for any."""

STRIDE = 97
"""Between the ports of a job's steps: next to each other they would be those of the next jobs."""


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """Under ``srun`` with several tasks, set the variables that torchrun would.

    Job and step give the port, so that two steps that run on one machine do not meet; and the
    words for the run, by which a rank of another one is refused if they do.

    Raises:
        HyperslabError: one of Slurm's is missing or odd; names it.
    """
    if "RANK" in environ or "SLURM_STEP_NODELIST" not in environ:
        return  # a batch script has some of Slurm's variables too, but is no rank
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    ranks = next((whole_number(environ, name) for name in names if name in environ), 1)
    if ranks == 1:
        return
    rank, local = (whole_number(environ, name) for name in NEEDED)
    job, step = (
        whole_number(environ, name) if name in environ else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    address = first_host(environ["SLURM_STEP_NODELIST"])
    if not address:
        nodes = environ["SLURM_STEP_NODELIST"]
        raise HyperslabError(f"SLURM_STEP_NODELIST={nodes!r} names no machine")
    environ["RANK"] = str(rank)
    environ["WORLD_SIZE"] = str(ranks)
    environ["LOCAL_RANK"] = str(local)
    environ.setdefault("MASTER_ADDR", address)
    environ.setdefault("MASTER_PORT", str(port_of(job, step)))
    environ.setdefault(RUN, f"Slurm job {job} step {step}")


def port_of(job: int, step: int) -> int:
    """Where the ranks of a step meet.

    >>> port_of(123456, 0), port_of(123456, 1), port_of(123457, 0)
    (23456, 23553, 23457)
    """
    return PORTS[(job + STRIDE * step) % len(PORTS)]


def first_host(nodes: str) -> str:
    """The first name in Slurm's list of nodes.

    >>> first_host("gpu[007-012,020],login1")
    'gpu007'
    """
    match = re.match(r"([^,\[]*)(?:\[([^-,\]]*)[^\]]*\])?([^,]*)", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())
