"""Ends the ranks of a launcher that was killed, as a process that outlives it.

It is started before the ranks, as the leader of the process group that they and all that they
start belong to, and it imports nothing that takes time. So the ranks are tied to their launcher
from the first instant on, also while they import, hang or are stopped.

Run as a script: ``python -I -S guard.py DESCRIPTOR``, the end of a pipe that only the launcher
has the other end of. When that is closed, because the launcher has ended in whatever way:
SIGTERM to the group, `CHECKPOINT_GRACE` for checkpoints, SIGKILL.
"""

import os
import signal
import sys
import time

CHECKPOINT_GRACE = 7.0  # [s] that ranks have to end after their launcher was killed
PAUSE = 0.1  # [s] between two looks at who is left


def guard(pipe: int) -> None:
    """Wait for the launcher's end, then end its process group, this process with it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.read(pipe, 1)
    os.killpg(0, signal.SIGTERM)
    end = time.monotonic() + CHECKPOINT_GRACE
    while time.monotonic() < end and _others():
        time.sleep(PAUSE)
    os.killpg(0, signal.SIGKILL)


def _others() -> bool:
    """Tell whether any other process of this group is alive; True where the system does not say."""
    if not os.path.isdir("/proc/self"):
        return True
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, group = file.read().rpartition(b")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(group) == os.getpgrp() and state not in (b"Z", b"X"):
            return True
    return False


if __name__ == "__main__":
    guard(int(sys.argv[1]))
