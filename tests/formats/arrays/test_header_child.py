"""A file on which HDF5 hangs or crashes is one error (tier: a child process)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hyperslab.errors import DataError
from hyperslab.formats.arrays.hdf5 import HeaderChild
from hyperslab.formats.arrays.layouts import FileHeader, read_header
from tests.forked import forked_commands
from tests.formats.opening import source_of
from tests.formats.universes import Seat
from tests.formats.writers import universes


def hang(file: str) -> str:
    if "evil" in file:
        time.sleep(1000)
    return file


def crash(file: str) -> str:
    if "evil" in file:
        os.kill(os.getpid(), signal.SIGSEGV)
    return file


@pytest.mark.parametrize(
    ("read", "limit", "words", "forks"),
    [
        (hang, 4.0, "evil: HDF5 has not read its header within 4 s", 2),
        (crash, 100.0, r"evil: HDF5 crashes .*signal 11", 3),
    ],
)
def test_the_file_is_named_and_the_others_go_on(
    read: Callable[[str], str],
    limit: float,
    words: str,
    forks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = []
    fork = os.fork

    def noted() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", noted)
    with HeaderChild(read, limit) as child:
        assert child("good") == "good"
        with pytest.raises(DataError, match=words):
            child("evil")
        assert child("better") == "better"
    assert len(children) == forks
    for child_id in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child_id, os.WNOHANG)


def test_a_child_that_crashes_once_is_no_sign_of_damage(tmp_path: Path) -> None:
    def crash_once(file: str) -> str:
        if os.getpid() != main and not (tmp_path / "crashed").exists():
            (tmp_path / "crashed").touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        return file

    main = os.getpid()
    with HeaderChild(crash_once) as child:
        assert child("good") == "good"
    assert (tmp_path / "crashed").exists()


@pytest.mark.parametrize("gone", ["good", "evil"])
def test_the_child_is_a_file_ahead(gone: str) -> None:
    """Each answer is that of its file, also where the file ahead is left out: it has gone, say."""
    files = ["first", gone, "better", "evil 2", "best"]
    with HeaderChild(crash, 100.0, files=files) as child:
        for file in ("first", "better"):
            assert child(file) == file
        with pytest.raises(DataError, match=r"evil 2: HDF5 crashes .*signal 11"):
            child("evil 2")
        assert child("best") == "best"


class Note:
    """In a circle, writes down which process clears it away."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.me = self

    def __del__(self) -> None:
        self.file.write_text(str(os.getpid()))


def test_the_child_clears_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a group of ranks whose threads are not there, which would crash it."""
    fork, before = os.fork, gc.get_threshold()

    def fork_with_garbage() -> int:
        Note(tmp_path / "cleared")
        gc.set_threshold(1)
        child = fork()
        if child:
            gc.set_threshold(*before)
        return child

    gc.collect()
    monkeypatch.setattr(os, "fork", fork_with_garbage)
    with HeaderChild(lambda file: [[] for _ in range(99)]) as child:
        child("good")
        assert not (tmp_path / "cleared").exists()
    assert gc.isenabled()
    gc.collect()
    assert (tmp_path / "cleared").read_text() == str(os.getpid())


def test_errors_are_those_of_this_process() -> None:
    def refuse(file: str) -> None:
        raise DataError(f"{file}: no")

    with HeaderChild(refuse) as child, pytest.raises(DataError, match="a: no"):
        child("a")


def test_of_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    universes(tmp_path)
    main = os.getpid()

    def read(path: Path, *how: Any) -> FileHeader:
        if os.getpid() != main and path.name == "univ_1.hdf5":
            time.sleep(1000)
        return read_header(path, *how)

    monkeypatch.setattr("hyperslab.formats.arrays.open.HeaderChild", HeaderChild)  # no small one
    monkeypatch.setattr(HeaderChild.__init__, "__defaults__", (5.0,))
    monkeypatch.setattr("hyperslab.formats.arrays.layouts.read_header", read)
    left_out: list[DataError] = []
    source = source_of(tmp_path, Seat(), refuse=left_out.append)
    assert list(source.names) == ["univ_0", "univ_2"]
    assert "univ_1.hdf5: HDF5 has not read" in str(left_out[0])


SPIN = """
import os, sys, time
from hyperslab.formats.arrays.hdf5 import HeaderChild
main = os.getpid()
def spin(file):
    if os.getpid() != main:
        print(os.getpid(), flush=True)
        while True:
            pass
with HeaderChild(spin, limit=float(sys.argv[1])) as child:
    child("evil")
"""


@contextmanager
def spinning(limit: float) -> Iterator[tuple[int, int]]:
    """Starts a process whose child walks in circles, and gives the numbers of both."""
    command = [sys.executable, "-c", SPIN, str(limit)]
    with forked_commands():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def wait_for_end(child: int) -> None:
    """Waits until a process that is no child of this one has ended."""
    for _ in range(600):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError(f"process {child} is left behind")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end it")
def test_the_child_ends_with_its_parent() -> None:
    with spinning(1000) as (parent, child):
        os.kill(parent, signal.SIGKILL)
        wait_for_end(child)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_the_child_has_a_limit_of_its_own_where_the_parent_does_not_end_it() -> None:
    with spinning(0.5) as (parent, child):
        os.kill(parent, signal.SIGSTOP)
        wait_for_end(child)
