"""Forks the children that read headers from a small process, in place of a session with all tests.

A fork of a session takes up to a tenth of a second of the kernel, for the tables of 1.6 GB of
pages, and a session opens thousands of folders. So one more process is forked before the tests are
collected, and gives children to the session and to all that descends from it. What cannot be
pickled forks as ever, and so does everything in the long run (`tests.conftest`), in commands, and
in tests of the child itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hyperslab.formats import registry
from hyperslab.formats.arrays import hdf5, layouts, open, scan
from hyperslab.formats.arrays.hdf5 import HeaderChild
from tests.forked import LONGEST, fork_for, listening
from tests.ranks import settle_server

T = TypeVar("T")

IMPORTED = registry, layouts, scan
"""What headers are read with, imported before the fork."""


class SmallChild(HeaderChild[T]):
    """A `HeaderChild` that is no child of this process."""

    address = ""
    known: ClassVar[dict[tuple[object, ...], Any]] = {}
    _connection: socket.socket | None = None

    def __call__(self, file: str) -> T:
        """A file that names no other and is as it was has the header that it had."""
        found = os.stat(file)
        version = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        try:
            options = [cell.cell_contents for cell in self.read.__closure__ or ()]
            reading = file, self.read.__code__, *options, *version
            if reading in self.known:
                return self.known[reading]
        except (AttributeError, TypeError):  # no plain function, or options that have no hash
            return super().__call__(file)
        value = super().__call__(file)
        if not any(getattr(option, "referring", ()) for option in options):
            self.known[reading] = value
        return value

    def _start(self) -> None:
        import cloudpickle

        try:
            work = cloudpickle.dumps((self.read, self.limit))
        except Exception:  # objects that cannot be pickled raise all kinds
            work = b""
        if not 0 < len(work) < LONGEST:
            super()._start()
            return
        theirs, self._asked = os.pipe()
        self._answers, their_answers = os.pipe()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(self.address)
        socket.send_fds(self._connection, [work], [theirs, their_answers])
        os.close(theirs)
        os.close(their_answers)
        self._child = int(self._connection.recv(64))

    def _status(self) -> int:
        if self._connection is None:
            return super()._status()
        with self._connection as connection:
            self._connection = None
            return int(connection.recv(64))


def _read(work: bytes, given: list[int], client: socket.socket) -> None:
    """Be the child of who asks, in this process, which was just forked."""
    import cloudpickle

    client.send(str(os.getpid()).encode())
    read, limit = cloudpickle.loads(work)
    hdf5._serve(read, *given, (client.detach(), 0), os.getppid(), limit)


def fork_small_children() -> Callable[[], None]:
    """Let small children look at what this process opens from now on; returns what ends that."""
    SmallChild.address = os.path.join(tempfile.mkdtemp(prefix="headers-"), "socket")
    here, until = os.pipe()
    with listening(SmallChild.address) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are other threads
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
                os.dup2(here, 0)
                settle_server([server.fileno()])
                fork_for(server, _read)
            finally:
                os._exit(0)
    os.close(here)
    open.HeaderChild = SmallChild  # type: ignore[misc]

    def end() -> None:
        open.HeaderChild = HeaderChild  # type: ignore[misc]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(until)
        shutil.rmtree(os.path.dirname(SmallChild.address), ignore_errors=True)

    return end
