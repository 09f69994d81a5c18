"""Ranks started, killed and stopped from outside (tiers: no process; the real command line)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hyperslab.checkpoint.retention import latest
from hyperslab.cli.rank import check_ranks
from hyperslab.errors import CommError, DataError, HyperslabError, LayoutError, Stopped
from hyperslab.launch.launcher import explain_failures, settle_environment
from hyperslab.launch.slurm import adopt_slurm, first_host
from hyperslab.recipe.load import load_recipe
from tests.train.universes import losses, write_recipe

PATIENCE = 200  # [s]


def failure(tmp_path: Path, rank: int, exitcode: int, words: str = "", when: int = 0):  # type: ignore[no-untyped-def]
    file = tmp_path / f"{rank}.json"
    if words:
        extra = {"py_callstack": "", "timestamp": str(when)}
        file.write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(file))


def test_a_killed_rank_is_the_cause_although_others_failed_earlier(tmp_path: Path) -> None:
    output = tmp_path / "stderr.log"
    output.write_text("".join(f"line {i}\n" for i in range(50)))
    failures = {
        0: failure(tmp_path, 0, 1, "CommError: rank 0 lost another rank", when=1),
        1: failure(tmp_path, 1, -signal.SIGKILL),
        2: failure(tmp_path, 2, -signal.SIGTERM),
        3: failure(tmp_path, 3, 128 + signal.SIGTERM),
    }
    error = explain_failures(failures, {1: output})
    assert isinstance(error, CommError)
    assert str(error).startswith("rank 1 (process 101) was killed by SIGKILL")
    assert "--resume" in str(error)
    assert "| line 49" in str(error)
    assert "| line 30" not in str(error)


def test_what_a_rank_raised_comes_back_as_it_was(tmp_path: Path) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, "CommError: rank 0 lost another rank", when=5),
        1: failure(tmp_path, 1, 1, "DataError: a.hdf5: truncated", when=6),
    }
    error = explain_failures(failures, {})
    assert type(error) is DataError
    assert str(error) == "a.hdf5: truncated\n    (rank 1)"


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGTERM])
def test_what_a_rank_raised_goes_before_its_or_another_ranks_death(
    tmp_path: Path, number: int
) -> None:
    said = failure(tmp_path, 1, -number, "CheckpointError: no space", when=9)
    error = explain_failures({0: failure(tmp_path, 0, -signal.SIGSEGV), 1: said}, {})
    assert type(error) is HyperslabError
    assert str(error) == "no space\n    (rank 1)"


def test_what_all_ranks_say_is_said_once_and_of_no_rank(tmp_path: Path) -> None:
    words = "DataError: nowhere: does not exist"
    error = explain_failures({rank: failure(tmp_path, rank, 1, words, 5) for rank in range(3)}, {})
    assert str(error) == "nowhere: does not exist"


def test_a_bug_quotes_its_traceback(tmp_path: Path) -> None:
    output = tmp_path / "stderr.log"
    output.write_text("Traceback ...\nKeyError: 'x'\n")
    error = explain_failures({1: failure(tmp_path, 1, 1, "KeyError: 'x'")}, {1: output})
    assert type(error) is HyperslabError
    assert "rank 1 failed with exit code 1" in str(error)
    assert "| KeyError: 'x'" in str(error)


def test_ranks_that_stopped_in_order_are_no_failure(tmp_path: Path) -> None:
    codes = {rank: failure(tmp_path, rank, 128 + signal.SIGINT) for rank in range(2)}
    error = explain_failures(codes, {})
    assert isinstance(error, Stopped)
    assert error.code == 130


def test_cores_are_shared_unless_said_otherwise() -> None:
    environ: dict[str, str] = {}
    settle_environment(environ, 1, 60.5)
    assert environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    settle_environment(environ, 64, 90)
    assert environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "61"
    environ = {}
    settle_environment(environ, 64, 90)
    assert environ["OMP_NUM_THREADS"] == "1"


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "123456",
}


def test_slurms_variables_become_torchruns() -> None:
    environ = dict(SLURM)
    adopt_slurm(environ)
    assert {k: v for k, v in environ.items() if not k.startswith("SLURM")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "23456",
    }


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # in a batch script, outside srun
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "RANK": "3"},
    ],
)
def test_what_is_no_rank_of_slurm(environ: dict[str, str]) -> None:
    before = dict(environ)
    adopt_slurm(environ)
    assert environ == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[2-4]-ib", "rack2-ib"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hyperslab", "train", *map(str, arguments)]


def test_ranks_must_fill_the_grid(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    done = subprocess.run(
        command(recipe, "--ranks", "3", "grid.depth=2"), capture_output=True, text=True
    )
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
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    gone, pipe = os.pipe()
    os.close(gone)
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


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank to process id, of the launcher's children."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                environ = (folder / "environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): int(folder.name) for v in environ if v.startswith(b"RANK=")}
        except OSError:  # it ended meanwhile
            continue
    return found


@contextmanager
def training(recipe: Path, steps: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher with two ranks that has gone beyond so many steps."""
    history = recipe.with_suffix("") / "steps.csv"
    line = command(recipe, "--ranks", "2", "grid.depth=2", "epochs=100000", *arguments)
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)
    try:
        until(lambda: history.exists() and len(history.read_text().splitlines()) > steps, process)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def gone(pids: dict[int, int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_rank_ends_all_and_a_signal_writes_a_checkpoint(
    tmp_path: Path, universes: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    every = "checkpoint.every_steps=3"

    with training(recipe, 4, every) as launcher:
        ranks = ranks_of(launcher.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 1
        assert f"error: rank 1 (process {ranks[1]}) was killed by SIGKILL" in errors
        assert "--resume" in errors
        assert "Traceback" not in errors
        assert gone(ranks)
    before = latest(out)
    assert before is not None

    # The killed run may have recorded three steps since; those of the resumed one come after them.
    with training(recipe, int(before.name[-8:]) + 4, every, "--resume") as launcher:
        ranks = ranks_of(launcher.pid)
        launcher.send_signal(signal.SIGTERM)
        text, errors = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 143
        assert "Traceback" not in errors
        assert gone(ranks)
    after = latest(out)
    assert after is not None
    assert after.name > before.name
    assert f"going on from {before}" in text
    assert f"stopped by SIGTERM after {after}" in text
    assert len(losses(out)) == int(after.name[-8:])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    with training(recipe, 1) as launcher:
        ranks = ranks_of(launcher.pid)
        launcher.kill()
        launcher.communicate()
    deadline = time.monotonic() + PATIENCE
    while not gone(ranks):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.1)
