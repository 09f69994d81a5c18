"""Forked commands are like those of a fresh interpreter (tier: processes)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked")

LINE = [sys.executable, "-m", "hyperslab"]


def test_words_streams_folder_and_code(tmp_path: Path) -> None:
    done = subprocess.run([*LINE, "recipes", "copy", "demo", "mine"], cwd=tmp_path, text=True)
    assert done.returncode == 0
    assert (tmp_path / "mine" / "demo.yaml").is_file()
    said = subprocess.run([*LINE, "--version"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("hyperslab ")
    bad = subprocess.run([*LINE, "evaluate", "nowhere"], capture_output=True, text=True)
    assert bad.returncode == 1
    assert bad.stderr.startswith("error: ")


def test_signals_and_groups(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {synthetic: {width: 16, samples: 12}, batch_size: 2}\n"
        "model: {name: multiscale, channels: [2, 4]}\ndevice: cpu\ntimeout: 60\nepochs: 100000\n"
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*LINE, "train", str(recipe), "--ranks", "2", "grid.depth=2", "--output", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    assert os.getpgid(process.pid) == process.pid
    limit = time.monotonic() + 200
    while not (out / "steps.csv").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM" in said


def test_a_killed_command_says_so() -> None:
    process = subprocess.Popen([*LINE, "inspect", "."], stdout=subprocess.DEVNULL, stderr=-3)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
