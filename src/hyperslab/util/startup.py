"""Prepares the process of a command, or a server of workers, before anything slow is imported.

It uses the standard library alone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PARENT = os.getppid()  # the process that started this one, while it was there


TIED_TO = "HYPERSLAB_TIED_TO"
"""Names the process, in a worker server's environment, that both end with."""

PR_SET_PDEATHSIG = 1

FOLDER_GONE = "the current folder has been removed\n    change to one that is there"


def tie_to_parent(number: int) -> None:
    """Ask Linux for this signal when the parent of this process ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _tie_server_to_parent() -> None:
    """End the server, and all that it forks from now on, when its parent ends."""
    tie_to_parent(signal.SIGKILL)
    os.register_at_fork(after_in_child=lambda: tie_to_parent(signal.SIGKILL))
    if os.environ[TIED_TO] != str(os.getppid()):  # too late to be told
        os._exit(1)


def say_stopped(number: int) -> None:
    """Print the one line of a command that a signal ends, such as Ctrl-C.

    The error output of ranks goes to files: the main one speaks on its standard output.
    """
    rank = os.environ.get("RANK")
    stream = sys.stdout if rank == "0" else sys.stderr
    try:
        print(f"stopped by {signal.Signals(number).name}", file=stream, flush=True)
    except (OSError, RuntimeError):  # nobody reads it, or the signal came while something printed
        return


def fill_standard_descriptors() -> None:
    """Open the null device in place of each standard stream that is closed.

    The next pipe or file would get its number, and code that takes that for the stream would close
    it, or read and write there. Python has None for such a stream.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        os.set_inheritable(nowhere, True)
        nowhere = os.open(os.devnull, os.O_RDWR)
    os.close(nowhere)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def leave_out_current_folder() -> None:
    """Take the current folder off the path: `python -m` puts it there, or an odd PYTHONPATH.

    It may be somebody else's, with a module of a name that a library tries to import. Python
    processes that this one starts leave it out, too. It stays where hyperslab itself lies in it.
    """
    own = str(Path(__file__).resolve().parents[2])
    try:
        here = os.getcwd()  # without links
    except FileNotFoundError:
        sys.exit(f"error: {FOLDER_GONE}")
    if own != here:
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
        os.environ["PYTHONSAFEPATH"] = "1"


@contextmanager
def away_from_current_folder() -> Iterator[None]:
    """Import a library that reads its settings from the current folder, as matplotlib does."""
    here = os.open(os.curdir, os.O_RDONLY)
    try:
        os.chdir(os.path.dirname(__file__))
        yield
    finally:
        os.fchdir(here)
        os.close(here)


COMMAND_PROCESSES: set[int] = set()
"""Holds this process where it runs a command, and those that it was forked from."""


def is_command() -> bool:
    """Tell whether this process runs a command of hyperslab, and is no program of somebody's."""
    return os.getpid() in COMMAND_PROCESSES


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names torch's variables for the memory of devices: the present one and the one before."""


def begin_command() -> None:
    """Prepare the process of a command, before it imports.

    Its streams may be closed, its current folder somebody else's, and Ctrl-C may come meanwhile.
    Unless the user has said how torch takes a GPU's memory, it does so in segments that grow: a
    block of another size then leaves no hole.
    """
    COMMAND_PROCESSES.add(os.getpid())
    if not {*ALLOCATOR} & os.environ.keys():
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    fill_standard_descriptors()
    leave_out_current_folder()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until `hyperslab.cli.main` begins: an interrupted import would print a traceback.
        signal.signal(signal.SIGINT, exit_on_signal)
    # Python ends with the system's handlers, by which one more Ctrl-C would be another exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # A rank may wait for others where no handler runs; what started it says why it ended.
    if "RANK" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, exit_on_signal)


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Say which signal ends this process, and end it at once with the exit code of a shell."""
    signal.signal(number, signal.SIG_IGN)  # one more would say it once more
    say_stopped(number)
    os._exit(128 + number)


# The server of `hyperslab.util.worker_pool` imports this module first, in a process of its own.
if TIED_TO in os.environ and "multiprocessing.forkserver" in sys.modules:
    _tie_server_to_parent()
