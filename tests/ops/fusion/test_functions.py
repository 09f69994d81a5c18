"""Autograd functions of what is pending, which C++ calls without asking (tier: one process)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return 2 * gradient


def by_function(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(Twice.apply(x))


def reentrant(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("call", [by_function, reentrant, plain])
def test_gradients_come_through(
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    first = nn.Conv3d(2, 4, 3, padding=1)
    norm = nn.GroupNorm(2, 4)
    second = nn.Conv3d(4, 3, 3)
    x = torch.randn(2, 2, 5, 6, 4)
    parameters = [*first.parameters(), *norm.parameters(), *second.parameters()]
    found = []
    for value in (x, hs.shard(x, hs.Grid())):
        total = call(second, torch.relu(norm(first(value)))).square().sum()
        total.backward()
        found.append([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None
    largest = max(g.abs().max() for g in found[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(largest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_checkpoint_begins_and_ends_within_a_chain(dtype: torch.dtype) -> None:
    """Both times the same tensors are kept, and running statistics are updated as often."""
    norm = nn.BatchNorm3d(4)
    first = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), norm).to(dtype)
    second = nn.Sequential(nn.ReLU(), nn.Conv3d(4, 3, 3)).to(dtype)
    x = torch.randn(2, 2, 5, 6, 4, dtype=dtype)
    statistics, gradients, kept = [], [], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.numel()
        return tensor

    for value in (x, hs.shard(x, hs.Grid())):
        norm.reset_running_stats()
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = plain(second, plain(first, value))
        y.square().sum().backward()
        statistics.append([buffer.clone() for buffer in norm.buffers()])
        gradients.append([p.grad for p in (first[0].weight, second[1].weight)])
        first.zero_grad()
        second.zero_grad()
    torch.testing.assert_close(statistics[1], statistics[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-3)
    assert kept[1] == kept[0]
