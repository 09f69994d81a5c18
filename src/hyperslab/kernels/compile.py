"""Finds the compiled kernels or compiles the C sources in `csrc`, and calls them by ctypes.

A run takes the library that stands when it begins: one that the package was installed with, see
`built_in`, or one that `hyperslab compile` has kept. It never waits for a compiler, so a short run
is not slower with one than without, and its kernels do not change between steps.

In reading order: the system's compiler; the library in the user's cache folder, made once, whole,
by its owner; its functions, loaded once a process and run in parts on several
threads of torch; and what is packed for them.

The sources in C11 work on rows of numbers, ``statistics.c`` on those of channels; they know
neither torch nor Python. Operators fall back to their plain reference for tensors that the C
code does not take, and for all of them where nothing is compiled; rank 0 logs the reason once.
In the environment ``HYPERSLAB_COMPILE=0`` asks for the references; ``1`` compiles at the first
use, for this very processor.

[Note: guest] The compiler is a guest on the machine, see docs/design/0014-fused-kernels.md. It
works in the folder of the sources: where a list of folders in the environment has an empty entry
(``CPATH=/opt/include:``), compilers take headers from the current folder, which may be anybody's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import glob
import logging
import os
import platform
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from hyperslab.errors import HyperslabError, reason, system_errors_as
from hyperslab.kernels.built_in import (
    COMPILERS,
    DIGEST,
    FLAGS,
    SOURCES,
    add_digest,
    built_in_library,
    compiler_command,
    is_whole,
)
from hyperslab.util import torch_internals
from hyperslab.util.private_folders import make_private, user_folder

FOR_THIS_PROCESSOR = ("-march=native", "-mcpu=native")
"""Tried in this order: older compilers for ARM know the second only."""

TIME_LIMIT = 120.0
"""[s] One run of the compiler may take as long."""

SAID_EVERY = 2.0
"""[s] How often the compiler's progress is logged."""

LONGEST_WAIT = 2 * TIME_LIMIT
"""[s] A process may wait as long for others that compile."""

NOT_COMPILED = (
    "they are not compiled here\n    `hyperslab compile` does so: about 10 s, once on a machine"
)
"""Says what is missing where nothing else is wrong."""

GUARD = """
exec 3<&0
(read -r _ <&3; kill -9 0) &
"$@" </dev/null 3<&-
status=$?
trap '' TERM
kill -TERM 0
exit $status
"""
"""Runs a command in a shell that leads a process group.

Its standard input ends when the process that started it ends, in whatever way: then the whole
group is killed. A signal to the command alone would leave those that the command has started, and
so would its own end: the rest of the group goes with it.
"""


class CannotCompile(HyperslabError):
    """Says why nothing can be compiled: there is no compiler, or it failed."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Describes a compiler by its command and its version."""

    command: tuple[str, ...]
    version: str

    def compile(self, sources: Sequence[Path], target: Path) -> None:
        """Makes a shared library of the sources, as many of them at once as there are cores."""
        complaints = []
        for flag in FOR_THIS_PROCESSOR:
            complaint = self._compile_at_once(sources, target, flag)
            if complaint is None:
                return
            complaints.append(complaint)
        raise CannotCompile(f"{shlex.join(self.command)} failed: {complaints[0]}")

    def _compile_at_once(self, sources: Sequence[Path], target: Path, flag: str) -> str | None:
        """Return what a compiler complained of first, if one did."""

        def run(source: Path) -> subprocess.CompletedProcess[str]:
            made = str(target.parent / f"{source.stem}.o")
            return run_guarded([*self.command, *FLAGS, flag, "-c", str(source), "-o", made])

        longest_first = sorted(sources, key=lambda source: -source.stat().st_size)
        done = []
        said = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for task in as_completed([pool.submit(run, source) for source in longest_first]):
                done.append(task.result())
                if time.monotonic() - said > SAID_EVERY and _is_first():
                    said = time.monotonic()
                    log.info("compiling kernels: %d of %d files", len(done), len(sources))
        if all(one.returncode == 0 for one in done):
            objects = [str(target.parent / f"{source.stem}.o") for source in sources]
            done = [run_guarded([*self.command, *FLAGS, flag, *objects, "-o", str(target)])]
        failed = [one.stderr.strip().partition("\n")[0] for one in done if one.returncode != 0]
        return failed[0] if failed else None


