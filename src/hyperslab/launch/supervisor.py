"""Starts the ranks of one machine, watches them, passes signals on, and ends them all.

In reading order: `MemoryFile`, a file without a name, which nothing can leave behind; the ranks'
environment; `ProcessGroup`, which does not outlive the process that made it; `RankProcess`, the
process of one rank as its launcher sees it; `Supervisor`; `launch`, which puts them together.
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from hyperslab.comm.launchers import STORE_VARIABLE, TORCHRUN_VARIABLE
from hyperslab.errors import HyperslabError, LayoutError, RecipeError, system_errors_as
from hyperslab.launch import failures, guard
from hyperslab.launch.forked import ForkedRank, can_fork
from hyperslab.launch.guard import PAUSE
from hyperslab.util.free_memory import free_memory
from hyperslab.util.signals import StopRequest
from hyperslab.util.startup import PARENT, tie_to_parent


class MemoryFile:
    """Keeps a file in memory, for this process and those that inherit its ``descriptor``.

    They open it as ``path``. Other users of the machine cannot. Outside Linux it is a temporary
    file of this user's, which has a name for as long as this process lives.

    Raises:
        OSError: the system has no memory or no descriptor for it.
    """

    def __init__(self) -> None:
        self._file: Any
        if sys.platform == "linux":
            self._file = os.fdopen(os.memfd_create("hyperslab"), "r+b")
            self.path = f"/proc/self/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="hyperslab-")  # noqa: SIM115 - see close
            self.path = self._file.name
        self.descriptor: int = self._file.fileno()

    def read(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    @property
    def changed(self) -> int:
        """Return when it was written last [ns since the epoch]."""
        return os.fstat(self.descriptor).st_mtime_ns

    def close(self) -> None:
        self._file.close()


LAUNCHER_VARIABLE = "HYPERSLAB_LAUNCHER"
"""Names the process, in a rank's environment, that started it."""

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file where torch's `record` writes what a rank raised."""

RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Counts how often the ranks were started before, as torchrun does."""


def cores_here() -> int:
    """Count the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def devices_environment(devices: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows these CUDA devices alone, by their numbers here.

    It is not needed where there is one device, or fewer than that.
    """
    import torch

    count = torch.cuda.device_count()
    if count < 2 or max(devices) >= count:
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(names.split(",")[at] for at in devices)}


def shared_environment(environ: Mapping[str, str], ranks: int, store: str) -> dict[str, str]:
    """Return the variables of all ranks of a launch: an equal part of the cores, and each other.

    They meet in the file ``store`` and talk over the loopback, whatever interface ``environ`` names
    for ranks on several machines: nobody else can reach them.
    """
    shared = {name: value for name, value in environ.items() if name != TORCHRUN_VARIABLE}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cores_here() // ranks)))
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        shared["GLOO_SOCKET_IFNAME"] = loopback[0]
        shared["NCCL_SOCKET_IFNAME"] = f"={loopback[0]}"
    shared[LAUNCHER_VARIABLE] = str(os.getpid())
    shared[STORE_VARIABLE] = store
    shared["WORLD_SIZE"] = str(ranks)
    shared["LOCAL_WORLD_SIZE"] = str(ranks)
    return shared


class ProcessGroup:
    """Start a group led by a guard, which ends it when this process has ended, in whatever way.

    ``id`` is its number. The terminal's signals do not reach it.

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


class RankProcess:
    """Starts a rank, in a process group that it belongs to before it does anything.

    ``stopped`` is since when (`time.monotonic`) it is stopped by SIGSTOP or the like.
    ``overdue`` is why it was killed from here, "" if it was not. Its error output goes into
    ``folder``, and all that it writes if it is to be ``silent``. It inherits ``store``. It is a
    fork of this process, if it is to be ``forked``, or an interpreter of its own.

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
        forked: bool,
    ) -> None:
        self.rank = rank
        self.stopped: float | None = None
        self.overdue = ""
        with ExitStack() as files:
            with system_errors_as(RecipeError, f"cannot write into output {folder.parents[2]}"):
                folder.mkdir(parents=True, exist_ok=True)
                errors = files.enter_context((folder / "stderr.log").open("wb")).fileno()
                output = 1
                if silent:
                    output = files.enter_context((folder / "stdout.log").open("wb")).fileno()
            with system_errors_as(HyperslabError, f"cannot start rank {rank}"):
                self._report = MemoryFile()
                own = {ERROR_FILE_VARIABLE: self._report.path}
                nothing = files.enter_context(open(os.devnull, "rb")).fileno()
                self._process = (ForkedRank if forked else subprocess.Popen)(
                    [sys.executable, *arguments],
                    env={**environment, **own},
                    stdin=nothing,
                    stdout=output,
                    stderr=errors,
                    pass_fds=(store.descriptor, self._report.descriptor),
                    process_group=group,
                )

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

    def end(self) -> failures.RankEnd:
        """Wait for its end and return how it ended."""
        exitcode = self._process.wait()
        said = failures.error_said(self._report.read())
        when = self._report.changed if said else time.time_ns()
        self._report.close()
        return failures.RankEnd(self.rank, self._process.pid, exitcode, said, when, self.overdue)


SETTLE = 2.0  # [s] that the others have to end, and say what they saw, after one failed
AFTER_TERM = 5.0  # [s] that they have after SIGTERM


class Supervisor:
    """Starts ranks, passes signals on to them, and waits until all have ended.

    ``limit`` [s] is how long a rank may be stopped; ``patience`` [s] how long the ranks have to end
    after a signal, or after one of them has ended because of one. The signals are those of
    ``stop``.

    ``ends`` is how each one ended, by rank.
    """

    def __init__(self, stop: StopRequest, *, limit: float, patience: float) -> None:
        self.limit = limit
        self.patience = patience
        self.ranks: list[RankProcess] = []
        self.ends: dict[int, failures.RankEnd] = {}
        self._stop = stop
        self._passed = 0  # signals that the ranks have got
        self._ordered = math.inf  # when the first one ended in order, or a signal came
        self._broken = math.inf  # when the first one failed
        self._told = False  # all have got SIGTERM

    @property
    def signal(self) -> int:
        """Return the first signal that came to this process, or 0."""
        return next(iter(self._stop.arrived), 0)

    def run(
        self,
        arguments: Sequence[str],
        folders: Sequence[Path],
        *,
        silent: bool,
        environments: Sequence[Mapping[str, str]] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> Iterator[None]:
        """Run ``python arguments...`` on one rank a folder, where its output goes.

        It yields while they run, so that one thread can have several launches under way; closed
        before their end, it kills them. They are all ranks in ``environ``, or have ``environments``
        that say what they are.

        Raises:
            RecipeError: a folder cannot be written.
            HyperslabError: a process cannot be started.
        """
        with ExitStack() as stack:
            with system_errors_as(HyperslabError, "cannot start ranks"):
                group = ProcessGroup()
                stack.callback(group.close)
                store = stack.enter_context(closing(MemoryFile()))
            stack.callback(self._kill_all)
            if not environments:
                shared = shared_environment(environ, len(folders), store.path)
                numbers = map(str, range(len(folders)))
                environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in numbers]
            forked = arguments[0] == "-m" and can_fork()
            if forked and [*arguments[:3]] == ["-m", "hyperslab", "train"]:
                from hyperslab.util.torch_internals import import_compiler

                import_compiler()  # as every rank would
            for rank, own in enumerate(environments):
                process = RankProcess(
                    rank,
                    arguments,
                    own,
                    folder=folders[rank],
                    group=group.id,
                    store=store,
                    silent=silent,
                    forked=forked,
                )
                self.ranks.append(process)
            while self._look():
                group.keep_guarded()
                self._press()
                yield

    def _look(self) -> bool:
        """Pass signals on, and note who has ended, and how; returns whether anybody is left."""
        now = time.monotonic()
        for number in self._stop.arrived[self._passed :]:
            self._passed += 1
            self._send(number)
        for rank in self.ranks:
            if rank.alive:
                rank.look()
            elif rank.rank not in self.ends:
                end = self.ends[rank.rank] = rank.end()
                if end.exitcode in failures.STOPPED_EXIT_CODES:
                    self._ordered = min(self._ordered, now)
                elif end.exitcode != 0:
                    self._broken = min(self._broken, now)
        if self.signal:
            self._ordered = min(self._ordered, now)
        return len(self.ends) < len(self.ranks)

    def _press(self) -> None:
        """End those that are frozen, and all where it is time."""
        now = time.monotonic()
        for rank in self._alive():
            if rank.stopped is not None and now - rank.stopped > self.limit:
                rank.kill(f"it has been stopped for {self.limit:g} s")
        deadline = min(self._ordered + self.patience, self._broken + SETTLE)
        if now > deadline and not self._told:
            self._send(signal.SIGTERM)
            self._told = True
        if now > deadline + AFTER_TERM:
            for rank in self._alive():
                rank.kill("it is stopped" if rank.stopped is not None else "it did not end")

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.alive and not rank.overdue]

    def _send(self, number: int) -> None:
        for rank in self._alive():
            rank.send(number)

    def _kill_all(self) -> None:
        """End what is left, whatever went wrong here."""
        for rank in self.ranks:
            if rank.rank not in self.ends:
                rank.send(signal.SIGKILL)
                self.ends[rank.rank] = rank.end()


PATIENCE = 60.0  # [s] that ranks that write no checkpoint have to end after a signal


def finish(work: Iterator[None]) -> None:
    """Do the whole of what yields while it waits, such as `Supervisor.run`."""
    for _ in work:
        time.sleep(PAUSE)


LEAST_OF_A_RANK = 32 << 20
"""Memory [B] that every rank takes, beside what it shares with the launcher."""


def launch(
    ranks: int,
    arguments: Sequence[str],
    logs: Path,
    *,
    limit: float,
    patience: float = PATIENCE,
) -> None:
    """Run ``python arguments...`` on so many ranks of this machine until all have ended.

    Raises what `launching` does.
    """
    with StopRequest().listening() as stop:
        finish(launching(ranks, arguments, logs, stop, limit=limit, patience=patience))


def launching(
    ranks: int,
    arguments: Sequence[str],
    logs: Path,
    stop: StopRequest,
    *,
    limit: float,
    patience: float = PATIENCE,
    silent: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """Run ``python arguments...`` on so many ranks of this machine, and yield until all have ended.

    The ranks write to this terminal; their error output goes into ``logs``, one file a rank, and
    if it is to be ``silent`` all that they write. They share this machine's cores, meet in memory
    that only they have, and talk over the loopback. Where this process is a command without threads
    and without CUDA they are its forks, and import nothing again.

    The signals that ``stop`` notes are passed on to them; then they have ``patience`` [s] to end.
    When one fails, the others are ended, and killed if they do not; so is one that has been stopped
    (SIGSTOP) for longer than ``limit`` [s]. However this process ends, the ranks do within seconds:
    see `guard`.

    Raises:
        Stopped: a signal ended the ranks.
        LayoutError: so many cannot be on one machine.
        CommError: a rank was killed or hung; names it and quotes the last lines that it wrote.
        HyperslabError: what the first rank that failed raised.
        RecipeError: ``logs`` cannot be written.
    """
    stop.check()
    if sys.platform == "linux" and ranks * LEAST_OF_A_RANK > (free := free_memory()):
        raise LayoutError(
            f"{ranks} ranks do not fit into the {free / 2**30:.1f} GiB of this machine that are "
            "free\n    use a smaller grid, or start them on several machines by srun or torchrun"
        )
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{os.getpid()}"
    folders = [logs / name / str(rank) for rank in range(ranks)]
    supervisor = Supervisor(stop, limit=limit, patience=patience)
    yield from supervisor.run(arguments, folders, silent=silent, environ=environ)
    failed = {rank: end for rank, end in supervisor.ends.items() if end.exitcode != 0}
    said = any(end.explained and not end.lost_contact for end in failed.values())
    if supervisor.signal and failed and not said:
        raise failures.stopped_error(supervisor.signal, failed)
    if failed:
        output = {rank: folder / "stderr.log" for rank, folder in enumerate(folders)}
        raise failures.explain_failures(failed, output)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM if the process that started this rank dies without a word.

    It may have died before it could be asked.
    """
    tie_to_parent(signal.SIGTERM)
    launcher = None if TORCHRUN_VARIABLE in os.environ else os.environ.get(LAUNCHER_VARIABLE)
    if (launcher or str(PARENT)) != str(os.getppid()):
        signal.raise_signal(signal.SIGTERM)
