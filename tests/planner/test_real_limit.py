"""What the plan says of memory, under a limit that the system holds (tier: real processes)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hyperslab.planner.job import job_of
from hyperslab.planner.machine import load_machine
from hyperslab.planner.search import PlanBounds, trace_one
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection
from tests.planner.small import recipe_file
from tests.ports import unused_port

RANK = """
import resource, sys
from hyperslab.cli import main
from hyperslab.planner.search import PROCESS_STATUS, process_bytes
process_bytes()  # imports what a training imports
lines = dict(line.split(":", 1) for line in PROCESS_STATUS.read_text().splitlines())
taken = int(lines["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + int(sys.argv.pop(1)), resource.RLIM_INFINITY))
main()
"""
"""One rank that may have so many bytes beside what a process without tensors has.

RLIMIT_DATA counts memory that the process alone may write, touched or not. That is nearer to what
the plan speaks of than RLIMIT_AS, which counts 64 MiB of addresses for each thread's heap.
"""

DATA = {
    "synthetic": {"width": 64, "samples": 16},
    "batch_size": 8,
    "fractions": [0.5, 0.25, 0.25],
    "prefetch": 1,
    "budget": "16MiB",
}


@dataclass(frozen=True)
class Ended:
    """How the ranks of a training ended: their exit statuses, and what they said."""

    statuses: list[int]
    words: str


def train_within(path: Path, grid: GridSection, room: int) -> Ended:
    """Train on a grid whose ranks may have ``room`` [B] for tensors each."""
    axes = [f"grid.{axis}={extent}" for axis, extent in grid.model_dump().items()]
    run = path.parent / f"{grid.size} ranks with {room}"
    words = ["train", str(path), *axes, "timeout=20", f"--output={run}"]
    command = [sys.executable, "-c", RANK, str(room), *words]
    world = {"WORLD_SIZE": grid.size, "MASTER_ADDR": "localhost", "MASTER_PORT": unused_port()}
    world["OMP_NUM_THREADS"] = 1  # the limit counts stacks of threads, which are no tensors
    ranks = []
    for rank in range(grid.size):
        names = {**world, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": grid.size}
        env = {**os.environ, **{name: str(value) for name, value in names.items()}}
        ranks.append(
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    said = "".join(rank.communicate(timeout=200)[0] for rank in ranks)
    return Ended([rank.returncode for rank in ranks], said)


@pytest.mark.long
def test_what_is_too_large_fails_and_what_is_possible_runs(tmp_path: Path) -> None:
    changes = {"epochs": 1, "device": "cpu", "model": {"width": 64}, "data": DATA}
    path = recipe_file(tmp_path, **changes)
    job = job_of(load_recipe(path))
    machine = load_machine("laptop-2core")
    bounds = PlanBounds(machine.memory, "a test")  # no process: of tensors alone
    whole = trace_one(job, GridSection(), machine, bounds)
    halves = trace_one(job, GridSection(depth=2), machine, bounds)
    room = int(1.1 * halves.memory.total)  # a peak is predicted within a tenth
    assert halves.fits(room)
    assert not whole.fits(room)
    # The first training on a machine compiles kernels, and runs without them until they are there.
    train_within(path, halves.grid, 4 * whole.memory.total)
    possible = train_within(path, halves.grid, room)
    assert possible.statuses == [0, 0], possible.words
    failed = train_within(path, whole.grid, room)
    assert failed.statuses != [0]
    assert "allocate" in failed.words or "memory" in failed.words, failed.words
    assert train_within(path, whole.grid, 2 * whole.memory.total).statuses == [0]