def find_compiler() -> Compiler:
    """Finds the compiler of `compiler_command`, with its version."""
    asked = os.environ.get("CC", "").strip()
    try:
        command = compiler_command()
    except ValueError as error:
        raise CannotCompile(f"CC={asked!r} is not a command: {reason(error)}") from error
    if not command:
        raise CannotCompile(f"no C compiler ({asked or ', '.join(COMPILERS)})")
    if os.sep in command[0]:
        command[0] = os.path.abspath(command[0])
    version = run_guarded([*command, "--version"])
    if version.returncode:
        raise CannotCompile(f"{shlex.join(command)} --version failed")
    return Compiler(tuple(command), version.stdout)


def run_guarded(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a compiler, which ends with all that it started when this process ends."""
    with system_errors_as(CannotCompile, command[0]):
        theirs, ours = os.pipe()
    _guards.add(ours)
    try:
        with subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "sh", *command],
            cwd=SOURCES,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        ) as process:
            try:
                out, err = process.communicate(timeout=TIME_LIMIT)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{command[0]} took more than {TIME_LIMIT:.0f} s") from error
    except OSError as error:
        raise CannotCompile(f"{command[0]}: {reason(error)}") from error
    finally:
        _guards.discard(ours)
        os.close(theirs)
        os.close(ours)


_guards: set[int] = set()
"""Holds the pipes of guards at work: a fork that kept one open would keep its compiler alive."""


def _close_guards() -> None:
    while _guards:
        os.close(_guards.pop())


os.register_at_fork(after_in_child=_close_guards)


def processor() -> str:
    """Describes the processor by model and instructions: compiled code depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(told))])


def cached_library(*, compiled: bool = True) -> Path:
    """Returns the library for this compiler and processor, compiled if it is not there.

    Its last bytes are a digest of those before: what was cut or changed is compiled again.
    ``compiled=False`` only looks for it.

    Raises:
        CannotCompile: it is not there, or can be neither compiled nor kept; says why.
    """
    compiler = find_compiler()
    try:
        folder = make_private(user_folder("XDG_CACHE_HOME", "kernels"))
        path = folder / f"{_library_key(compiler)}.so"
        if not _is_whole(path) and not compiled:
            raise CannotCompile(NOT_COMPILED)
        if not _is_whole(path):
            level = logging.INFO if _is_first() else logging.DEBUG
            log.log(level, "compiling kernels, about 10 s, once on this machine: %s", path)
            begin = time.monotonic()
            with _turn_to_compile(path):
                if not _is_whole(path):
                    _compile_library(compiler, path)
            log.log(level, "kernels compiled after %.0f s", time.monotonic() - begin)
    except OSError as error:
        raise CannotCompile(f"{reason(error)}; XDG_CACHE_HOME names another folder") from error
    return path


def _library_key(compiler: Compiler) -> str:
    parts = [*compiler.command, compiler.version, *FLAGS, *FOR_THIS_PROCESSOR, processor()]
    parts.extend(path.read_text() for path in sorted(SOURCES.glob("*.[ch]")))
    return DIGEST("\0".join(parts).encode()).hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    try:
        state = path.lstat()
    except FileNotFoundError:
        return False
    own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
    return own and is_whole(path)


@contextmanager
def _turn_to_compile(path: Path) -> Iterator[None]:
    """Has one process of this user compile on this machine; others wait.

    Those that waited for one that failed do not try the same again, one after the other.
    """
    machine = platform.node()
    with (path.parent / f"{machine}.lock").open("a+", errors="replace") as file:
        before = _content(file)
        if _lock(file):
            # The lock was free or its owner is gone, and with it the one that wrote there.
            for left in path.parent.glob(f"{glob.escape(machine)}=*"):
                shutil.rmtree(left, ignore_errors=True)
        said = _content(file)
        if said != before and path.name in said:
            raise CannotCompile(said.partition("\n")[2])
        try:
            yield
        except CannotCompile as error:
            file.truncate(0)
            file.write(f"{path.name} {time.time_ns()}\n{error}")
            raise


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _lock(file: IO[str]) -> bool:
    """Waits for the lock, which ends with this process; False on a file system without locks."""
    begin = time.monotonic()
    while time.monotonic() - begin < LONGEST_WAIT:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return False
        else:
            return True
    raise CannotCompile(f"other processes have compiled for {LONGEST_WAIT:.0f} s")


