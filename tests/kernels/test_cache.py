"""Compiling fused kernels: what can be missing, foreign or broken (tier: no process; some start
interpreters and the compiler)."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.kernels import built_in, registry
from hyperslab.kernels import compile as compiler
from hyperslab.kernels import compile as library
from hyperslab.kernels.compile import CannotCompile, cached_library, load_library, run_guarded
from hyperslab.util import private_folders
from tests.kernels.compiled import compiled

try:
    COMPILER = compiler.find_compiler().command
except CannotCompile:
    COMPILER = ()

needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")

WORDS = "compiling kernels, about 10 s, once on this machine"

RUN = """
import torch, hyperslab.kernels
x = torch.arange(-8.0, 8.0).view(1, 2, 8)
y, marks = torch.ops.hyperslab.chain_forward(x, None, 0.0, [2], False, True, x.dtype)
print(y.sum().item(), marks.tolist())
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(library.SWITCH, "1")  # what came with the package is not looked at
    return tmp_path / "cache" / "hyperslab" / "kernels"


@pytest.fixture(scope="session")
def made() -> Path:
    """A whole library."""
    return compiled()


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that does what its file says with ``$target``, and tells a version."""
    path = tmp_path / "pretend"
    monkeypatch.setenv("CC", str(path))
    return path


def compiles_by(path: Path, words: str, version: str = "1") -> None:
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\n'
        f'for target in "$@"; do :; done\n'
        f'case "$target" in *.o) : > "$target"; exit;; esac  # of the library alone\n{words}\n'
    )
    path.chmod(0o700)


def kept_in(home: Path) -> list[str]:
    """All files but the lock."""
    return [path.name for path in home.iterdir() if path.suffix != ".lock"]


def compiled_calls(path: Path) -> int:
    """How often `compiles_by` ``echo >> "$0.calls"`` was run."""
    calls = path.with_name(path.name + ".calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@needs_compiler
def test_compiles_once_for_the_owner_alone(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'cp {made} "$target"')
    path = cached_library()
    assert load_library(path)
    assert kept_in(home) == [path.name]
    assert home.stat().st_mode & 0o777 == 0o700
    written = path.stat().st_mtime_ns
    assert cached_library() == path
    assert path.stat().st_mtime_ns == written


@needs_compiler
@pytest.mark.parametrize("harm", ["cut", "changed", "emptied", "a folder"])
def test_what_is_damaged_is_compiled_again(
    harm: str, home: Path, made: Path, pretend: Path
) -> None:
    compiles_by(pretend, f'echo >> "$0.calls"; cp {made} "$target"')
    path = cached_library()
    whole = path.read_bytes()
    if harm == "a folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(CannotCompile):
            cached_library()
        return
    harmed = {"cut": whole[: len(whole) // 2], "emptied": b""}.get(harm)
    path.unlink()  # who compiled it has it loaded: its memory is that file's
    path.write_bytes(
        whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:] if harmed is None else harmed
    )
    assert cached_library() == path
    assert path.read_bytes() == whole
    assert compiled_calls(pretend) == 2
    assert load_library(path)


@needs_compiler
def test_another_version_is_compiled_for_itself(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'cp {made} "$target"')
    first = cached_library()
    compiles_by(pretend, f'cp {made} "$target"', version="2")
    assert cached_library() != first


@needs_compiler
def test_no_header_is_taken_from_the_current_folder(
    home: Path, made: Path, pretend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of ``CPATH`` stands for it. The compiler itself may be named from there."""
    monkeypatch.chdir(pretend.parent)
    monkeypatch.setenv("CPATH", "/usr/local/include:")
    monkeypatch.setenv("CC", f"./{pretend.name}")
    Path("string.h").write_text("#error it is somebody else's\n")
    (source := Path("a.c").resolve()).write_text("#include <string.h>\n")
    compile = shlex.join([*COMPILER, "-c", str(source), "-o", str(source.with_suffix(".o"))])
    compiles_by(pretend, f'{compile} && cp {made} "$target"')
    assert load_library(cached_library())


