"""Tests on a CUDA device: `make test-gpu` runs all of them.

With ``HYPERSLAB_TEST_DEVICE=cuda`` the samples of operators, which otherwise are CPU tensors, are
CUDA tensors, on ranks that share the device over gloo. Only tests that compare such samples then
run, besides those that are marked ``gpu``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist

from hyperslab.comm.bootstrap import GLOO_ON_CUDA

SAMPLES_ON = os.environ.get("HYPERSLAB_TEST_DEVICE", "cpu")
BACKEND = "gloo" if SAMPLES_ON == "cpu" else GLOO_ON_CUDA

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (Linux on x86-64 has it)",
)


ON_A_GPU = {"HYPERSLAB_TEST_DEVICE": "cuda", "TRITON_INTERPRET": "0"}
"""Variables for `run_module`."""


def interprets() -> bool:
    """Whether Triton's interpreter can be trusted: 3.5's does not go with NumPy 2.4."""
    if importlib.util.find_spec("triton") is None:
        return False
    major, minor, *_ = importlib.metadata.version("triton").split(".")
    return (int(major), int(minor)) >= (3, 9)


needs_interpreter = pytest.mark.skipif(
    not interprets(), reason="Triton's interpreter before 3.9 was not tried, or is not there"
)


def run_module(module: str, **variables: str) -> str:
    """Run a module in a process of its own, whose Triton interprets, say; what it printed."""
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


def settle_device() -> None:
    """In a rank: compute on the samples' device, float32 as such and not as TF32."""
    if SAMPLES_ON == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cudnn.allow_tf32 = False


def making_tensors() -> AbstractContextManager[object]:
    """A context in which operators make new tensors where the samples are."""
    return contextlib.nullcontext() if SAMPLES_ON == "cpu" else torch.device(SAMPLES_ON)


def runs_samples(item: pytest.Item) -> bool:
    """Whether a test compares samples of operators."""
    function = getattr(item, "function", None)
    return function is not None and "compare" in function.__code__.co_names


def share_devices(store: str) -> None:
    """From now on the ranks of this call are on one device, if there is one."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        GLOO_ON_CUDA,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
