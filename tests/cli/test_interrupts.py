"""Ctrl-C is one line and exit code 130 at any moment, and ends all (tier: child processes)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hyperslab.errors import DataError
from hyperslab.simulate.universes import make_universes
from tests.forked import forked_commands
from tests.train.universes import write_universes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PATIENCE = 200  # [s]


def begin(*arguments: str | Path) -> subprocess.Popen[str]:
    """A command in a process group of its own, as a shell starts it."""
    environment = {name: value for name, value in os.environ.items() if name != "HYPERSLAB_DEBUG"}
    line = [sys.executable, "-m", "hyperslab", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        line, stdout=pipe, stderr=pipe, text=True, env=environment, process_group=0
    )


def wait(process: subprocess.Popen[str], when: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it does not get there"
        time.sleep(0.01)


def interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> None:
    """What a terminal does to all processes in its foreground, and its user again and again."""
    wait(process, when)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    line = process.stderr.readline()
    while process.poll() is None:
        with suppress(ProcessLookupError):  # the server of forks has seen the end already
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.001)
    said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, line + errors) == (130, "stopped by SIGINT\n"), said
    nobody_left(process.pid)


def nobody_left(group: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while members(group):
        assert time.monotonic() < deadline, "somebody is left"
        time.sleep(0.05)


def members(group: int) -> list[str]:
    """The processes in it that are not over."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(its) == group and state not in "ZX":
            found.append(folder.name)
    return found


def test_while_it_imports(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {synthetic: {width: 16}, batch_size: 2}\ndevice: cpu\n")
    process = begin("plan", recipe)
    maps = Path(f"/proc/{process.pid}/maps")
    interrupt(process, lambda: "libtorch" in maps.read_text())


def test_convert_with_workers(tmp_path: Path) -> None:
    source = write_universes(tmp_path / "universes", 1, width=48)
    for number in range(1, 60):
        shutil.copy(source / "univ_ics_000.hdf5", source / f"univ_ics_{number:03}.hdf5")
    out = tmp_path / "out"
    with forked_commands():
        process = begin("convert", source, out, "--compression", "gzip", "--workers", "2")
    interrupt(process, lambda: any(out.glob("*.hdf5")))
    assert len(list(out.glob("*.hdf5"))) < 60


def test_convert_killed_while_its_workers_import(tmp_path: Path) -> None:
    """No Ctrl-C: the command cannot end them any more."""
    source = write_universes(tmp_path / "universes", 4, width=16)
    with forked_commands():
        process = begin("convert", source, tmp_path / "out", "--workers", "2")

    def importing() -> bool:
        others = [name for name in members(process.pid) if name != str(process.pid)]
        with suppress(OSError):  # it ended meanwhile
            return any("numpy" in Path(f"/proc/{name}/maps").read_text() for name in others)
        return False

    wait(process, importing)
    process.kill()
    process.communicate()
    nobody_left(process.pid)


def test_sigterm_before_a_training_begins_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {synthetic: {width: 16}, batch_size: 2}\ndevice: cpu\n")
    process = begin("train", recipe, "--output", tmp_path / "run")
    maps = Path(f"/proc/{process.pid}/maps")
    wait(process, lambda: "libtorch" in maps.read_text())
    process.terminate()
    said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said, errors) == (143, "", "stopped by SIGTERM\n")


@pytest.mark.long
def test_simulate_which_has_its_folder_for_itself(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin("simulate", out, "--count", "1000", "--size", "8")

    def begun() -> bool:
        return any(out.glob("*.hdf5"))

    def refused() -> bool:
        if begun():
            with pytest.raises(DataError, match="another simulation into it is under way"):
                make_universes(out, count=1000, size=8)
        return begun()

    interrupt(process, refused)
    assert len(make_universes(out, count=1, size=8)) == 1


IGNORING = """
import signal, time
from hyperslab.cli.terminal import begin_interrupts, clean_interrupts

class Object:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        while True:  # ends by the interrupt, and nobody hears of it
            pass

begin_interrupts()
with clean_interrupts():
    held = Object()
    del held
    time.sleep(100)
    print("it went on")
"""


def test_an_interrupt_where_python_ignores_errors_comes_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "stopped by SIGINT\n", "")


def test_other_errors_that_python_ignores_are_said() -> None:
    code = IGNORING.replace("signal.raise_signal(signal.SIGINT)", "raise ValueError('odd')")
    code = code.replace("time.sleep(100)", "")
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout) == (0, "it went on\n")
    assert "ValueError: odd" in ended.stderr
