"""Headers of HDF5 files, read by a child process first, which may hang or crash without harm.

Bytes that are damaged, or made so, can have HDF5 walk in circles for ever, or crash. Nothing ends a
call of a library within a process, and nothing cheap tells beforehand. So a child goes through the
header of each file of a scan, and says no more than that it came back: a fork a scan, and a byte
and a second look a file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Self, TypeVar

from h5py._objects import phil

from hyperslab.errors import DataError

T = TypeVar("T")

HEADER_LIMIT = 30.0
"""What a header may take [s]: a file system may be slow, too."""


class HeaderChild(Generic[T]):
    """Calls ``read`` of a file's name, after a child process has come back from that."""

    def __init__(self, read: Callable[[str], T], limit: float = HEADER_LIMIT) -> None:
        self.read = read
        self.limit = limit
        self._child = 0
        self._asked = -1
        self._answers = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, file: str) -> T:
        """What ``read`` returns; it may raise, too.

        Raises:
            DataError: it does not come back in time, or ends the process.
        """
        if "mpi4py.MPI" not in sys.modules:  # whose transports do not all bear a fork
            self._try(file)
        return self.read(file)

    def _try(self, file: str) -> None:
        if not self._child:
            self._start()
        with suppress(BrokenPipeError):  # then there will be no answer
            os.write(self._asked, json.dumps(file).encode() + b"\n")
        ready, _, _ = select.select([self._answers], [], [], self.limit)
        if not ready:
            self._end()
            raise DataError(
                f"{file}: HDF5 has not come back from its header in {self.limit:g} s: it is "
                "damaged, or its disk is very slow\n    look at it with h5dump, or take it away"
            )
        if not os.read(self._answers, 1):
            raise DataError(
                f"{file}: HDF5 crashes on its header ({self._end()}): it is damaged\n"
                "    take it away"
            )

    def _start(self) -> None:
        theirs, self._asked = os.pipe()
        self._answers, their_answers = os.pipe()
        with phil, warnings.catch_warnings():  # no other thread is within HDF5
            for kind in (DeprecationWarning, RuntimeWarning):  # that there are other threads
                warnings.simplefilter("ignore", kind)
            self._child = os.fork()
        if self._child == 0:
            os.close(self._asked)
            os.close(self._answers)
            _serve(self.read, theirs, their_answers)
        os.close(theirs)
        os.close(their_answers)

    def _end(self) -> str:
        """End the child, if there is one; how it ended."""
        if not self._child:
            return ""
        os.close(self._asked)
        os.close(self._answers)
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"code {code}"


def _serve(read: Callable[[str], object], asked: int, answers: int) -> None:
    """What the child does; it ends with its parent, whose end of the pipe is then closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()  # what a crash would print is not for the user
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(asked) as lines:
            for line in lines:
                with suppress(Exception):  # the parent will see for itself
                    read(json.loads(line))
                os.write(answers, b".")
    finally:
        os._exit(0)
