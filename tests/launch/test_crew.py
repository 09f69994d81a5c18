"""Studies on tasks that something else has started (tier: processes that start processes)."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hyperslab.errors import CommError
from hyperslab.launch.crew import Mail
from tests.ports import unused_port
from tests.train.universes import write_universes

pytestmark = pytest.mark.usefixtures("forked")

RECIPE = """
data: {synthetic: {width: 16, samples: 16, channels: 2, classes: 2}, batch_size: 2}
model: {name: unet3d, channels: 2, levels: 1}
loss: cross_entropy
device: cpu
timeout: 60
epochs: 1
"""


def as_tasks(count: int, *words: str) -> list[tuple[int, str]]:
    """Run a command as so many tasks do; their exit codes, and what they write."""
    port = str(unused_port())
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "hyperslab", *words],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    said = [task.communicate(timeout=300)[0] for task in tasks]
    return [(task.returncode, words) for task, words in zip(tasks, said, strict=True)]


def test_the_points_of_a_study_run_on_the_tasks_that_there_are(tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "study"
    recipe.write_text(RECIPE)
    words = ["scale", "strong", str(recipe), "--epochs", "2", "--output", str(out)]
    found = as_tasks(2, *words, "--ranks", "1,2")
    assert [code for code, _ in found] == [0, 0], found
    rows = [*csv.DictReader((out / "study.csv").read_text().splitlines())]
    assert [row["ranks"] for row in rows] == ["1", "2"]
    assert found[1][1] == "", "the main rank alone speaks"
    found = as_tasks(2, *words, "--ranks", "1,2,4")
    assert "a point has 4 ranks, and 2 were started" in found[0][1]


def test_volumes_are_converted_by_the_tasks_that_there_are(tmp_path: Path) -> None:
    write_universes(tmp_path / "made", 3, width=8)
    for tasks in (1, 2):
        words = ["convert", str(tmp_path / "made"), str(tmp_path / f"by-{tasks}"), "--cut", "2,1,1"]
        found = as_tasks(tasks, *words)
        assert [code for code, _ in found] == [0] * tasks, found
        assert "3 volumes" in found[0][1]
    alone, together = (
        {path.name: path.read_bytes() for path in (tmp_path / f"by-{tasks}").glob("*.hdf5")}
        for tasks in (1, 2)
    )
    assert alone == together
    assert len(alone) == 3
    assert "3 kept" in as_tasks(2, *words)[0][1]


def test_words_of_somebody_else_are_not_read() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    ours, theirs = Mail(store, b"ours"), Mail(store, b"theirs")
    ours.post("task 1 0", ("a", 1))
    assert ours.fetch("task 1 0") == ("a", 1)
    with pytest.raises(CommError, match="somebody else has written 'task 1 0'"):
        theirs.fetch("task 1 0")
    store.set("task 1 1", store.get("task 1 0").decode())  # said before, of another task
    with pytest.raises(CommError, match="somebody else has written 'task 1 1'"):
        ours.fetch("task 1 1")


@pytest.mark.long
def test_a_sweep_goes_on_beside_a_run_that_fails(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    sweep = {
        "recipe": "recipe.yaml",
        "output": str(tmp_path / "swept"),
        "rates": [0.001, 1e30],
        "seeds": [0, 1],
        "variants": {"all": {}},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    found = as_tasks(2, "sweep", str(tmp_path / "sweep.yaml"), "--ranks", "1")
    done = json.loads((tmp_path / "swept" / "sweep.json").read_text())
    assert done["variants"][0]["rate"] == 0.001, found
