"""The Triton kernels: equal to the references in the interpreter, compiled (tier: one process)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.kernels.fused.gpu import interpreted


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (Linux on x86-64 has it)")


def run(module: str, **variables: str) -> str:
    """Run a module in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_are_the_references() -> None:
    assert run(interpreted.__name__, TRITON_INTERPRET="1") == "equal\n"


def test_every_operator_has_a_kernel() -> None:
    assert interpreted.on_cuda.triton_versions().keys() == interpreted.REFERENCES.keys()


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    module = interpreted.__name__.replace("interpreted", "compiled")
    built = run(module, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert built.split() == [
        "_backward",
        "_backward_sums",
        "_channel_sums",
        "_forward",
        "_pack",
        "_reorder",
    ]
