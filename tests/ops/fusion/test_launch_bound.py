"""Small blocks on a GPU run by torch's own operators, with the serial results (tier: gloo ranks).

Kernels are chosen as on CUDA, on the CPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.kernels.registry import choose_as_if_on
from hyperslab.ops.fusion import LAUNCH_BOUND
from tests.ranks import run_ranks


def network(dtype: torch.dtype) -> nn.Module:
    """Each normalisation with an activation behind it, in place or not, and a view that is held."""
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm3d(4),
        nn.ReLU(inplace=True),
        nn.Conv3d(4, 4, 3, padding=1, bias=False),
        nn.InstanceNorm3d(4, affine=True),
        nn.LeakyReLU(0.1),
        nn.GroupNorm(2, 4),
        nn.LeakyReLU(0.2, inplace=True),
        nn.BatchNorm3d(4, affine=False, momentum=None),
        nn.ReLU(),
        nn.BatchNorm3d(4, track_running_stats=False),
    ).to(dtype)


def errors(dtype: torch.dtype, channels_last: bool) -> float:
    """The worst relative error of result, gradients and running statistics after two steps."""
    torch.manual_seed(1)
    plain = network(dtype)
    cut = copy.deepcopy(plain)
    full = torch.randn(2, 2, 5, 7, 6, dtype=dtype)
    if channels_last:
        full = full.contiguous(memory_format=torch.channels_last_3d)
    worst = 0.0
    grid = hs.Grid(depth=hs.comm.bootstrap.ranks_in())
    hs.parallelize(cut, grid)
    for _ in range(2):
        x = full.clone().requires_grad_()
        y = plain(x)
        y.pow(3).mean().backward()
        leaf = full.clone().requires_grad_()
        with choose_as_if_on("cuda"):
            z = cut(hs.shard(leaf, grid, check=False))
            z.pow(3).mean().backward()
        pairs = [(z.full(), y)]
        pairs += [
            (a.grad, b.grad) for a, b in zip(cut.parameters(), plain.parameters(), strict=True)
        ]
        pairs += list(zip(cut.buffers(), plain.buffers(), strict=True))
        for a, b in pairs:
            assert a is not None
            assert b is not None
            distance = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-3)
            worst = max(worst, distance.item())
    return worst


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_results_are_serial(ranks: int, channels_last: bool) -> None:
    assert max(run_ranks(ranks, errors, torch.float64, channels_last)) < 1e-10
    # Gradients before a normalisation are differences of large numbers.
    assert max(run_ranks(ranks, errors, torch.float32, channels_last)) < 1e-3


def deferred(extent: int, kind: str) -> bool:
    x = hs.shard(torch.randn(1, 2, extent, 4, 4), hs.Grid()).requires_grad_()
    with choose_as_if_on(kind):
        y = F.batch_norm(x * 2, None, None, training=True)
        assert isinstance(y, hs.Sharded)
        return y.pending is not None


def test_larger_blocks_and_the_cpu_have_epilogues() -> None:
    limit = LAUNCH_BOUND // 32
    assert [deferred(limit, kind) for kind in ("cuda", "cpu")] == [False, True]
    assert deferred(limit + 1, "cuda")


def test_create_graph_and_evaluation() -> None:
    x = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64)
    for training in (True, False):
        found = []
        for cut in (False, True):
            leaf = x.clone().requires_grad_()
            with choose_as_if_on("cuda"):
                value = hs.shard(leaf, hs.Grid()) if cut else leaf
                stats = [torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)]
                y = F.relu(F.batch_norm(value, *stats, training=training)).pow(3).sum()
                (g,) = torch.autograd.grad(y, leaf, create_graph=True)
                (g.pow(2).sum()).backward()
            assert leaf.grad is not None
            found.append(leaf.grad)
        torch.testing.assert_close(found[1], found[0])
