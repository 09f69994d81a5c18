"""What cannot be traced, or only in part (tiers: no process; a fork)."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.planner.trace import Workload, trace_step
from tests.forked import forked_commands

CUBE = (1, 2, 8, 8, 8)


@torch.library.custom_op("hyperslab_tests::blurred", mutates_args=())
def blurred(x: torch.Tensor) -> torch.Tensor:
    return (x + x.mean()).clone()


class Blur(nn.Module):
    """A user's own operator without a meta form, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        local = y.local if hasattr(y, "local") else y
        blurred(local.detach())
        return y


def test_an_operator_without_a_meta_form_is_named_and_the_rest_traced() -> None:
    trace = trace_step(Workload(Blur, CUBE), {"depth": 2})
    assert trace.not_traced == {"hyperslab_tests.blurred.default": 1}
    assert trace.flops("forward") > 0


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.local.mean() > 0 else x


def test_what_reads_values_is_refused_with_its_layer() -> None:
    with pytest.raises(UnsupportedOp, match=r"in 0 reads values, and a step that is traced"):
        trace_step(Workload(lambda: nn.Sequential(Reads()), CUBE), {"depth": 2})


def test_a_grid_that_cannot_be() -> None:
    with pytest.raises(LayoutError, match=r"into 9 shards along depth"):
        trace_step(Workload(lambda: nn.Conv3d(2, 2, 3), CUBE), {"depth": 9})


def test_an_operator_without_a_rule_is_refused_as_in_a_run() -> None:
    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.pdist(x)

    with pytest.raises(UnsupportedOp, match="pdist"):
        trace_step(Workload(Pairs, CUBE), {"depth": 2})


def test_no_memory_is_taken_and_few_addresses_suffice() -> None:
    """The step has half a gigabyte of tensors, and 2.5 GiB of addresses beside the libraries'."""
    program = f"""
import resource
import torch.nn.functional as F
from hyperslab import models
from hyperslab.planner.trace import Workload, trace_step
status = open("/proc/self/status").read()
addresses = (int(status.split("VmSize:")[1].split()[0]) << 10) + {5 << 29}
resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
shapes = ((2, 4, 128, 128, 128), (2, 4))
trace = trace_step(Workload(lambda: models.CosmoFlow(128), *shapes, loss=F.mse_loss), {{}})
status = open("/proc/self/status").read()  # getrusage would count the process before exec, too
print(trace.peak, int(status.split("VmHWM:")[1].split()[0]) << 10)
"""
    with forked_commands():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, resident = map(int, done.stdout.split())
    assert peak > 400 << 20
    assert resident < 1 << 30
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_outputs_of_3_tb_are_traced() -> None:
    workload = Workload(lambda: nn.Conv3d(4, 16, 3, padding=1), (64, 4, 512, 512, 512))
    trace = trace_step(workload, {})
    assert trace.peak > 500 << 30
