"""The Triton kernels: equal to the references, compiled (tiers: one process; an accelerator)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpus import ON_A_GPU, needs_a_gpu, needs_interpreter, needs_triton, run_module
from tests.kernels.cuda import interpreted

pytestmark = needs_triton


@pytest.mark.long
@needs_interpreter
def test_kernels_are_the_references() -> None:
    assert run_module(interpreted.__name__, TRITON_INTERPRET="1") == "equal\n"


@pytest.mark.gpu
@needs_a_gpu
def test_kernels_on_a_gpu_are_the_references() -> None:
    assert run_module(interpreted.__name__, **ON_A_GPU) == "equal\n"


def test_the_dispatcher_has_them_for_cuda() -> None:
    for name in interpreted.REFERENCES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"hyperslab::{name}", "CUDA")


@pytest.mark.long
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    module = interpreted.__name__.replace("interpreted", "compiled")
    built = run_module(module, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert built.split() == [
        "_add_boxes",
        "_backward",
        "_backward_sums",
        "_channel_sums",
        "_forward",
        "_normalisation",
        "_pack",
        "_pack_boxes",
        "_parameter_gradients",
        "_reorder",
        "_shared_sums",
        "_through_statistics",
    ]
