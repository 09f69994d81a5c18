"""Ranks started, killed and stopped from outside (tiers: no process; the real command line)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hyperslab.checkpoint.retention import latest
from hyperslab.cli.rank import check_ranks
from hyperslab.errors import LayoutError
from hyperslab.launch.supervisor import shared_environment
from hyperslab.recipe.load import load_recipe
from tests.forked import forked_commands
from tests.train.universes import losses, write_recipe

PATIENCE = 200  # [s]
SMALL = {"name": "multiscale", "channels": [2, 4], "hidden": 4}


def test_cores_are_shared_unless_said_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))
    assert shared_environment({}, 1, "x")["OMP_NUM_THREADS"] == str(cores)
    assert shared_environment({}, 64 * cores, "x")["OMP_NUM_THREADS"] == "1"
    assert shared_environment({"OMP_NUM_THREADS": "3"}, 64, "x")["OMP_NUM_THREADS"] == "3"


def test_ranks_of_one_machine_talk_over_its_loopback_whatever_is_said() -> None:
    said = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    shared = shared_environment(said, 2, "x")
    assert shared["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert shared["NCCL_SOCKET_IFNAME"].startswith("=lo")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hyperslab", "train", *map(str, arguments)]


def test_ranks_must_fill_the_grid(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    line = command(recipe, "--ranks", "3", "grid.depth=2")
    with forked_commands():
        done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--ranks is 3 but the grid has 2 places" in done.stderr
    assert "use --ranks 2, or change the grid, such as grid.depth=3\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("axes", [["data"], ["data", "height"], ["depth", "width"]])
def test_the_grid_that_is_proposed_has_as_many_places(
    tmp_path: Path, universes: Path, axes: list[str]
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    given = [f"grid.{axis}=2" for axis in axes]
    with pytest.raises(LayoutError) as caught:
        check_ranks(load_recipe(recipe, given), 3)
    proposed = str(caught.value).rpartition("such as ")[2].split()
    check_ranks(load_recipe(recipe, [*given, *proposed]), 3)


def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path: Path, universes: Path) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, model=SMALL), tmp_path / "run"
    gone, pipe = os.pipe()
    os.close(gone)
    with forked_commands():
        done = subprocess.run(command(recipe), stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(losses(out)) == 9


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it does not get there"
        time.sleep(0.05)


def children_of(launcher: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found += [int(folder.name)] if parent == launcher else []
    return found


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank to process id, of the launcher's children; of forks /proc does not say it."""
    found = {}
    for pid in children_of(launcher):
        with suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(v[5:]): pid for v in environ if v.startswith(b"RANK=")}
    return found


