"""The Triton kernels: equal to the references, compiled, or refused.

Tiers: one process; two gloo ranks; an accelerator.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch

import hyperslab as hs
from hyperslab.comm import grid as grids
from hyperslab.kernels import registry
from tests.gpus import ON_A_GPU, needs_a_gpu, needs_interpreter, needs_triton, run_module
from tests.kernels.cuda import interpreted
from tests.ranks import run_ranks

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
        "_drop",
        "_forward",
        "_normalisation",
        "_pack",
        "_pack_boxes",
        "_parameter_gradients",
        "_reorder",
        "_running_statistics",
        "_shared_sums",
        "_through_statistics",
    ]


@pytest.mark.long
def test_triton_is_tried_before_it_is_used(tmp_path: Path) -> None:
    """Each machine lacks something, and is told so in words, not by an exception in a step."""
    module = interpreted.__name__.replace("interpreted", "tried")
    said = run_module(module, TRITON_INTERPRET="0", HYPERSLAB_TRIED=str(tmp_path)).splitlines()
    told = dict(line.split(": ", 1) for line in said)
    assert "Failed to find C compiler" in told.pop("no_compiler")
    assert "returned non-zero exit status 1" in told.pop("broken_compiler")
    assert told.pop("no_cache") == f"Not a directory: {tmp_path}/no_cache/file/hyperslab"
    assert told == dict.fromkeys(
        ("own_cache", "nothing"), "its kernels compute something else than torch"
    )
    own = tmp_path / "nothing" / "cache" / "hyperslab" / "triton" / socket.gethostname()
    assert list(own.glob("*/_reorder.cubin"))
    assert own.stat().st_mode & 0o077 == 0
    assert list((tmp_path / "own_cache" / "own").glob("*/_reorder.cubin"))
    assert not (tmp_path / "own_cache" / "cache").exists()


@pytest.mark.long
@needs_interpreter
def test_triton_that_works_is_taken() -> None:
    assert run_module("tests.kernels.cuda.works", TRITON_INTERPRET="1") == "None\n"


def grid_on_cuda(failing: int | None) -> tuple[bool, list[str]]:
    """Pretends CUDA devices, on one of which Triton fails: does it run here, and what is logged?"""
    rank = torch.distributed.get_rank()
    why = "no compiler" if rank == failing else None
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    grids.log.addHandler(handler)
    guest = registry._Guest(installed=True)
    try:
        with (
            mock.patch.object(grids, "take_own_device", return_value=torch.device("cuda", 0)),
            mock.patch.object(grids, "why_triton_fails", return_value=why),
            mock.patch.object(registry, "_guest", guest),
        ):
            for _ in range(2):
                hs.Grid(depth=2)
            return registry.triton_runs(), heard
    finally:
        grids.log.removeHandler(handler)


def test_triton_runs_on_all_ranks_or_on_none() -> None:
    assert run_ranks(2, grid_on_cuda, None) == [(True, []), (True, [])]
    (first, words), (second, silent) = run_ranks(2, grid_on_cuda, 1)
    assert not first
    assert not second
    assert not silent
    (said,) = words  # once, of two grids
    assert said.startswith("the fused kernels for GPUs do not run on rank 1: no compiler\n")
    assert registry.TRITON_NEEDS in said


def test_numbers_of_double_precision_are_tritons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a normalisation; blocks of float64 are the reference's."""
    ran: list[str] = []
    monkeypatch.setattr(registry, "_guest", registry._Guest(installed=True))
    monkeypatch.setattr(registry.KernelOperator, "triton", lambda one, *_: ran.append(one.name))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    sums = torch.ones(3, 4, dtype=torch.float64)
    norm, moments = torch.ones(3, 1, 4), torch.ones(4, 1, 4, dtype=torch.float64)
    operators = registry.OPERATORS
    operators["normalisation"].on_cuda(sums, torch.ones(4), None, 9, 1e-5, 4, 1)
    operators["running_statistics"].on_cuda(moments, torch.ones(4), torch.ones(4), 0.1, 1.0)
    operators["parameter_gradients"].on_cuda(sums[:2, None], norm, moments, 1)
    operators["through_statistics"].on_cuda(sums[:2], norm, moments, 9, 1)
    assert ran == [
        "normalisation",
        "running_statistics",
        "parameter_gradients",
        "through_statistics",
    ]
    assert operators["channel_sums"].on_cuda(torch.ones(1, 2, 3).double(), 0).shape == (3, 2)


def test_refused_triton_leaves_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_guest", registry._Guest(installed=True, refused=True))
    x = torch.arange(24.0).view(1, 2, 3, 2, 2)
    reorder = registry.OPERATORS["reorder"]  # Triton would find no device for a CPU tensor
    assert torch.equal(reorder.on_cuda(x, True, torch.float32), x)
