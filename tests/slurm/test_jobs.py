"""Jobs of a real Slurm on two nodes: the files in slurm/, and failures (tier: Slurm's daemons).

Run by `make test-slurm`. The GPUs that the jobs ask for are names only: the ranks use the CPU.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from hyperslab.checkpoint.retention import latest
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "slurm_train.py"

RECIPE = """
data: {synthetic: {width: 16, samples: 16}, batch_size: 2}
model: {variant: lbann}
grid: {depth: 2}
device: cpu
timeout: 30
epochs: 1
"""

ENDLESS = ("epochs=100000", "checkpoint.every_steps=2")


TWO_STEPS = """#!/bin/bash
srun --exact --nodes=2 --ntasks=2 "$1" "$2" one "$3" &
srun --exact --nodes=2 --ntasks=2 "$1" "$2" two "$3" &
wait
"""

STEP = """
import os, sys, time
from pathlib import Path
import torch
import hyperslab as hs
grid = hs.Grid(depth=2, timeout=30)
name, folder = sys.argv[1], Path(sys.argv[2])
(folder / f"{name} {grid.rank}").touch()
while len(list(folder.iterdir())) < 4:  # both steps are here at once
    time.sleep(0.05)
ranks = hs.shard(torch.ones(1, 1, 4, 4, 4), grid).sum().item()
print(f"{name} {os.uname().nodename} {os.environ['MASTER_PORT']} {grid.rank} of {grid.size}", ranks)
"""


class Jobs:
    """Puts in jobs of which a test reads the log."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.recipe = folder / "run.yaml"
        self.run = folder / "run"
        self.recipe.write_text(f"{RECIPE}output: {self.run}\n")
        self.log = folder / "log"

    def submit(self, file: str, words: list[str], *options: str, **environ: str) -> int:
        """One of the files in slurm/, on two nodes with a task each, if options do not differ."""
        where = ["--nodes=2", "--ntasks-per-node=1", f"--output={self.log}"]
        path = str(ROOT / "slurm" / file)
        return self.cluster.submit(*where, *options, path, *words, VENV=sys.prefix, **environ)

    def train(self, file: str, *words: str, options: tuple[str, ...] = (), **environ: str) -> int:
        return self.submit(file, [str(self.recipe), *words], *options, **environ)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def jobs(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Jobs(cluster, tmp_path)


def test_one_node(jobs: Jobs) -> None:
    job = jobs.train("one-node.sbatch", options=("--nodes=1", "--gpus-per-node=2"))
    assert jobs.cluster.end_of(job) == "COMPLETED 0", jobs.said()
    assert "Grid(data=1, depth=2, height=1, width=1) on cpu" in jobs.said()
    assert latest(jobs.run) is not None


def test_several_nodes(jobs: Jobs) -> None:
    job = jobs.train("several-nodes.sbatch")
    assert jobs.cluster.end_of(job) == "COMPLETED 0", jobs.said()
    assert "Grid(data=1, depth=2, height=1, width=1) on cpu" in jobs.said()
    assert latest(jobs.run) is not None


def test_ranks_that_are_dealt_round_robin_are_numbered_by_node(jobs: Jobs) -> None:
    cyclic = ("--ntasks-per-node=2", "--distribution=cyclic")
    job = jobs.train("several-nodes.sbatch", "grid.height=2", options=cyclic)
    assert jobs.cluster.end_of(job) == "COMPLETED 0", jobs.said()
    assert "0, 1, ... are their launcher's 0, 2, 1, 3\n" in jobs.said()
    assert "4 ranks on 2 nodes: height inside; depth across; 50% of the halos'" in jobs.said()


def test_torchrun(jobs: Jobs) -> None:
    job = jobs.train("torchrun.sbatch", options=("--gpus-per-node=1",))
    assert jobs.cluster.end_of(job) == "COMPLETED 0", jobs.said()
    assert latest(jobs.run) is not None


def test_a_container(jobs: Jobs, tmp_path: Path) -> None:
    """In place of Apptainer is a script, which says how it was called and runs the command here."""
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nshift 5\nexec "$@"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{sys.prefix}/bin:{os.environ['PATH']}"
    job = jobs.train("container.sbatch", IMAGE="own.sif", BIND="/scratch", PATH=path)
    assert jobs.cluster.end_of(job) == "COMPLETED 0", jobs.said()
    called = f"exec --nv --bind /scratch own.sif hyperslab train {jobs.recipe}\n"
    assert (tmp_path / "called").read_text() == 2 * called


def test_a_signal_before_the_end_of_the_time_requeues_and_the_run_goes_on(jobs: Jobs) -> None:
    """As ``--signal=USR1@300``: to the tasks, not to the batch script."""
    job = jobs.train("requeue.sbatch", *ENDLESS)
    jobs.cluster.wait_for(job, lambda: latest(jobs.run) is not None)
    jobs.cluster.run("scancel", "--signal=USR1", str(job))
    jobs.cluster.start_again(job)
    jobs.cluster.wait_for(job, lambda: "going on from" in jobs.said())
    assert jobs.cluster.state(job)["Restarts"] == "1"
    jobs.cluster.run("scancel", str(job))
    jobs.cluster.end_of(job)
    saved, resumed = re.findall(r"(?:stopped by SIGUSR1 after|from) \S*step-(\d+)", jobs.said())
    assert int(resumed) == int(saved) > 0, jobs.said()


def test_a_dead_rank_ends_the_job_and_is_named(jobs: Jobs) -> None:
    job = jobs.train("requeue.sbatch", *ENDLESS)
    jobs.cluster.wait_for(job, lambda: latest(jobs.run) is not None)
    os.kill(jobs.cluster.rank_process(job, 1), signal.SIGKILL)
    assert jobs.cluster.end_of(job) == "FAILED 137"
    assert jobs.said().count("error: rank 0 lost contact with rank 1 ") == 1, jobs.said()
    assert jobs.cluster.state(job)["Restarts"] == "0"


def test_a_script_with_a_grid_of_its_own(jobs: Jobs, tmp_path: Path) -> None:
    """It goes on by itself when the batch script, which gets the signal, has requeued the job."""
    words = [str(SCRIPT), "--epochs=100000", f"--out={tmp_path / 'out'}"]
    job = jobs.submit("script.sbatch", words, "--ntasks=2")
    jobs.cluster.wait_for(job, lambda: "epoch 3 " in jobs.said())
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    jobs.cluster.start_again(job)
    again = "time is over: back into the queue"
    jobs.cluster.wait_for(job, lambda: "\nepoch " in jobs.said().partition(again)[2])
    jobs.cluster.run("scancel", str(job))
    jobs.cluster.end_of(job)
    first, _, second = jobs.said().partition(again)
    epochs = [
        [int(n) for n in re.findall(r"^epoch (\d+) ", part, re.M)] for part in (first, second)
    ]
    assert epochs[0][:3] == [1, 2, 3]  # once, and not by every rank
    assert epochs[1][0] in (epochs[0][-1], epochs[0][-1] + 1), jobs.said()


def test_two_steps_of_a_job_at_once_meet_apart(jobs: Jobs, tmp_path: Path) -> None:
    batch, step, here = tmp_path / "batch", tmp_path / "step.py", tmp_path / "here"
    batch.write_text(TWO_STEPS)
    step.write_text(STEP)
    here.mkdir()
    words = [str(batch), sys.executable, str(step), str(here)]
    log = f"--output={jobs.log}"
    job = jobs.cluster.submit("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", log, *words)
    assert jobs.cluster.end_of(job) == "COMPLETED 0", jobs.said()
    said = re.findall(r"^(one|two) (node\d) (\d+) (\d) of 2 64.0$", jobs.said(), re.M)
    assert {(name, node, rank) for name, node, _, rank in said} == {
        (name, f"node{rank}", str(rank)) for name in ("one", "two") for rank in range(2)
    }, jobs.said()
    assert len({(name, port) for name, _, port, _ in said}) == 2
    assert len({port for _, _, port, _ in said}) == 2


def test_the_doctor_sees_two_nodes(jobs: Jobs, tmp_path: Path) -> None:
    words = (sys.executable, "-m", "hyperslab", "doctor", "--folder", str(tmp_path))
    tasks = ("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    said = jobs.cluster.run(*tasks, *words, code=None)
    assert "ranks      4 on 2 nodes" in said
    problems = [line for line in said.splitlines() if line.startswith("problem")]
    # A machine that runs other programs may be slow to one of four ranks.
    assert [one for one in problems if "times as long as others'" not in one] == [], said
    around = ("srun", "--nodes=2", "--ntasks=4", "--distribution=cyclic")
    assert "--distribution=block" in jobs.cluster.run(*around, *words, code=1)


def test_a_study_runs_its_points_on_both_nodes(jobs: Jobs, tmp_path: Path) -> None:
    words = ("scale", "strong", str(jobs.recipe), "--ranks", "1,2,4", "--epochs", "2")
    out = ("--output", str(tmp_path / "study"))
    tasks = ("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    said = jobs.cluster.run(*tasks, sys.executable, "-m", "hyperslab", *words, *out)
    rows = [line.split(",") for line in (tmp_path / "study" / "study.csv").read_text().split()]
    assert [row[0] for row in rows] == ["ranks", "1", "2", "4"], said
    assert "take turns" not in said


def test_a_sweep_deals_its_runs_to_groups_on_both_nodes(jobs: Jobs, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    keys = f"{{recipe: run.yaml, output: {tmp_path / 'swept'}, rates: [0.001, 0.01]"
    sweep.write_text(f"{keys}, seeds: [0, 1], variants: {{all: {{}}}}}}")
    words = ("sweep", str(sweep), "--ranks", "2", "grid.depth=2")
    tasks = ("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    said = jobs.cluster.run(*tasks, sys.executable, "-m", "hyperslab", *words)
    assert "4 of 4" in said
    assert "failed" not in said


def test_universes_are_simulated_by_tasks(jobs: Jobs, tmp_path: Path) -> None:
    words = ("simulate", str(tmp_path / "made"), "--count", "5", "--size", "8", "--steps", "2")
    tasks = ("srun", "--nodes=2", "--ntasks=2")
    jobs.cluster.run(*tasks, sys.executable, "-m", "hyperslab", *words)
    assert len([*(tmp_path / "made").iterdir()]) == 5


def test_wrong_variables_and_numbers_are_one_error_of_each_rank(jobs: Jobs) -> None:
    train = ["env", "-u", "SLURM_LOCALID", f"{sys.prefix}/bin/hyperslab", "train", str(jobs.recipe)]
    said = jobs.cluster.run("srun", "--nodes=2", "--ntasks=2", *train, code=1)
    assert said.count("error: SLURM_LOCALID is not set, but SLURM_JOB_ID=") == 2, said
    assert "Traceback" not in said
    said = jobs.cluster.run("srun", "--ntasks=3", sys.executable, str(SCRIPT), code=1)
    assert said.count("depth=2, height=1, width=1) has 2 places but there are 3 ranks") == 3, said


def test_each_task_sees_a_gpu_of_its_own(cluster: SlurmCluster) -> None:
    """What `hyperslab.comm.bootstrap` takes for granted: one device, whatever the task's number."""
    words = ["sh", "-c", "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"]
    said = cluster.run("srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", *words)
    assert sorted(said.splitlines()) == ["0 0", "0 0", "1 1", "1 1"]