def _compile_library(compiler: Compiler, path: Path) -> None:
    prefix = f"{platform.node()}="  # in no name of another machine
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder:
        made = Path(folder) / path.name
        compiler.compile(sorted(SOURCES.glob("*.c")), made)
        add_digest(made)
        load_library(made)
        made.replace(path)


log = logging.getLogger(__name__)

SWITCH = "HYPERSLAB_COMPILE"
"""Asks in the environment: 0 for the plain references, 1 to compile for this very processor."""

WORTH_A_THREAD = 1 << 15
"""Elements for which a thread is woken, as in torch's own operators."""

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""Functions that GNU's, Intel's and LLVM's libraries have."""

PART_OF_WORK = struct.Struct("@2q")
"""At the end of each structure: which part of the work, of how many."""

WHOLE_WORK = PART_OF_WORK.pack(0, 1)

CompiledFunction = Callable[[bytes], int]


@dataclass(frozen=True, slots=True)
class Library:
    """Holds the C functions, which take a packed structure and return 0, or 1 without memory.

    All but those of a normalisation's numbers do a part of the work: see `call`. Those with
    a default are missing where they were compiled for a processor without their instructions.
    """

    chain_forward: CompiledFunction
    chain_backward: CompiledFunction
    chain_sums: CompiledFunction
    reorder: CompiledFunction
    window_maximum: CompiledFunction
    window_spread: CompiledFunction
    resample: CompiledFunction
    normalisation: CompiledFunction
    running_statistics: CompiledFunction
    parameter_gradients: CompiledFunction
    through_statistics: CompiledFunction
    in_parts: CompiledFunction
    direct_forward: CompiledFunction | None = None
    direct_gradient: CompiledFunction | None = None
    winograd_gradient: CompiledFunction | None = None
    depthwise_gradient: CompiledFunction | None = None


@functools.cache
def library() -> Library | None:
    """Returns the compiled functions; None, and a line in the log, where there are none."""
    asked = os.environ.get(SWITCH, "")
    if asked == "0":
        log.info("%s=0: fused kernels run as torch's single operators", SWITCH)
        return None
    if asked not in ("", "1") and _is_first():
        log.warning("%s=%s is ignored: it takes 0 or 1", SWITCH, asked)
    try:
        return load_library(ready_library())
    except CannotCompile as error:
        level = logging.WARNING if _speaks_for_machine() else logging.DEBUG
        words = "%s: fused kernels run as torch's single operators, slower: %s"
        log.log(level, words, platform.node(), error)
        return None


def ready_library(*, compiled: bool = False) -> Path:
    """Returns the library that was installed with the package, or else `cached_library`.

    ``compiled``: it may be compiled now, as it may with HYPERSLAB_COMPILE=1.
    """
    if os.environ.get(SWITCH) == "1":
        return cached_library()
    installed = built_in_library()
    if installed is not None:
        try:
            load_library(installed)
        except CannotCompile as error:  # it was built with a newer C library
            log.info("the kernels of the package do not load here: %s", error)
        else:
            return installed
    return cached_library(compiled=compiled)


