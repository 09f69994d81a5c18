"""Whichever process of a command is killed with SIGKILL, nothing is left after ten seconds
(tier: processes of their own; those that import torch are for the long run).

All that a command starts inherits a variable by which /proc shows it.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import yaml

from tests.formats.writers import public
from tests.soak.campaign import patience
from tests.soak.kills import RECIPE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

GONE = 10.0
"""The promise [s], of a machine with a free core."""

PATIENCE = 240.0
"""What is no part of it [s], such as the start, on a busy machine."""

MARK = "HYPERSLAB_ORPHANS"

HEADERS = """
import os, time
from hyperslab.formats.arrays.hdf5 import HeaderChild
main = os.getpid()
def read(file):
    while os.getpid() != main:
        time.sleep(600)
with HeaderChild(read, limit=600) as child:
    child("a file from which HDF5 does not come back")
"""

POOL = """
import time
from hyperslab.util.worker_pool import map_tasks
if __name__ == "__main__":
    print(list(map_tasks(time.sleep, [(600,), (600,), (600,)], 2)))
"""

COMPILE = """
from hyperslab.kernels.compile import run_guarded
run_guarded(["sh", "-c", "sleep 601 & wait"])
"""


@dataclass(frozen=True)
class Process:
    """A process that a command has started, or the command itself."""

    pid: int
    parent: int
    line: str
    rank: str


@dataclass(frozen=True)
class Command:
    """A command line in a folder, and its kinds of processes besides itself.

    Those in ``survived`` may be killed without the end of the command, which is killed then.
    """

    words: Callable[[Path], list[str]]
    kinds: dict[str, Callable[[Process, int], bool]]
    survived: frozenset[str] = field(default=frozenset())


def is_rank(number: str) -> Callable[[Process, int], bool]:
    return lambda one, _: one.rank == number


RANKS = {
    "rank 0": is_rank("0"),
    "rank 1": is_rank("1"),
    "guard": lambda one, main: "guard.py" in one.line and one.parent == main,
}

WORKERS = {
    "server": lambda one, main: "forkserver" in one.line and one.parent == main,
    "worker": lambda one, main: "forkserver" in one.line and one.parent != main,
    "tracker": lambda one, _: "resource_tracker" in one.line,
}


def ranks_of(*words: str) -> Command:
    def line(folder: Path) -> list[str]:
        return ["-m", "hyperslab", *(word.format(folder) for word in words)]

    return Command(line, RANKS, frozenset({"guard"}))


def universes(folder: Path) -> list[str]:
    """The words that convert a folder of volumes, by two workers, which takes some seconds."""
    (folder / "volumes").mkdir()
    for number in range(12):
        public(folder / "volumes" / f"{number}.hdf5", np.ones((160, 160, 160, 4), "i2"), number)
    return [
        *("-m", "hyperslab", "convert", f"{folder}/volumes", f"{folder}/converted"),
        *("--workers", "2", "--format", "hdf5"),
    ]


CHEAP = {
    "headers of HDF5": Command(
        lambda _: ["-c", HEADERS],
        {"reader": lambda one, main: one.parent == main},
        frozenset({"reader"}),  # one more is tried
    ),
    "a pool": Command(lambda folder: [f"{folder}/pool.py"], WORKERS, frozenset({"tracker"})),
}
LONG = {
    "compile": Command(
        lambda _: ["-c", COMPILE],
        {
            "guard": lambda one, main: one.parent == main and "exec 3<&0" in one.line,
            "compiler": lambda one, _: one.line.startswith("sh\0-c\0sleep 601"),
            "what the compiler starts": lambda one, _: one.line.startswith("sleep\x00601"),
        },
        frozenset({"guard"}),
    ),
    "train": ranks_of("train", "{}/recipe.yaml", "--ranks", "2", "--output", "{}/run"),
    "evaluate": ranks_of("evaluate", "{}/folder", "--ranks", "2"),
    "predict": ranks_of(*("predict", "{}/folder", "{}", "--out", "{}/out", "--ranks", "2")),
    "calibrate": ranks_of("calibrate", "--ranks", "2", "--out", "{}/machine.yaml"),
    "sweep": ranks_of("sweep", "{}/sweep.yaml", "--ranks", "2", "--output", "{}/swept"),
    "scale": ranks_of("scale", "strong", "{}/recipe.yaml", "--ranks", "2", "--output", "{}/scaled"),
    "doctor": ranks_of("doctor", "--ranks", "2", "--folder", "{}"),
    "convert": Command(universes, WORKERS, frozenset({"tracker"})),
    "torchrun": Command(
        lambda folder: [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "hyperslab", "train", f"{folder}/recipe.yaml", "--output", f"{folder}/run"),
        ],
        {"rank 0": is_rank("0"), "rank 1": is_rank("1")},
    ),
}


def cases() -> Iterator[Any]:
    for commands, marks in ((CHEAP, ()), (LONG, (pytest.mark.long,))):
        for name, command in commands.items():
            for kind in ("itself", *command.kinds):
                yield pytest.param(command, kind, id=f"{name}: {kind}", marks=marks)


@pytest.mark.parametrize(("command", "kind"), [*cases()])
def test_nothing_is_left(command: Command, kind: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    with started(command.words(tmp_path), tmp_path) as (main, mark):
        others = command.kinds if kind == "itself" else {kind: command.kinds[kind]}

        def due() -> bool:
            return all(find(mark, main.pid, one) for one in others.values())

        wait_for(lambda: due() or main.poll() is not None, PATIENCE)
        assert main.poll() is None, f"it ended before it was killed: {output_of(tmp_path)}"
        assert due(), f"not all of {[*others]}: {output_of(tmp_path)}"
        victim = main.pid if kind == "itself" else find(mark, main.pid, command.kinds[kind])
        assert victim, f"no {kind}: {output_of(tmp_path)}"
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(victim, signal.SIGKILL)
        if kind in command.survived:
            again = others[kind] if command.kinds is RANKS else None  # the guard is replaced
            wait_for(lambda: again is None or find(mark, main.pid, again) not in (None, victim), 60)
            main.kill()
        begin = time.monotonic()
        wait_for(lambda: main.poll() is not None and not processes(mark), patience(GONE))
        left = processes(mark)
        assert main.poll() is not None, f"it goes on without its {kind}: {left}"
        assert not left, f"after {time.monotonic() - begin:.1f} s"


def prepare(folder: Path) -> None:
    """What the commands read; trainings are long enough to be killed."""
    recipe = {**RECIPE, "grid": {"depth": 2}, "epochs": 100_000, "loggers": []}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "folder").mkdir()
    (folder / "folder" / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "output": "x"}))
    (folder / "sweep.yaml").write_text(
        "recipe: recipe.yaml\nvariants: {a: {}}\nrates: [0.1]\nseeds: [0]\n"
    )
    (folder / "pool.py").write_text(POOL)


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    mark = secrets.token_hex(8)
    # First: where a fork shows its environment there is no more room than its launcher has.
    environment = {MARK: mark, **os.environ}
    if words[1:2] == ["torch.distributed.run"]:
        words = [*words, "grid.depth=2"]
    with (folder / "output").open("wb") as output:
        main = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield main, mark
    finally:
        main.kill()
        main.wait()
        for one in processes(mark):
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def output_of(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-2000:]


def processes(mark: str) -> list[Process]:
    """All that have the mark and have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes().decode(errors="replace").split("\0")
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            line = (place / "cmdline").read_text(errors="replace")
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        if f"{MARK}={mark}" in environment and state not in "ZX":
            ranks = [word[5:] for word in environment if word.startswith("RANK=")]
            found.append(Process(int(place.name), int(parent), line, "".join(ranks)))
    return found