def test_a_compiler_that_is_missing(pretend: Path) -> None:
    with pytest.raises(CannotCompile, match="no C compiler"):
        cached_library()


def test_a_compiler_that_fails(home: Path, pretend: Path) -> None:
    compiles_by(pretend, "echo no such processor >&2; echo more >&2; exit 1")
    with pytest.raises(CannotCompile, match=r"pretend failed: no such processor$"):
        cached_library()
    assert kept_in(home) == []


@needs_compiler
@pytest.mark.parametrize("junk", ["text", "nothing", "another library"])
def test_a_compiler_that_makes_something_else(
    junk: str, home: Path, tmp_path: Path, pretend: Path
) -> None:
    """It says that all went well; nothing of it is kept."""
    if junk == "another library":
        source = tmp_path / "other.c"
        source.write_text("int hyperslab_reorder(const char* x) { return x != 0; }")
        words = f'{shlex.join(COMPILER)} -shared -fPIC {source} -o "$target"'
    else:
        words = {"text": 'echo "no library" > "$target"', "nothing": ': > "$target"'}[junk]
    compiles_by(pretend, words)
    with pytest.raises(CannotCompile, match=r"\.so"):
        cached_library()
    assert kept_in(home) == []


def test_a_command_that_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(CannotCompile, match=r"is not a command: .*quotation"):
        cached_library()


