"""A process group that does not outlive the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from hyperslab.launch import guard


class ProcessGroup:
    """A group led by a guard, which ends it when this process has ended, in whatever way.

    ``id`` is its number. It has the terminal's signals not.

    Raises:
        OSError: there is no process or no descriptor left for it.
    """

    def __init__(self) -> None:
        self._watched, self._held = os.pipe()  # nobody else has the end that this process holds
        try:
            self._guard = self._start(0)
        except OSError:
            self._close_pipe()
            raise
        self.id = self._guard.pid

    def keep_guarded(self) -> None:
        """Have a new guard if somebody has killed the last one."""
        if self._guard.poll() is not None:
            with suppress(OSError):  # no process left for it now, or the group has ended
                self._guard = self._start(self.id)

    def close(self) -> None:
        """Kill all that are left in the group, the guard too."""
        with suppress(ProcessLookupError, PermissionError):  # nobody, or zombies of other parents
            os.killpg(self.id, signal.SIGKILL)
        self._guard.wait()
        self._close_pipe()

    def _start(self, group: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self._watched)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._watched,),
            process_group=group,
        )

    def _close_pipe(self) -> None:
        os.close(self._watched)
        os.close(self._held)
