"""The first page does what it says (tier: processes, two gloo ranks)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.docs.blocks import DOCS, blocks_of
from tests.ranks import run_ranks
from tests.test_readme import write_universes

pytestmark = pytest.mark.usefixtures("forked")

BLOCKS = blocks_of((DOCS / "start.md").read_text())
COUNT, SIZE = 20, 32


def commands() -> list[str]:
    """Those of `hyperslab` that need universes, in their order."""
    consoles = [block.code for block in BLOCKS if "universes" in block.run]
    return [line.removeprefix("$ ") for code in consoles for line in code.splitlines()]


@pytest.mark.long
def test_the_commands_run(tmp_path: Path) -> None:
    said = {}
    for command in commands():
        words = command.split()
        assert words[0] == "hyperslab"
        if words[1] == "simulate":  # what it makes, in less time
            write_universes(tmp_path / words[2], count=COUNT, size=SIZE)
            continue
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said[words[1]] = done.stdout
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert said.keys() == {"recipes", "train", "evaluate", "report"}


def run_own(code: str, ranks: int, folder: str) -> str:
    said = StringIO()
    size = {"WORLD_SIZE": str(ranks)}
    with chdir(folder), redirect_stdout(said), patch.dict(os.environ, size):
        exec(compile(code, "own.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def test_the_own_network_has_the_same_losses_on_all_ranks(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "as" in block.run)
    losses = []
    for ranks in map(int, block.run["ranks"].split(",")):
        said = run_ranks(ranks, run_own, block.code, ranks, str(tmp_path))[0]
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", said)])
    assert len(losses[0]) == 5
    assert losses[0][-1] < losses[0][0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    assert (tmp_path / "runs" / "own" / "step-5" / "model.safetensors").is_file()


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    root = DOCS.parent
    pages = [*root.glob("*.md"), *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    for page in pages:
        found = re.findall(r"pip install[^\n`]*\bhyperslab\b[^\n`]*", page.read_text())
        assert all("./hyperslab" in words for words in found), (page.name, found)
