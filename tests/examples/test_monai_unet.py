"""MONAI's U-Net on whole scans, cut and not (tier: processes by torchrun, gloo)."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.formats.nifti.lists import decathlon

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = ((20, 24, 18), (17, 21, 26), (24, 19, 22))


def code(name: str) -> list[str]:
    """Without the docstring and empty lines."""
    text = (EXAMPLES / name).read_text()
    return [line for line in text.split('"""', 2)[2].splitlines() if line.strip()]


def test_the_twins_differ_by_five_lines() -> None:
    found = list(difflib.ndiff(code("monai_unet_serial.py"), code("monai_unet.py")))
    assert len([line for line in found if line.startswith("+ ")]) == 5
    assert len([line for line in found if line.startswith("- ")]) <= 5


def run(folder: Path, *command: str) -> list[float]:
    """The losses of the epochs, and the Dice."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(folder), "--epochs", "2"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"(?:loss|scans:) ([\d.]+)$", done.stdout, re.M)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scans")
    decathlon(path, SHAPES)
    return path


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    found = run(folder, str(EXAMPLES / "monai_unet_serial.py"))
    assert len(found) == 3
    assert found[1] < found[0]
    return found


def torchrun(ranks: int) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(ranks), "--local-ranks-filter", "0"]
    return ["-m", "torch.distributed.run", *options, str(EXAMPLES / "monai_unet.py")]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_agree(folder: Path, serial: list[float], ranks: int) -> None:
    command = [str(EXAMPLES / "monai_unet.py")] if ranks == 1 else torchrun(ranks)
    found = run(folder, *command, "--depth", str(ranks))
    assert found[:2] == pytest.approx(serial[:2], rel=1e-4)
    assert found[2] == pytest.approx(serial[2], abs=0.01), "Adam makes steps of rounding errors"
