"""Forks commands from a process that has imported everything, instead of importing for seconds.

That process is itself a fork: of a session that has not yet collected its tests, and shares with it
what both import (`command_server`). Inside ``with forked_commands():`` `subprocess` starts
``python -m hyperslab ...`` and programs of ``python -c`` in this way, with their own standard
streams, folder, environment, process group and exit code; everything else is started as ever. The
ranks that such a command starts fork from it in turn. A fork lacks a command line and an
environment of its own in /proc: tests that look there start interpreters, and so do those of the
start itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import settle_server

ROOT = Path(__file__).parent.parent
IMPORTED = (
    *("torch", "torch._dynamo", "torch.profiler", "rich.progress"),
    *("hyperslab.cli.train", "hyperslab.cli.evaluate", "hyperslab.cli.predict"),
    *("hyperslab.cli.convert", "hyperslab.launch.crew", "hyperslab.launch.restarts"),
    *("hyperslab.train.run", "hyperslab.train.evaluate", "hyperslab.train.predict"),
    *("hyperslab.formats.convert.scans", "hyperslab.formats.nifti.source"),
)
"""What commands import, most of it when they run."""

LONGEST = 1 << 17  # [B] of a request
COMMAND = [sys.executable, "-m", "hyperslab"]
PROGRAM = [sys.executable, "-c"]
LAUNCHER_VARIABLE = "HYPERSLAB_LAUNCHER"  # in the environment of ranks


@dataclass(frozen=True)
class Start:
    """How a command is to be started; descriptors beyond the streams keep their numbers."""

    words: list[str]  # all but the interpreter's name
    folder: str
    environment: dict[str, str]
    descriptors: list[int]  # their numbers in the command: 0, 1, 2 and those that are passed on
    group: int | None  # None: that of this process; 0: a new one
    session: bool


class ForkedPopen(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose ``python -m hyperslab`` is forked by `fork`."""

    status: socket.socket | None = None  # says how it ended; None: it is a child of this process

    def fork(self, start: Start, given: list[int]) -> int:
        """Start the command with these descriptors; its process id."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(command_server().address)
        socket.send_fds(connection, [pickle.dumps(start)], given)
        self.status = connection
        return int(connection.recv(64))

    def may_fork(self, environment: Any) -> bool:
        """Ranks have to be children of their launcher, which this process then is."""
        return LAUNCHER_VARIABLE not in (environment or ())

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (
            executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, session, group,
        ) = rest  # fmt: skip
        words = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
        is_known = words[:3] == COMMAND or words[:2] == PROGRAM
        if not is_known or executable or preexec_fn or shell or not self.may_fork(env):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        streams = [p2cread, c2pwrite, errwrite]
        given = [own if stream == -1 else stream for own, stream in enumerate(streams)]
        start = Start(
            words[1:],
            os.path.abspath(cwd or os.curdir),
            dict(os.environ if env is None else env),
            [0, 1, 2, *pass_fds],
            None if group == -1 else group,
            session,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = self.fork(start, [*given, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self.status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        if wait_flags & os.WNOHANG and not select.select([self.status], [], [], 0)[0]:
            return 0, 0
        said = self.status.recv(64)
        self.status.close()
        return self.pid, int(said or signal.SIGKILL)

    def _internal_poll(self, _deadstate: int | None = None, **others: Any) -> int | None:
        if self.status is None:
            return super()._internal_poll(_deadstate, **others)  # type: ignore[misc]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


class RankPopen(ForkedPopen):
    """Inside a command: its ranks are its own children."""

    def may_fork(self, environment: Any) -> bool:
        return True

    def fork(self, start: Start, given: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            become(start, given)
        if start.group is not None:  # before anybody looks for it there
            with contextlib.suppress(OSError):
                os.setpgid(pid, start.group)
        return pid


def become(start: Start, given: Sequence[int], client: socket.socket | None = None) -> None:
    """Be that command in this process, which was just forked, and end as it ends."""
    code = 1
    try:
        if start.session:
            os.setsid()
        if start.group is not None:
            os.setpgid(0, start.group)
        if client is not None:
            client.send(str(os.getpid()).encode())
        _settle(start, given)
        code = _run(start.words)
    finally:
        os._exit(code)


def _settle(start: Start, given: Sequence[int]) -> None:
    """Streams, signals, folder and environment are those of a process that was just started."""
    high = [_above(descriptor, 3 + max(start.descriptors)) for descriptor in given]
    for descriptor, number in zip(high, start.descriptors, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in start.descriptors:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for number in (*signal.Signals,):
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    # What this process has said stays unsaid here: the old streams are neither flushed nor closed.
    KEPT.append((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    for entry in reversed(start.environment.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)
    if "PYTHONSAFEPATH" not in start.environment:
        sys.path.insert(0, start.folder)
    _settle_modules()


KEPT: list[object] = []


def _above(descriptor: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, least)


def _settle_modules() -> None:
    """What modules have read of the process that imported them."""
    import torch

    from hyperslab.launch import supervisor
    from hyperslab.util import startup

    startup.PARENT = supervisor.PARENT = os.getppid()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    subprocess.Popen = RankPopen  # type: ignore[misc]


def _run(words: list[str]) -> int:
    """Run the command line as ``python -m`` or ``python -c`` does; its exit code."""
    code: object = 1
    kind, what, *arguments = words
    sys.argv = [what if kind == "-m" else kind, *arguments]
    sys.orig_argv = [sys.executable, *words]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return int(code or 0) & 255  # type: ignore[call-overload]


@dataclass(frozen=True)
class Server:
    address: str
    end: Callable[[], None]


@functools.cache
def command_server() -> Server:
    """Fork the server of commands from this process, which then has to be without threads of torch.

    It imports what commands need, unless this process has, when it is first asked.
    """
    address = os.path.join(tempfile.mkdtemp(prefix="forked-"), "socket")
    here, until = os.pipe()
    with listening(address) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are other threads
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
                os.dup2(here, 0)
                settle_server([server.fileno()])
                forget_session()
                select.select([server, 0], [], [])
                import_commands()
                gc.freeze()  # collections of commands would look at all of it, and copy its pages
                gc.enable()
                fork_for(server, lambda work, given, who: become(pickle.loads(work), given, who))
            finally:
                os._exit(0)
    os.close(here)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(until)
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)

    return Server(address, end)


def import_commands() -> None:
    for module in IMPORTED:
        __import__(module)


def forget_session() -> None:
    """Leave out where pytest looks for modules, and how."""
    places = {ROOT, ROOT / "benchmarks", Path(sys.executable).parent}
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry) not in places]
    sys.meta_path[:] = [m for m in sys.meta_path if not type(m).__module__.startswith("_pytest")]


def listening(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address)
    server.listen(64)
    return server


def fork_for(
    server: socket.socket, child: Callable[[bytes, list[int], socket.socket], object]
) -> None:
    """Call ``child`` in a fork for each request, with its descriptors and the connection of who
    asks, who is told the status when it has ended; until the standard input is closed."""
    ended, wake = os.pipe()
    for descriptor in (ended, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready = select.select([0, server, ended], [], [])[0]
        if server in ready:
            connection, _ = server.accept()
            request, given, *_ = socket.recv_fds(connection, LONGEST, 64)
            pid = os.fork()
            if pid == 0:
                child(request, given, connection)
            for descriptor in given:
                os.close(descriptor)
            waiting[pid] = connection
        if ended in ready:
            os.read(ended, 4096)
            _say_ended(waiting)
        if 0 in ready:
            return


def _say_ended(waiting: dict[int, socket.socket]) -> None:
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = waiting.pop(pid)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            connection.send(str(status).encode())
        connection.close()


@contextlib.contextmanager
def forked_commands() -> Iterator[None]:
    """Let `subprocess` fork commands of hyperslab."""
    command_server()
    original = subprocess.Popen
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = original  # type: ignore[misc]