def listeners(pid: int) -> set[str]:
    """The addresses on which a process listens, in the kernel's words."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        file = Path(f"/proc/{pid}/net/{table}")
        for line in file.read_text().splitlines()[1:] if file.exists() else []:
            words = line.split()
            own = f"socket:[{words[9]}]" in sockets
            if own and (words[3] == LISTENS or not table.startswith("tcp")):
                found.add(words[1].partition(":")[0])
    return found


LISTENS = "0A"
LOOPBACK = f"{socket.htonl(socket.INADDR_LOOPBACK):08X}"


TWO_RANKS = ("--ranks", "2", "grid.depth=2")


@contextmanager
def training(
    recipe: Path, steps: int, *arguments: str, ranks: Sequence[str] = TWO_RANKS
) -> Iterator[subprocess.Popen[str]]:
    """A launcher that has gone beyond so many steps."""
    history = recipe.with_suffix("") / "steps.csv"
    line = command(recipe, *ranks, "epochs=100000", *arguments)
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)
    try:
        until(lambda: history.exists() and len(history.read_text().splitlines()) > steps, process)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def gone(pids: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_rank_ends_all_and_a_signal_writes_a_checkpoint(
    tmp_path: Path, universes: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, model=SMALL), tmp_path / "run"
    every = "checkpoint.every_steps=3"

    with training(recipe, 4, every) as launcher:
        ranks = ranks_of(launcher.pid)
        assert sorted(ranks) == [0, 1]
        assert listeners(launcher.pid) == set()
        assert listeners(ranks[0]) | listeners(ranks[1]) == {LOOPBACK}
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 1
        assert f"error: rank 1 (process {ranks[1]}) was killed by SIGKILL" in errors
        assert "--resume" in errors
        assert "Traceback" not in errors
        assert gone(ranks.values())
    before = latest(out)
    assert before is not None

    # The killed run may have recorded three steps since; those of the resumed one come after them.
    steps = int(before.name[-8:]) + 4
    with forked_commands(), training(recipe, steps, every, "--resume") as launcher:
        children = children_of(launcher.pid)
        assert len(children) >= 2
        launcher.send_signal(signal.SIGTERM)
        text, errors = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 143
        assert "Traceback" not in errors
        assert gone(children)
    after = latest(out)
    assert after is not None
    assert after.name > before.name
    assert f"going on from {before}" in text
    assert f"stopped by SIGTERM after {after}" in text
    assert len(losses(out)) == int(after.name[-8:])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    with training(recipe, 1) as launcher:
        ranks = ranks_of(launcher.pid)
        launcher.kill()
        launcher.communicate()
    deadline = time.monotonic() + PATIENCE
    while not gone(ranks.values()):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.1)


def steps_of(recipe: Path) -> int:
    return len(losses(recipe.with_suffix("")))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_restarts_go_on_and_leave_out_a_rank_that_cannot_come_back(
    tmp_path: Path, universes: Path
) -> None:
    """Rank 1 dies in training, and then before it is there."""
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    options = ("checkpoint.every_steps=3", "--restarts", "3")
    auto = ("--ranks", "2", "grid=auto")
    with training(recipe, 4, *options, ranks=auto) as launcher:
        first = ranks_of(launcher.pid)
        os.kill(first[1], signal.SIGKILL)
        until(
            lambda: len(set(ranks_of(launcher.pid).values()) - set(first.values())) == 2, launcher
        )
        assert gone(first.values())
        second = ranks_of(launcher.pid)
        os.kill(second[1], signal.SIGKILL)
        until(lambda: bool(set(ranks_of(launcher.pid).values()) - set(second.values())), launcher)
        done = steps_of(recipe)
        until(lambda: steps_of(recipe) > done, launcher)
        third = ranks_of(launcher.pid)
        assert sorted(third) == [0]
        launcher.send_signal(signal.SIGUSR1)
        text, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + signal.SIGUSR1
    assert gone(third.values())
    assert f"rank 1 (process {first[1]}) was killed by SIGKILL" in text
    assert "restart 1 of 3 on 2 ranks, from the newest checkpoint" in text
    assert "restart 2 of 3 on 1 ranks, from the newest checkpoint" in text
    assert "going on from" in text
    assert "stopped by SIGUSR1 after" in text
    assert "Traceback" not in errors


def test_what_is_wrong_with_the_recipe_is_not_tried_again(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    line = command(recipe, "--ranks", "2", "grid.depth=2", "model.width=32", "--restarts", "3")
    with forked_commands():
        done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "but the model takes [32, 32, 32]" in done.stderr
    assert "restart" not in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_starts_ranks_again_from_the_newest_checkpoint(
    tmp_path: Path, universes: Path
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["-m", "hyperslab", "train", str(recipe), "grid.depth=2", "epochs=100000"]
    line = [sys.executable, *torchrun, "--max-restarts=1", *arguments, "checkpoint.every_steps=3"]
    pipe = subprocess.PIPE
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(line, stdout=pipe, stderr=errors, text=True)
    try:
        history = tmp_path / "run" / "steps.csv"
        until(lambda: history.exists() and steps_of(recipe) > 4, process)
        first = ranks_of(process.pid)
        os.kill(first[1], signal.SIGKILL)
        until(lambda: gone(first.values()), process)
        done = steps_of(recipe)
        until(lambda: steps_of(recipe) > done, process)
    finally:
        process.terminate()
        text, _ = process.communicate(timeout=PATIENCE)
    assert f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-'}" in text