def _is_first() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def _speaks_for_machine() -> bool:
    """Says if this is the first of the ranks on this machine to ask, which keeps the word.

    Any of them may fail alone. They have one parent; the name is given back when they end.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    try:
        with socket.socket(socket.AF_UNIX) as word:
            word.bind(f"\0hyperslab-kernels-{os.geteuid()}-{os.getppid()}")
            word.detach()
    except OSError as error:  # taken; or no file is left, or not Linux, which has such names
        return error.errno != errno.EADDRINUSE and _is_first()
    return True


@functools.cache
def _has(kernel: str) -> bool:
    """Says if a kernel was compiled, for which not every processor has the instructions."""
    functions = library()
    return functions is not None and getattr(functions, kernel) is not None


direct_is_known = functools.partial(_has, "direct_forward")
winograd_is_known = functools.partial(_has, "winograd_gradient")
depthwise_is_known = functools.partial(_has, "depthwise_gradient")


def load_library(path: Path) -> Library:
    functions = {}
    try:
        loaded = ctypes.CDLL(str(path))
        for field in fields(Library):
            name = f"hyperslab_{field.name}"
            if field.default is None and not hasattr(loaded, name):
                continue
            function = getattr(loaded, name)
            function.argtypes = [ctypes.c_char_p]
            function.restype = ctypes.c_int
            functions[field.name] = function
    except (OSError, AttributeError) as error:
        raise CannotCompile(f"{path}: {reason(error)}") from error
    return Library(**functions)


@functools.cache
def _openmp() -> bytes:
    """Packs what starts the threads of torch's OpenMP; nothing where torch has none."""
    torch_library = ctypes.CDLL(torch_internals.LIBRARY)
    try:
        functions = [getattr(torch_library, name) for name in OPENMP]
    except AttributeError:
        return b""
    return b"".join(map(_code, functions))


def _code(function: Any) -> bytes:
    return integers(ctypes.cast(function, ctypes.c_void_p).value or 0)


def parts_for(size: int) -> int:
    """Counts the parts of the work on so many elements: torch's threads, if it pays."""
    if size < 2 * WORTH_A_THREAD or not _openmp():
        return 1
    return max(1, min(torch.get_num_threads(), size // WORTH_A_THREAD))


def call(function: CompiledFunction, arguments: bytes, size: int) -> None:
    """Runs a function on ``size`` elements, in parts at once where it is worth it.

    Args:
        arguments: the structure but for its last two: the number of the part and that of all.
    """
    parts = 1 if size < 2 * WORTH_A_THREAD else parts_for(size)
    functions = None if parts == 1 else library()
    if functions is None:
        failed = function(arguments + WHOLE_WORK)
    else:
        # All threads are asked for: OpenMP ends those that a smaller team has no use for.
        numbers = integers(torch.get_num_threads(), parts, len(arguments) // 8)
        failed = functions.in_parts(_code(function) + _openmp() + numbers + arguments)
    if failed:
        raise MemoryError("no memory for rows of a fused kernel")


TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types with fused kernels, in Triton as well, and the numbers that ``rows.h`` gives them."""

STREAMED = 16 << 20
"""[B] Results from this size on do not stay in the caches until they are read."""

PLANS_KEPT = 4096
"""Packed numbers: a network has some for each of its layers.

They are worked out once for equal calls: a tensor of a few voxels passes in less time than Python
takes to look at its shape.
"""

Sizes = tuple[int, ...]

_INTEGERS = [struct.Struct(f"@{count}q") for count in range(32)]


def integers(*numbers: int) -> bytes:
    """Packs numbers for C."""
    return _INTEGERS[len(numbers)].pack(*numbers)


def addresses(*tensors: torch.Tensor | None) -> bytes:
    """Packs the addresses of the tensors' first elements for C."""
    return _INTEGERS[len(tensors)].pack(*[0 if x is None else x.data_ptr() for x in tensors])


def as_dense_float32(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the numbers in float32 and contiguous: themselves where they are."""
    if numbers is None or (numbers.dtype == torch.float32 and numbers.is_contiguous()):
        return numbers
    return numbers.float().contiguous()


def three(extents: Sequence[int], missing: int = 1) -> Sizes:
    """Fills up numbers of fewer dims for C, which knows three."""
    return (*(missing,) * (3 - len(extents)), *extents)


def blocks_in(shape: Sizes, channels_last: bool) -> tuple[int, int]:
    """Counts the blocks of a tensor, and the channels that lie side by side in one."""
    return shape[:2] if channels_last else (shape[0] * shape[1], 1)  # type: ignore[return-value]
