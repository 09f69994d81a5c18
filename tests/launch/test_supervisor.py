"""Ranks are started, killed, frozen and stopped from outside, and nothing remains
(tiers: no process; small scripts in place of ranks).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hyperslab.errors import CommError, DataError, LayoutError, Stopped
from hyperslab.launch import supervisor
from hyperslab.launch.failures import RankLost
from hyperslab.launch.supervisor import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PATIENCE = 60  # [s]

# Says who it is, in a file; then does what the rest of its arguments are.
RANK = """
import os, signal, subprocess, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
child = subprocess.Popen(["sleep", "1000"])
with open(f"{folder}/rank-{rank}.partial", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(f"{folder}/rank-{rank}.partial", f"{folder}/rank-{rank}")
exec(sys.argv[2])
"""

WAIT = "time.sleep(1000)"


def started(folder: Path, ranks: int) -> list[tuple[int, int]]:
    """Process ids of the ranks and of their children, once all are there."""
    files = [folder / f"rank-{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() for file in files))
    found = [file.read_text().split() for file in files]
    return [(int(rank), int(child)) for rank, child in found]


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not get there"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # the process that adopted it has not asked for it yet


def gone(pids: Iterable[int], seconds: float = PATIENCE) -> None:
    """Wait for their end: it takes a moment after SIGKILL."""
    found = list(pids)
    until(lambda: not any(map(alive, found)), seconds)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SETTLE", 0.5)
    monkeypatch.setattr(supervisor, "AFTER_TERM", 1.0)


def run(folder: Path, program: str, *, ranks: int = 2, limit: float = 60) -> None:
    launch(ranks, ["-c", RANK, str(folder), program], folder / "logs", limit=limit, patience=5)


def launcher(folder: Path, program: str, prelude: str = "") -> subprocess.Popen[str]:
    """A process that launches two ranks of that program."""
    script = (
        f"{prelude}\nimport sys; from pathlib import Path\n"
        "from tests.launch.test_supervisor import run\n"
        "run(Path(sys.argv[1]), sys.argv[2])"
    )
    line = [sys.executable, "-c", script, str(folder), program]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)


def test_ranks_that_end_well(tmp_path: Path) -> None:
    run(tmp_path, "child.kill()")
    gone(pid for pair in started(tmp_path, 2) for pid in pair)


def test_more_ranks_than_the_machine_has_memory_for_are_not_started(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"1000000000 ranks do not fit into the .* GiB"):
        launch(10**9, ["-c", "pass"], tmp_path, limit=60)
    assert not [*tmp_path.iterdir()]


def test_a_dead_rank_is_named_and_the_others_end_with_what_they_started(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match=r"rank 1 \(process \d+\) was killed by SIGKILL") as caught:
        run(tmp_path, f"os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else {WAIT}")
    assert caught.value.rank == 1
    gone(pid for pair in started(tmp_path, 2) for pid in pair)


def test_a_frozen_rank_is_named_within_the_limit(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(
        CommError, match=r"rank 1 .* does not answer: it has been stopped for 0\.5 s"
    ):
        run(tmp_path, f"os.kill(os.getpid(), signal.SIGSTOP) if rank == '1' else {WAIT}", limit=0.5)
    assert time.monotonic() - begin < 30
    gone(pid for pair in started(tmp_path, 2) for pid in pair)


def test_a_rank_that_is_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    wake = "subprocess.Popen(['sh', '-c', f'sleep 0.3; kill -CONT {os.getpid()}'])"
    program = f"child.kill(); {wake}; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1)"
    run(tmp_path, program, ranks=1, limit=10)


def test_a_rank_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with pytest.raises(RankLost, match=r"rank 0 .* was killed by SIGABRT"):
        run(tmp_path, f"os.abort() if rank == '0' else {ignore}; {WAIT}")
    gone(pid for pair in started(tmp_path, 2) for pid in pair)


RAISE = """
from torch.distributed.elastic.multiprocessing.errors import record
from hyperslab.errors import DataError
def fail(): raise DataError("a.hdf5: truncated")
record(fail)()
"""


def test_what_a_rank_raises_comes_back_and_needs_no_disk(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="truncated"):
        run(tmp_path, RAISE, ranks=1)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_reaches_the_ranks_and_all_end(tmp_path: Path, number: int) -> None:
    send = (
        "while not {'rank-0', 'rank-1'} <= {*os.listdir(folder)}: time.sleep(0.02)\n"
        f"if rank == '0': os.kill({os.getpid()}, {int(number)})\n"
    )
    with pytest.raises(Stopped) as caught:
        run(tmp_path, send + WAIT)
    assert caught.value.code == 128 + number
    gone(pid for pair in started(tmp_path, 2) for pid in pair)


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(tmp_path, "os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3); child.kill()")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nobody_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """One rank is frozen, the other one ignores that it shall end."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    freeze = "os.kill(os.getpid(), signal.SIGSTOP)"
    process = launcher(tmp_path, f"{freeze} if rank == '1' else {ignore}; {WAIT}")
    pids = [pid for pair in started(tmp_path, 2) for pid in pair]
    group = os.getpgid(pids[0])
    time.sleep(0.5)  # they say that they are there before they do it
    process.kill()
    process.communicate()
    gone([*pids, group])


def test_nor_one_that_is_killed_while_the_ranks_begin(tmp_path: Path) -> None:
    """When the first rank is there, the second one is not."""
    slow = (
        "import subprocess, time; start = subprocess.Popen\n"
        "class Slow(start):\n"
        "    def __init__(self, *args, **keys):\n"
        "        super().__init__(*args, **keys); time.sleep(0.5)\n"
        "subprocess.Popen = Slow"
    )
    process = launcher(tmp_path, WAIT, slow)
    until((tmp_path / "rank-0").exists)
    pids = list(map(int, (tmp_path / "rank-0").read_text().split()))
    group = os.getpgid(pids[0])
    process.kill()
    process.communicate()
    gone([*pids, group])


def test_a_killed_guard_is_replaced(tmp_path: Path) -> None:
    process = launcher(tmp_path, WAIT)
    pids = [pid for pair in started(tmp_path, 2) for pid in pair]
    group = os.getpgid(pids[0])
    os.kill(group, signal.SIGKILL)

    def guards() -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(pid) for pid in children if int(pid) not in (*pids, group)]

    until(lambda: bool(guards()))
    (guard,) = guards()
    process.kill()
    process.communicate()
    gone([*pids, guard])
