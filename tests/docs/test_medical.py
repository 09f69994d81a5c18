"""The page on medical images does what it says (tier: processes, two gloo ranks)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import DOCS, blocks_of

pytestmark = pytest.mark.usefixtures("forked")

BLOCKS = blocks_of((DOCS / "medical.md").read_text())
RECIPE = DOCS.parent / "recipes" / "segresnet.yaml"
KILLED = "train"
"""The first command of this name is ended by SIGKILL once it has written a checkpoint."""


def commands() -> list[list[str]]:
    consoles = [block.code for block in BLOCKS if "medical" in block.run]
    return [line.removeprefix("$ ").split() for code in consoles for line in code.splitlines()]


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    assert words[0] == "hyperslab"
    epochs = ["epochs=2"] if words[1] == "train" else []  # fewer than the recipe's
    return subprocess.Popen(
        [sys.executable, "-m", *words, *epochs],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_after_a_checkpoint(process: subprocess.Popen[str], folder: Path) -> None:
    """As a job that ends: the command and its ranks."""
    limit = time.monotonic() + 240
    while not list(folder.glob("runs/*/checkpoints/step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.long
def test_the_commands_run(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    for words in commands():
        process = start(words, tmp_path)
        if words[1] == KILLED and KILLED not in said:
            kill_after_a_checkpoint(process, tmp_path)
            said[KILLED] = ""
            continue
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"{' '.join(words)}\n{output}"
        said[words[1]] = said.get(words[1], "") + output
    assert "shapes" in said["inspect"]
    assert "background, liver, tumour" in said["inspect"]
    assert "the volumes differ in shape" in said["plan"]
    assert "Hausdorff" in said["evaluate"]
    run = tmp_path / "runs/segresnet"
    rows = (run / "epochs.csv").read_text().splitlines()
    assert len(rows) == 3, "two epochs, and none twice"
    assert (run / "report.html").is_file()
    assert len(list((tmp_path / "masks").glob("volume-*-mask.nii.gz"))) == 8
    assert (tmp_path / "windows/volume-0-mask.nii.gz").is_file()
    metrics = json.loads((run / "evaluation/metrics.json").read_text())
    assert metrics["channels"] == ["CT"]


def test_the_recipe_of_the_page_is_the_one_that_comes_along() -> None:
    (shown,) = (yaml.safe_load(block.code) for block in BLOCKS if block.language == "yaml")
    shipped = yaml.safe_load(RECIPE.read_text())
    for key, value in shown.items():
        assert {k: shipped[key][k] for k in value} == value, key


@pytest.mark.parametrize("name", ["monai_unet", "monai_unet_serial"])
def test_the_examples_are_there(name: str) -> None:
    assert (DOCS.parent / "examples" / f"{name}.py").is_file()