def test_no_descriptor_is_left(
    pretend: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for the compiler nor for the word that it is told once; there is a warning still."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    compiles_by(pretend, "exit 0")
    monkeypatch.setattr(os, "pipe", full)
    monkeypatch.setattr(socket, "socket", full)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Too many open files" in caplog.text


def at_once(count: int) -> list[object]:
    """What so many threads get; the lock is as strange to each as to a process."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(cached_library())
        except CannotCompile as error:
            found.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@needs_compiler
def test_one_compiles_for_all(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'echo >> "$0.calls"; sleep 0.5; cp {made} "$target"')
    found = at_once(4)
    assert len({*found}) == 1
    assert compiled_calls(pretend) == 1
    assert load_library(Path(str(found[0])))


def test_one_fails_for_all(home: Path, pretend: Path) -> None:
    """Those that waited do not try it again one after the other; who comes later does."""
    compiles_by(pretend, 'echo >> "$0.calls"; sleep 0.5; echo no memory >&2; exit 1')
    found = at_once(4)
    assert len(found) == 4
    assert all(str(words).endswith("no memory") for words in found), found
    tried = len(compiler.FOR_THIS_PROCESSOR)
    assert compiled_calls(pretend) == tried
    at_once(1)
    assert compiled_calls(pretend) == 2 * tried


def test_nobody_waits_for_ever(home: Path, pretend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LONGEST_WAIT", 0.3)
    compiles_by(pretend, 'echo >> "$0.calls"; sleep 1; exit 1')
    found = at_once(2)
    assert sorted("have compiled for" in str(words) for words in found) == [False, True]
    assert compiled_calls(pretend) == len(compiler.FOR_THIS_PROCESSOR)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked how


def wait_for(condition: object, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(condition())  # type: ignore[operator]


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@pytest.fixture
def forking(tmp_path: Path) -> tuple[Path, Path]:
    """A compiler that has another process work, as ``cc`` has ``cc1``, and the file of its id."""
    path, pid = tmp_path / "forking", tmp_path / "pid"
    path.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {pid}.new; mv {pid}.new {pid}\nwait\n")
    path.chmod(0o700)
    return path, pid


@needs_proc
def test_compilers_end_with_a_process_that_is_killed(forking: tuple[Path, Path]) -> None:
    command, pid = forking
    parent = os.fork()
    if parent == 0:
        try:
            run_guarded([str(command)])
        finally:
            os._exit(0)
    try:
        assert wait_for(pid.exists)
        worker = int(pid.read_text())
        assert running(worker)
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert wait_for(lambda: not running(worker)), "an orphan"


@needs_proc
def test_what_a_killed_compiler_has_started_ends_with_it(forking: tuple[Path, Path]) -> None:
    """It would hold the compiler's output open, and have no guard any more."""
    _, pid = forking
    begin = time.monotonic()
    done = run_guarded(["sh", "-c", f"sleep 300 & echo $! > {pid}; kill -9 $$"])
    assert done.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - begin < 100, "it waited for what is left"
    assert wait_for(lambda: not running(int(pid.read_text()))), "an orphan"
    assert run_guarded(["sh", "-c", "echo said; echo wrong >&2; exit 3"]).returncode == 3
    assert run_guarded(["sh", "-c", "echo said"]).stdout == "said\n"


@needs_proc
def test_a_fork_meanwhile_keeps_no_compiler_alive(
    forking: tuple[Path, Path], tmp_path: Path
) -> None:
    """Another thread of the process that compiles may fork, as a loader of torch's does."""
    command, pid = forking
    fork = tmp_path / "fork"
    parent = os.fork()
    if parent == 0:
        try:
            threading.Thread(target=run_guarded, args=([str(command)],), daemon=True).start()
            if wait_for(pid.exists) and (child := os.fork()) == 0:
                time.sleep(60)
            fork.write_text(str(child))
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        assert wait_for(lambda: fork.exists() and fork.read_text())
        worker = int(pid.read_text())
        assert running(worker)
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    try:
        assert running(int(fork.read_text()))
        assert wait_for(lambda: not running(worker)), "an orphan"
    finally:
        os.kill(int(fork.read_text()), signal.SIGKILL)


@needs_proc
def test_compilers_end_at_the_limit(
    forking: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, pid = forking
    monkeypatch.setattr(compiler, "TIME_LIMIT", 0.5)
    with pytest.raises(CannotCompile, match="took more than"):
        run_guarded([str(command)])
    worker = int(pid.read_text())
    assert wait_for(lambda: not running(worker)), "an orphan"


@needs_compiler
def test_what_a_killed_process_left_goes(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'cp {made} "$target"')
    cached_library().unlink()
    left = home / f"{compiler.platform.node()}=abc"
    other = home / f"{compiler.platform.node()}-2=abc"  # a machine that compiles there now
    other.mkdir()
    left.mkdir()
    (left / "half.so").write_bytes(b"half")
    cached_library()
    assert other.exists()
    assert not left.exists()


def test_a_compiler_that_hangs(home: Path, pretend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TIME_LIMIT", 0.5)
    compiles_by(pretend, "exec sleep 60")
    with pytest.raises(CannotCompile, match="took more than"):
        cached_library()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to(mode: int, home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(mode)
    with pytest.raises(CannotCompile, match="others may write"):
        cached_library()


@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_a_parent_in_which_others_may_rename(mode: int, home: Path) -> None:
    home.mkdir(parents=True, mode=0o700)
    home.parents[1].chmod(mode)
    with pytest.raises(CannotCompile, match=f"chmod go-w: {home.parents[1]};"):
        cached_library()
    home.parents[1].chmod(mode | 0o1000)
    assert private_folders.make_private(home) == home, "a sticky one, as /tmp is"


def test_a_parent_for_a_group(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems make a group for each user, and folders that it may write to."""
    home.mkdir(parents=True, mode=0o700)
    home.parents[0].chmod(0o770)
    for alone in (True, False):
        monkeypatch.setattr(private_folders, "_is_of_user_alone", lambda _, alone=alone: alone)
        if alone:
            assert private_folders.make_private(home) == home
            continue
        with pytest.raises(
            CannotCompile, match=r"others may write .* XDG_CACHE_HOME names another"
        ):
            cached_library()


def test_new_folders_are_for_the_owner_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        assert private_folders.make_private(home) == home
    finally:
        os.umask(before)
    assert [place.stat().st_mode & 0o777 for place in (home, *home.parents[:2])] == [0o700] * 3


def test_a_folder_of_somebody_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(parents=True, mode=0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(CannotCompile, match="another user"):
        cached_library()


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CannotCompile, match="XDG_CACHE_HOME"):
        cached_library()


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"no library")
    with pytest.raises(CannotCompile, match=r"kernels\.so"):
        load_library(path)


def test_references_run_where_nothing_compiles(
    pretend: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler" in caplog.text
    monkeypatch.setattr(registry, "library", lambda: None)
    x = torch.arange(-8.0, 8.0).view(1, 2, 8)
    y, marks = torch.ops.hyperslab.chain_forward(x, None, 0.0, [2], False, True, x.dtype)
    assert torch.equal(y, torch.relu(x).unflatten(2, (4, 2)).mean(3))
    assert marks.tolist() == [0, 254]


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1), (3,)])
def test_one_rank_of_a_machine_warns(
    ranks: tuple[int, ...],
    pretend: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever it is: others may have a library, and so nothing to say."""
    parent = secrets.token_hex(8)  # the ranks of another launch have another one
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for rank in ranks:
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with caplog.at_level(logging.INFO):
            assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.text.count(compiler.platform.node()) == 1


@needs_compiler
@pytest.mark.parametrize("often", [False, True])
def test_the_first_compilation_is_said(
    often: bool,
    made: Path,
    pretend: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compiler, "SAID_EVERY", -1.0 if often else 1e9)
    compiles_by(pretend, f'cp {made} "$target"')
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert library.library.__wrapped__() is not None
    first, *progress, last = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"{WORDS}: ")
    assert last.startswith("kernels compiled after ")
    files = len(list(compiler.SOURCES.glob("*.c"))) if often else 0
    assert progress == [f"compiling kernels: {n} of {files} files" for n in range(1, files + 1)]


@needs_compiler
def test_the_command(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'cp {made} "$target"')
    done = CliRunner().invoke(app, ["compile"])
    assert done.exit_code == 0, done.output
    first, *_, last = done.output.splitlines()
    assert first.startswith(WORDS)
    assert [str(home / name) in last for name in kept_in(home)] == [True]
    assert CliRunner().invoke(app, ["compile"]).output == f"{last}\n"
    compiles_by(pretend, "exit 1", version="2")
    done = CliRunner().invoke(app, ["compile"])
    assert isinstance(done.exception, CannotCompile)


@needs_compiler
def test_a_run_waits_for_no_compiler(
    home: Path,
    made: Path,
    tmp_path: Path,
    pretend: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes what stands when it begins, and the command makes it stand."""
    monkeypatch.delenv(library.SWITCH)
    monkeypatch.setattr(built_in, "BUILT", tmp_path / "nothing")
    compiles_by(pretend, f'echo >> "$0.calls"; cp {made} "$target"')
    assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "`hyperslab compile` does so" in caplog.text
    assert (compiled_calls(pretend), kept_in(home)) == (0, [])
    assert CliRunner().invoke(app, ["compile"]).exit_code == 0
    assert compiled_calls(pretend) == 1
    assert library.library.__wrapped__() is not None
    assert compiled_calls(pretend) == 1


def test_the_switch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    with caplog.at_level(logging.INFO):
        assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    monkeypatch.setenv(library.SWITCH, "no")
    library.library.__wrapped__()
    assert "HYPERSLAB_COMPILE=no is ignored: it takes 0 or 1" in caplog.text


def python_processes(count: int) -> Sequence[str]:
    started = [
        subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return [process.communicate(timeout=120)[0] for process in started]


@needs_compiler
@pytest.mark.long
def test_processes_compile_at_once(home: Path) -> None:
    assert python_processes(2) == ["14.0 [0, 254]\n"] * 2
    assert len(kept_in(home)) == 1


def test_the_switch_in_another_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert python_processes(1) == ["14.0 [0, 254]\n"]
    assert not home.exists()
