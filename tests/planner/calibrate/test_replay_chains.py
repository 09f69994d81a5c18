"""Fused chains in a trace: recorded with their bytes, and run again by calibration
(tier: no process).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.planner.calls import read_call, write_call
from hyperslab.planner.records import LocalOperator
from hyperslab.planner.timing import Replay
from hyperslab.planner.trace import Workload, trace_step

FUSED = "hyperslab."


@cache
def fused(batch_norm: bool, precision: torch.dtype | None = None) -> list[LocalOperator]:
    """The distinct fused operators of a step on half a volume."""
    step = Workload(
        lambda: hs.models.CosmoFlow(32, batch_norm=batch_norm),
        inputs=(1, 4, 32, 32, 32),
        target=(1, 4),
        loss=F.mse_loss,
        precision=precision,
    )
    trace = trace_step(step, {"depth": 2})
    assert not trace.not_traced
    found = {op.call: op for op in trace.operators if op.call.name.startswith(FUSED)}
    return list(found.values())


def test_what_is_fused() -> None:
    plain = {op.call.name.split(".")[1] for op in fused(False)}
    assert plain >= {"chain_forward", "chain_backward"}
    normalised = {op.call.name.split(".")[1] for op in fused(True)}
    assert normalised >= plain | {"channel_sums", "chain_backward_sums"}


def test_a_chain_reads_its_block_once_and_writes_what_is_pooled() -> None:
    first = next(op for op in fused(True) if "chain_forward" in op.call.name)
    x, *_ = first.call.tensors()
    assert x.shape == (1, 16, 16, 32, 32)
    per_channel = 3 * 16 * 4  # mean, scale, shift
    assert first.read == x.nbytes + per_channel
    assert first.written == x.nbytes // 8
    assert not first.flops


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_calibration_runs_them_again(batch_norm: bool, precision: torch.dtype | None) -> None:
    for operator in fused(batch_norm, precision):
        assert read_call(write_call(operator.call)) == operator.call
        Replay(operator.call, torch.device("cpu"))()
