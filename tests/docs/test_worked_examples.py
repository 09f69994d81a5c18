"""What pages show of a command's output is what the command prints (tier: a few child processes).

An ellipsis stands for words that are left out, at a line's end for the rest of the line.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.docs.blocks import DOCS, blocks_of
from tests.forked import forked_commands


def check(page: str, heading: str, *, but: tuple[str, ...] = ()) -> None:
    """Run the commands of the first console block below a heading, and compare what they print."""
    section = (DOCS / page).read_text().partition(f"{heading}\n")[2]
    block = next(block for block in blocks_of(section) if block.language == "console")
    examples = re.split(r"^\$ ", block.code, flags=re.M)[1:]
    while "\n" not in examples[-1].strip():  # nothing is said of it, and nothing follows
        examples.pop()
    shown = 0
    for example in examples:
        line, _, output = example.partition("\n")
        words = [word for word in shlex.split(line, comments=True)[1:] if word not in but]
        with forked_commands():
            command = [sys.executable, "-m", "hyperslab", *words]
            done = subprocess.run(command, capture_output=True, text=True)
        if not output.strip():
            continue
        printed = " ".join((done.stdout + done.stderr).split())
        for wanted in output.splitlines() if page == "planning.md" else [output]:
            pattern = re.escape(" ".join(wanted.split()))
            pattern = re.sub(r"(?:\\ )?(?:\\\.){3}", ".*?", pattern)
            assert re.search(pattern, printed), f"{page}: {wanted}\nprinted: {printed}"
            shown += 1
    assert shown, "the page shows no output"


@pytest.mark.long  # 10 s: 2,048 ranks are planned
def test_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    check("planning.md", "## A worked example", but=("--figure", "plan.png"))


def test_what_a_grid_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check("formats.md", "## What a grid costs")


def test_whose_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "data: {synthetic: {width: 16, samples: 10}, batch_size: 4}\n"
        "model: {name: multiscale, channels: [2, 4]}\n"
        "epochs: 1\ndevice: cpu\noutput: theirs\n"
    )
    train(load_recipe("mine.yaml"))
    values = yaml.safe_load(Path("theirs/recipe.yaml").read_text())
    values["model"] = {"target": "monai.networks.nets.SegResNet"}
    Path("theirs/recipe.yaml").write_text(yaml.safe_dump(values))
    check("own-networks.md", "### Whose code runs")
