"""Strangers' networks can be traced, and their flops are torch's own count (tier: no process)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hyperslab.planner.records import Exchange, Trace
from hyperslab.planner.trace import Workload, trace_step
from tests.networks.zoo import NETWORKS, Network
from tests.selection import in_gate

# In the gate one sixth of them is counted against torch, another one cut.
COUNTED, CUT_UP = [*NETWORKS][2::6], [*NETWORKS][::6]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MONAI's own

CUT = {"data": 2, "depth": 2, "height": 2}


class Summed(nn.Module):
    """A network as its users call it, and one number out of whatever it returns."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network.make()
        self.call = network.call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leaves = tree_leaves(self.call(self.network, x))
        floats = [v for v in leaves if isinstance(v, torch.Tensor) and v.is_floating_point()]
        total: torch.Tensor = sum(v.mean() for v in floats)  # type: ignore[assignment]
        return total


def itself(prediction: torch.Tensor, _target: Any) -> torch.Tensor:
    return prediction


def workload(name: str) -> Workload:
    network = NETWORKS[name]
    return Workload(lambda: Summed(network), network.shape, loss=itself)


@functools.cache
def serial(name: str) -> Trace:
    return trace_step(workload(name), {})


@pytest.mark.parametrize("name", in_gate(NETWORKS, kept=COUNTED))
def test_flops_of_a_serial_step(name: str) -> None:
    network, trace = NETWORKS[name], serial(name)
    with FlopCounterMode(display=False) as counter:
        Summed(network)(torch.randn(network.shape)).backward()
    assert trace.flops() == counter.get_total_flops() > 0
    assert not trace.not_traced


@pytest.mark.parametrize("name", in_gate(NETWORKS, kept=CUT_UP))
def test_a_cut_step(name: str) -> None:
    trace, whole = trace_step(workload(name), CUT, rank=3), serial(name)
    assert any(isinstance(event, Exchange) for event in trace.events)
    assert 0 < trace.flops() < whole.flops()
    assert trace.saved < whole.saved
