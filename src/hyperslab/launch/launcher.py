"""Start the ranks of one machine and end them all."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from hyperslab.beginning import PARENT, tie_to_parent
from hyperslab.comm.start.variables import TORCHRUN
from hyperslab.launch.environment import LAUNCHER
from hyperslab.launch.failures import explain_failures, stopped
from hyperslab.launch.supervisor import Supervisor

PATIENCE = 60.0
"""How long [s] ranks that write no checkpoint have to end after a signal."""


def launch(
    ranks: int,
    arguments: Sequence[str],
    logs: Path,
    *,
    limit: float,
    patience: float = PATIENCE,
    silent: bool = False,
) -> None:
    """Run ``python arguments...`` on so many ranks of this machine until all have ended.

    The ranks write to this terminal; their error output goes into ``logs``, one file a rank, and
    if it is to be ``silent`` all that they write. They share this machine's cores, meet in memory
    that only they have, and talk over the loopback.

    The signals of `hyperslab.train.step` are passed on to them; then they have
    ``patience`` [s] to end. When one fails, the others are ended, and killed if they do not; so is
    one that has been stopped (SIGSTOP) for longer than ``limit`` [s]. However this process ends,
    the ranks do within seconds: see `guard`.

    Raises:
        Stopped: a signal ended the ranks.
        CommError: a rank was killed or hung; names it and quotes the last lines that it wrote.
        HyperslabError: what the first rank that failed raised.
        RecipeError: ``logs`` cannot be written.
    """
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{os.getpid()}"
    folders = [logs / name / str(rank) for rank in range(ranks)]
    supervisor = Supervisor(limit=limit, patience=patience)
    supervisor.run(arguments, folders, silent=silent)
    failed = {rank: end for rank, end in supervisor.ends.items() if end.exitcode != 0}
    said = any(end.explained and not end.lost_contact for end in failed.values())
    if supervisor.signal and failed and not said:
        raise stopped(supervisor.signal, failed)
    if failed:
        output = {rank: folder / "stderr.log" for rank, folder in enumerate(folders)}
        raise explain_failures(failed, output)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM if the process that started this rank dies without a word.

    It may have died before it could be asked.
    """
    tie_to_parent(signal.SIGTERM)
    launcher = None if TORCHRUN in os.environ else os.environ.get(LAUNCHER)
    if (launcher or str(PARENT)) != str(os.getppid()):
        signal.raise_signal(signal.SIGTERM)