def find(mark: str, main: int, kind: Callable[[Process, int], bool]) -> int | None:
    found = [one.pid for one in processes(mark) if one.pid != main and kind(one, main)]
    return min(found, default=None)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def test_sigterm_leaves_nothing_of_a_pool(tmp_path: Path) -> None:
    """Neither the folder of its server nor what Python warns of as leaked semaphores."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    with TemporaryDirectory() as folder:  # short, as the path of a socket has to be
        environment = {**os.environ, "TMPDIR": folder}
        started = subprocess.Popen(
            [sys.executable, script], env=environment, stderr=subprocess.PIPE
        )
        end = time.monotonic() + PATIENCE
        while not [*Path(folder).glob("pymp-*/*")] and time.monotonic() < end:
            time.sleep(0.05)
        started.terminate()
        said = started.communicate(timeout=PATIENCE)[1]
        assert (started.returncode, said) == (128 + signal.SIGTERM, b"")
        assert not os.listdir(folder)


def test_a_folder_of_too_long_a_path_for_a_socket_is_told(tmp_path: Path) -> None:
    script, folder = tmp_path / "pool.py", tmp_path / ("a" * 100)
    script.write_text(POOL)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True
    )
    assert f"too long for a socket: {folder}\n    set TMPDIR to a shorter" in ended.stderr
    assert not [*folder.iterdir()]
