"""Type checkers know a network's own attributes after `parallelize` (tier: a process of mypy)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import hyperslab as hs
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width: int = 8

    def describe(self) -> str:
        return f"{self.width} channels"


net = hs.parallelize(Net(), hs.Grid())
words: str = net.describe()
width: int = net.width
reveal_type(net)
with hs.no_sync(net):
    pass
"""


@pytest.mark.long
def test_own_attributes_survive_under_mypy_strict(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache'}"]
    command = [sys.executable, "-m", "mypy", *options, str(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert 'Revealed type is "script.Net"' in found.stdout, found.stdout + found.stderr
    assert "error:" not in found.stdout, found.stdout
