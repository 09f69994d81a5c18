"""Prepares a process before anything slow is imported: its parent, signals, standard streams.

`hyperslab/__init__.py` imports this module first. It uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

PARENT = os.getppid()
"""The process that started this one, while it was there."""


TIED_TO = "HYPERSLAB_TIED_TO"
"""In the environment of a server of worker processes: the process that both end with."""

PR_SET_PDEATHSIG = 1


def tie_to_parent(number: int) -> None:
    """Ask Linux for this signal when the parent of this process ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _tie_server_to_parent() -> None:
    """As the server, and in all that it forks from now on."""
    tie_to_parent(signal.SIGKILL)
    os.register_at_fork(after_in_child=lambda: tie_to_parent(signal.SIGKILL))
    if os.environ[TIED_TO] != str(os.getppid()):  # too late to be told
        os._exit(1)


def say_stopped() -> None:
    """The one line of a command that Ctrl-C ends.

    The error output of ranks goes to files: the main one speaks on its standard output.
    """
    rank = os.environ.get("RANK")
    stream = sys.stdout if rank == "0" else sys.stderr
    try:
        print("stopped by SIGINT", file=stream, flush=True)
    except OSError:  # nobody reads it
        return


def fill_standard_descriptors() -> None:
    """Where a standard stream is closed, let it lead nowhere.

    The next pipe or file would be given its number, and whoever takes that for the stream would
    close it, or read and write there.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        os.set_inheritable(nowhere, True)
        nowhere = os.open(os.devnull, os.O_RDWR)
    os.close(nowhere)


def _is_command() -> bool:
    """Whether this process was started as ``hyperslab`` or ``python -m hyperslab``."""
    words = sys.orig_argv
    module = "-m" in words and words[words.index("-m") + 1 :][:1] == ["hyperslab"]
    return module or os.path.basename(sys.argv[0]) == "hyperslab"


def _exit_on_sigint(_number: int, _frame: FrameType | None) -> None:
    say_stopped()
    os._exit(128 + signal.SIGINT)


if TIED_TO in os.environ and "multiprocessing.forkserver" in sys.modules:
    _tie_server_to_parent()

if _is_command():
    fill_standard_descriptors()
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit_on_sigint)  # until `hyperslab.cli.main` begins: no traceback
