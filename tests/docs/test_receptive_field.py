"""The page on CAMELS' layout: its recipe reads such files, its commands run (tier: processes)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hyperslab as hs
from hyperslab.recipe.load import load_recipe
from tests.docs.blocks import DOCS, blocks_of
from tests.formats.arrays.published import camels

pytestmark = pytest.mark.usefixtures("forked")

BLOCKS = blocks_of((DOCS / "receptive-field.md").read_text())
RECIPE = next(block.code for block in BLOCKS if block.language == "yaml")
COMMANDS = next(block.code for block in BLOCKS if "twin" in block.run).splitlines()


def test_its_recipe_makes_channels_of_fields(tmp_path: Path) -> None:
    camels(tmp_path / "CMD", fields=("Mgas", "T", "Z"))
    (tmp_path / "camels.yaml").write_text(RECIPE)
    said = load_recipe(tmp_path / "camels.yaml").data.mapping
    with hs.open(tmp_path / "CMD", hs.Grid(), batch_size=2, mapping=said) as data:
        assert data.shape == (3, 16, 16, 16)
        assert data.parameters.names[:2] == ("Omega_m", "sigma_8")
        assert len(data.parameters.names) == 6


def test_its_commands_run_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "camels.yaml").write_text(RECIPE)
    said: dict[str, str] = {}
    for line in COMMANDS:
        program, *words = shlex.split(line.removeprefix("$ "))
        script = [str(DOCS.parent / words[0]), *words[1:]]
        command = script if program == "python" else ["-m", program, *words]
        fewer = ["epochs=1"] if words[0] == "train" else []
        done = subprocess.run(
            [sys.executable, *command, *fewer], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said[words[0]] = done.stdout
    assert "Omega_m" in said["inspect"]
    assert "sigma_8" in said["evaluate"]
    assert (tmp_path / "runs" / "camels" / "evaluation" / "metrics.json").exists()
