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
