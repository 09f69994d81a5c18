"""What `hyperslab doctor` finds (tiers: no process; two ranks)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hyperslab.cli.doctor import Findings, _problems

FINE = Findings(
    host="a",
    device="NVIDIA H100 GPU-1",
    cores=8,
    clock=1000.0,
    versions={"torch": "2.13"},
    message=1e-3,
    written=0.1,
    read=0.1,
    sees_folder=True,
)
NODES = [
    replace(FINE, host=host, device=f"NVIDIA H100 GPU-{host}{at}") for host in "ab" for at in "01"
]


def test_nothing_is_wrong_with_two_equal_nodes() -> None:
    assert _problems(NODES, Path("/data")) == []


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ([NODES[0], NODES[2], NODES[1], NODES[3]], "--distribution=block"),
        (NODES[:3], "different numbers of ranks"),
        ([*NODES[:3], replace(NODES[3], device=NODES[2].device)], "share a GPU on b"),
        ([*NODES[:3], replace(NODES[3], message=1.0)], "messages of rank 3"),
        ([*NODES[:2], *(replace(one, sees_folder=False) for one in NODES[2:])], "ranks 2 and 3"),
        ([*NODES[:3], replace(NODES[3], clock=1003.0)], "clocks differ by 3.0 s"),
        ([*NODES[:3], replace(NODES[3], versions={"torch": "2.12"})], "rank 3 have other versions"),
    ],
    ids=["order", "uneven", "shared", "slow", "folder", "clocks", "versions"],
)
def test_each_problem_is_named(found: list[Findings], word: str) -> None:
    (said,) = _problems(found, Path("/data"))
    assert word in said


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hyperslab", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.usefixtures("forked")
def test_two_ranks(tmp_path: Path) -> None:
    done = doctor("--ranks", "2", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == ["ranks", "devices", "links", "files", "clocks", "versions", "done"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked")
def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = doctor("--folder", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "none cannot be written on" in done.stderr
    assert "No such file" in done.stderr
