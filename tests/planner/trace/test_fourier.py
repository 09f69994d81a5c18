"""Fourier layers can be traced: their flops and messages (tier: no process)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hyperslab.planner.records import Exchange
from hyperslab.planner.trace import Workload, trace_step

SHAPE = (2, 4, 16, 12, 8)
MODES = 6


class Spectral(nn.Module):
    """The Fourier layer of Li et al. 2021: the low modes of every channel are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, MODES, MODES, MODES, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        low = (slice(None), slice(None), *[slice(0, MODES)] * 3)
        found = torch.zeros(modes.shape, dtype=modes.dtype, device=x.device)
        low = (*low[:-1], slice(0, 5))
        weight = self.weight[..., :5]
        found[low] = torch.einsum("bixyz,ioxyz->boxyz", modes[low], weight)
        return torch.fft.irfftn(found, s=x.shape[2:], dim=(2, 3, 4))


def traced(extents: dict[str, int], rank: int = 0) -> Any:
    return trace_step(Workload(Spectral, SHAPE), extents, rank)


def fft_flops(trace: Any) -> float:
    return sum(n for o in trace.operators if "_fft" in o.call.name for _, n in o.flops)


def test_flops_of_transforms() -> None:
    """There and back; the input needs no gradient, so one transform in the backward pass."""
    points = math.prod(SHAPE)
    once = 2.5 * points * math.log2(16 * 12 * 8)
    found = fft_flops(traced({}))
    assert found >= 2 * once
    assert found <= 3.5 * once


def test_what_is_cut_is_shared_and_sent() -> None:
    whole = traced({})
    cut = traced({"depth": 2}, rank=1)
    assert fft_flops(cut) < 0.75 * fft_flops(whole)
    assert cut.saved < whole.saved
    exchanges = [event for event in cut.events if isinstance(event, Exchange)]
    moved = [e for e in exchanges if "Fourier" in e.what]
    assert len(moved) >= 4  # there and back, twice
    there = 8 * math.prod((2, 4, 8, MODES // 2, 5))  # bytes: half of the other dims' kept modes
    back = 8 * math.prod((2, 4, MODES // 2, MODES // 2, 5))
    assert [nbytes for e in moved[:2] for _, nbytes in e.sends] == [there, back]
