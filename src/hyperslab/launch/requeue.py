"""Putting a Slurm job back into the queue when its time is over."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from hyperslab.errors import RecipeError, Stopped, reason

TIME_IS_OVER = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
"""Exit codes of a command that Slurm's ``--signal`` has ended."""

SCONTROL_LIMIT = 60.0
"""How long [s] `scontrol` may take."""

log = logging.getLogger("hyperslab")


@contextmanager
def requeue_when_stopped(wanted: bool) -> Iterator[None]:
    """If ``wanted``, put this job back into the queue where SIGUSR1 or SIGUSR2 ended the work.

    Of several ranks that Slurm started the main one does it.

    Raises:
        RecipeError: it is wanted, but this is no job of Slurm, or `scontrol` is not there.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if wanted and not job:
        raise RecipeError("--requeue: this is no job of Slurm (SLURM_JOB_ID is not set): omit it")
    if wanted and shutil.which("scontrol") is None:
        raise RecipeError(
            "--requeue needs Slurm's command `scontrol`, which is not to be found here\n"
            f"    omit it, and let the batch script ask for exit code {TIME_IS_OVER[0]}"
        )
    try:
        yield
    except Stopped as stopped:
        if wanted and stopped.code in TIME_IS_OVER and os.environ.get("RANK", "0") == "0":
            _requeue(job)
        raise


def _requeue(job: str) -> None:
    """The work is saved, whatever comes of this: what goes wrong is only said."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SCONTROL_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s: %s", " ".join(command), reason(error))
        return
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        log.warning("%s: %s", " ".join(command), said or f"exit code {done.returncode}")
    else:
        log.info("job %s is in the queue again", job)
