"""The process of one rank, as its launcher sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hyperslab.errors import HyperslabError, RecipeError, reason
from hyperslab.launch.environment import rank_environment
from hyperslab.launch.failures import RankEnd, error_said
from hyperslab.memory_file import MemoryFile


class RankProcess:
    """Starts a rank, in a process group that it belongs to before it does anything.

    ``stopped`` is since when (`time.monotonic`) it is stopped by SIGSTOP or the like.
    ``overdue`` is why it was killed from here, "" if it was not. Its error output goes into
    ``folder``, and all that it writes if it is to be ``silent``. It inherits ``store``.

    Raises:
        RecipeError: the folder cannot be written.
        HyperslabError: the system has no process or no descriptor left.
    """

    def __init__(
        self,
        rank: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path,
        group: int,
        store: MemoryFile,
        silent: bool,
    ) -> None:
        self.rank = rank
        self.stopped: float | None = None
        self.overdue = ""
        with ExitStack() as files:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                errors = files.enter_context((folder / "stderr.log").open("wb"))
                output = files.enter_context((folder / "stdout.log").open("wb")) if silent else None
            except OSError as error:
                run = folder.parents[2]
                raise RecipeError(f"cannot write into output {run}: {reason(error)}") from None
            try:
                self._report = MemoryFile()
                self._process = subprocess.Popen(
                    [sys.executable, *arguments],
                    env=rank_environment(environment, rank, self._report.path),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    pass_fds=(store.descriptor, self._report.descriptor),
                    process_group=group,
                )
            except OSError as error:
                raise HyperslabError(f"cannot start rank {rank}: {reason(error)}") from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def look(self) -> None:
        """Note whether the process has been stopped or continued."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with suppress(ChildProcessError):  # it has ended
            while (change := os.waitid(os.P_PID, self._process.pid, flags)) is not None:
                continued = change.si_code == os.CLD_CONTINUED
                self.stopped = None if continued else time.monotonic()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self, why: str) -> None:
        self.overdue = why
        self.send(signal.SIGKILL)

    def end(self) -> RankEnd:
        """How it ended; waits for that."""
        exitcode = self._process.wait()
        said = error_said(self._report.read())
        when = self._report.changed if said else time.time_ns()
        self._report.close()
        return RankEnd(self.rank, self._process.pid, exitcode, said, when, self.overdue)
