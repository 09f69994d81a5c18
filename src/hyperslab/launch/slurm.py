"""Ranks that Slurm's `srun` has started: the variables from which `torch.distributed` starts."""

from __future__ import annotations

import re
from collections.abc import MutableMapping


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """Under ``srun`` with several tasks, set the variables that torchrun would."""
    if "RANK" in environ or "SLURM_STEP_NODELIST" not in environ:
        return  # a batch script has some of Slurm's variables too, but is no rank
    ranks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if ranks == "1":
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = ranks
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ.setdefault("MASTER_ADDR", first_host(environ["SLURM_STEP_NODELIST"]))
    job = int(environ.get("SLURM_JOB_ID", "0"))
    environ.setdefault("MASTER_PORT", str(20000 + job % 10000))


def first_host(nodes: str) -> str:
    """The first name in Slurm's list of nodes.

    >>> first_host("gpu[007-012,020],login1")
    'gpu007'
    """
    match = re.match(r"([^,\[]*)(?:\[([^-,\]]*)[^\]]*\])?([^,]*)", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())
