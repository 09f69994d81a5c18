"""Forks ranks from a command that has imported what they need, in place of starting interpreters.

An import of torch and of hyperslab takes seconds of a core, on every rank and at every restart. The
launcher has done it already, so a fork of it is a rank at once. A fork is only as good as the
process that forks: threads do not come along, nor does CUDA. So `can_fork` looks first, and where
anything but the command itself runs, `subprocess` starts interpreters as ever.

In reading order: whether to fork; `ForkedRank`, the child as its launcher sees it; what the child
does to be as a process that was just started.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hyperslab.util import startup

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Names drivers of NVIDIA, AMD and WSL: a fork of a process that has asked them is broken."""


def can_fork() -> bool:
    """Tell whether a fork of this process would be sound: a command that runs no threads.

    OpenBLAS has threads from its import on, but stops them before a fork, and starts them anew.
    """
    if sys.platform != "linux" or not startup.is_command():
        return False
    if threading.active_count() > 1 or any(map(os.path.exists, GPU_DRIVERS)):
        return False
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # no process left, which the start of the ranks will say
        return False


class ForkedRank:
    """Forks a process that runs ``python -m ...``, with the arguments of `subprocess.Popen`.

    Raises:
        OSError: the system has no process left.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        process_group: int,
    ) -> None:
        self._exitcode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would write it as well
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                streams = (stdin, stdout, stderr)
                _be_rank(command, env, streams, pass_fds, process_group, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Child and launcher both do it: neither may look before it is done.
        os.setpgid(self.pid, process_group)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, flags: int) -> int | None:
        if self._exitcode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self._exitcode = os.waitstatus_to_exitcode(status)
        return self._exitcode


def _be_rank(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: tuple[int, int, int],
    kept: Sequence[int],
    group: int,
    mask: set[int],
) -> NoReturn:
    """Run a rank in this process, which was just forked, and end as it ends.

    Nothing of the launcher is unwound or closed: its frames stay below until the end.
    """
    code = 1
    try:
        os.setpgid(0, group)  # the launcher says what is wrong
    except OSError:
        os._exit(code)
    try:
        _reset_signals()
        _take_descriptors(streams, kept)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what comes may speak in its own stream
        os.environ.clear()
        os.environ.update(environment)
        _show_environment(environment)
        _reset_libraries()
        code = _run_module(command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _reset_signals() -> None:
    """Handle signals as an interpreter does from its start on: what is ignored stays so."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_descriptors(streams: tuple[int, int, int], kept: Sequence[int]) -> None:
    """Put the streams in place, and the null device in place of what is the launcher's alone.

    Closed numbers would be given to new files, which objects of the launcher could then close.
    """
    for number, stream in enumerate(streams):
        if stream != number:
            os.dup2(stream, number)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if (
            number > 2
            and number not in (*kept, nowhere)
            and os.path.exists(f"/proc/self/fd/{number}")
        ):
            try:
                os.dup2(nowhere, number, inheritable=False)
            except OSError:  # inherited, and beyond the limit of numbers, so no file will get it
                os.close(number)


def _show_environment(environment: Mapping[str, str]) -> None:
    """Write the environment where the system shows it (`ps e`, /proc), a rank's own words first.

    The C library holds copies of all by now, so nothing reads what is there.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[47:49])
    words = sorted(environment.items(), key=lambda item: "RANK" not in item[0])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in words)
    if 0 < begin < end:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0")[: end - begin], end - begin)


def _reset_libraries() -> None:
    """Have libraries do what they do in a process of their own.

    Collections of garbage leave out what the launcher has imported: to look at all of it takes a
    fifth of a second, and copies its pages.
    """
    import torch

    gc.freeze()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all ranks would draw the same


def _run_module(command: Sequence[str]) -> int:
    """Run ``python -m module words...``; returns the exit code."""
    _, option, module, *words = command
    assert option == "-m"
    sys.argv = [module, *words]
    sys.orig_argv = [*command]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0) & 0xFF
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
