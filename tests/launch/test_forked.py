"""Ranks that are forks of their launcher are as interpreters of their own (tier: child processes).

One command does all of it, as it imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperslab.launch.forked import ForkedRank, can_fork
from hyperslab.launch.supervisor import ProcessGroup, launch
from tests.launch.test_supervisor import gone, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


def start_both(folder: Path) -> None:
    """Start a fork and an interpreter that say what they find; then wait to be killed."""
    found = {"at first": can_fork()}
    with (folder / "of the launcher alone").open("w"):
        with_thread = threading.Event()
        thread = threading.Thread(target=with_thread.wait)
        thread.start()
        found["with a thread"] = can_fork()
        with_thread.set()
        thread.join()
        group = ProcessGroup()
        kept = os.memfd_create("kept")
        for name, start in (("fork", ForkedRank), ("interpreter", subprocess.Popen)):
            environment = {**os.environ, "RANK": "3", "OMP_NUM_THREADS": "2", "OWN": "ü" * 200}
            del environment["SHLVL"]
            with (
                (folder / f"{name}.out").open("wb") as out,
                (folder / f"{name}.err").open("wb") as err,
            ):
                rank = start(
                    [sys.executable, "-m", "tests.launch.probe", str(folder / name), "5"],
                    env=environment,
                    stdin=os.open(os.devnull, os.O_RDONLY),
                    stdout=out.fileno(),
                    stderr=err.fileno(),
                    pass_fds=(kept,),
                    process_group=group.id,
                )
                found[f"exit code of {name}"] = rank.wait()
        found["group"] = group.id
        found["parent"] = os.getpid()
        group.close()
    (folder / "found").write_text(json.dumps(found))
    waiting = ["-m", "tests.launch.probe", str(folder / "waiting"), "wait"]
    launch(1, waiting, folder / "logs", limit=60)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder of a command, and its process, which waits for a rank."""
    folder = tmp_path_factory.mktemp("command")
    script = (
        "from hyperslab.util.startup import begin_command; begin_command()\n"
        "import sys; from pathlib import Path\n"
        "from tests.launch.test_forked import start_both; start_both(Path(sys.argv[1]))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": path, "SHLVL": "1"},
        cwd=folder,
    )
    try:
        until(lambda: (folder / "waiting").exists() or process.poll() is not None)
        assert process.poll() is None
        yield folder, process.pid
    finally:
        process.kill()
        process.wait()


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def test_a_fork_finds_what_an_interpreter_does(command: tuple[Path, int]) -> None:
    folder, pid = command
    launcher, fork, other = (read(folder, name) for name in ("found", "fork", "interpreter"))
    assert launcher["at first"], "nothing was forked"
    assert not launcher["with a thread"]
    assert (launcher["exit code of fork"], launcher["exit code of interpreter"]) == (5, 5)
    assert fork["parent"] == other["parent"] == pid
    assert fork["group"] == launcher["group"]
    draws = [found.pop("libraries") for found in (fork, other)]
    assert draws[0]["threads"] == 2
    assert draws[0]["left out"] > draws[1]["left out"]  # of collections of garbage
    assert draws[0]["draw"] != read(folder, "waiting")["libraries"]["draw"]
    shown = [found.pop("shown") for found in (fork, other)]
    assert shown[1] == other["environment"]
    first, *others = list(shown[0])[:-1]  # there may be no room for the last one
    assert first == "RANK"
    assert all(shown[0][name] == other["environment"][name] for name in others)
    for kind in ("out", "err"):
        fork[kind], other[kind] = (
            (folder / f"{n}.{kind}").read_text() for n in ("fork", "interpreter")
        )
        fork["descriptors"], other["descriptors"] = (
            [line.replace(f"/{name}.", "/") for line in found["descriptors"]]
            for name, found in (("fork", fork), ("interpreter", other))
        )
    differ = {key for key in fork if fork[key] != other[key]}
    assert differ == {"pid", "arguments"}, {key: (fork[key], other[key]) for key in differ}


def test_forks_do_not_outlive_their_launcher(command: tuple[Path, int]) -> None:
    """They hold no end of the pipe by which their guard knows that it lives."""
    folder, pid = command
    rank = read(folder, "waiting")
    assert rank["parent"] == pid
    os.kill(pid, 9)
    begin = time.monotonic()
    gone([rank["pid"]])
    assert time.monotonic() - begin < 30
