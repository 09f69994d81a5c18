"""Attention over cut tokens can be traced: its messages, and what it keeps (tier: no process)."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import nn

from hyperslab.planner.records import Exchange
from hyperslab.planner.trace import Workload, trace_step

SHAPE = (1, 4, 8, 6, 8)


class Attention(nn.Module):
    """Voxels attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(x.shape)


def test_messages_of_the_ring() -> None:
    trace = trace_step(Workload(Attention, SHAPE), {"depth": 4}, 1)
    sent = [e for e in trace.events if isinstance(e, Exchange) and "attention" in e.what]
    block = 4 * 2 * math.prod(SHAPE) // 4  # bytes of a rank's keys and values
    # Three steps forward and three backward, and their gradients, which go home in a fourth.
    assert [[nbytes for _, nbytes in e.sends] for e in sent] == [[block]] * 10
    assert sum("gradients" in e.what for e in sent) == 4


def test_memory_falls() -> None:
    saved = [trace_step(Workload(Attention, SHAPE), {"depth": n}, 0).saved for n in (2, 4, 8)]
    assert saved[1] < 0.6 * saved[0]
    assert saved[2] < 0.6 * saved[1]
