"""The Triton kernels against the plain references, in the interpreter (tier: one process)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ops.kernels.fused.gpu import interpreted


def run(module: str) -> str:
    """Run a module in a process whose Triton interprets; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_are_the_references() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (Linux on x86-64 has it)")
    assert run(interpreted.__name__) == "equal\n"


def test_every_operator_has_a_kernel() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (Linux on x86-64 has it)")
    assert interpreted.on_cuda.triton_versions().keys() == interpreted.REFERENCES.keys()
