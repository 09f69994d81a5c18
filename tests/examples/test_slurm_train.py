"""The engineer's script for Slurm: cut over two ranks, and its serial twin (tier: two gloo ranks).

`tests/slurm` runs it under `srun`.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import runpy
from pathlib import Path

import pytest

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CUT, SERIAL = EXAMPLES / "slurm_train.py", EXAMPLES / "slurm_train_serial.py"


def code_of(file: Path) -> list[str]:
    """Without the docstring that it begins with, and without empty lines."""
    return [line for line in file.read_text().split('"""', 2)[2].splitlines() if line.strip()]


def losses(file: Path, epochs: int, out: Path) -> list[float]:
    """What the script says of each epoch."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(file))["train"](epochs, out)
    return [float(line.rpartition(" ")[2]) for line in said.getvalue().splitlines()]


def test_it_differs_from_its_serial_twin_by_five_lines() -> None:
    changes = [line[0] for line in difflib.ndiff(code_of(SERIAL), code_of(CUT))]
    assert changes.count("+") <= 5
    assert changes.count("-") <= 5


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
def test_the_losses_are_those_of_its_serial_twin_also_when_it_goes_on(tmp_path: Path) -> None:
    serial = losses(SERIAL, 4, tmp_path / "serial")
    first = run_ranks(2, losses, CUT, 2, tmp_path / "cut")
    again = run_ranks(2, losses, CUT, 4, tmp_path / "cut")
    assert serial[3] < serial[0] / 4
    assert first[0] + again[0] == pytest.approx(serial, abs=2e-6)
    assert first[1] == again[1] == []
