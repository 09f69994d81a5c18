"""Channels far from zero in units of their deviation (tier: one, then two ranks)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.kernels.memory_format import CHANNELS_LAST
from tests.ranks import run_ranks

NORMS: dict[str, Callable[..., Any]] = {
    "batch": lambda y, w, b: F.batch_norm(y, None, None, w, b, training=True),
    "group": lambda y, w, b: F.group_norm(y, 2, w, b),
    "instance": lambda y, w, b: F.instance_norm(y, weight=w, bias=b),
}
RATIOS = (0.0, 123.4, 12345.678, 1234567.9)


def block(ratio: float, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 12, 8, 7, generator=generator, dtype=torch.float64) * spread
    return (x + ratio).float()


def results(
    name: str, x: torch.Tensor, dtype: torch.dtype, axes: dict[str, int] | None = None
) -> list[torch.Tensor]:
    """Output and gradients of block, weight and bias of a norm with leaky ReLU and pooling."""
    generator = torch.Generator().manual_seed(2)
    leaf = x.to(dtype).requires_grad_()
    weight, bias, g = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((6,), (6,), (2, 6, 4, 4, 7))
    )
    weight.requires_grad_()
    bias.requires_grad_()
    volume: Any = leaf
    if axes is not None:
        volume = hs.shard(leaf, hs.Grid(**axes))
        volume = volume.like(volume.local, fresh=True)  # as a convolution's: a chain
    y = F.avg_pool3d(F.leaky_relu(NORMS[name](volume, weight, bias), 0.3), [3, 2, 1])
    y = y.full() if isinstance(y, hs.Sharded) else y
    found = torch.autograd.grad(y, [leaf, weight, bias], g.to(dtype))
    if axes:
        for gradient in found:  # of the losses of all ranks
            torch.distributed.all_reduce(gradient)
        found = tuple(gradient / math.prod(axes.values()) for gradient in found)
    return [y.detach(), *found]


def excesses(name: str, x: torch.Tensor, axes: dict[str, int]) -> list[float]:
    """By how much each error is above twice that of torch, relative to the result."""
    exact = results(name, x.contiguous(), torch.float64)
    serial = results(name, x.contiguous(), torch.float32)
    found = []
    for a, b, c in zip(results(name, x, torch.float32, axes), serial, exact, strict=True):
        error = float((a.double() - c).norm()) - 2 * float((b.double() - c).norm())
        found.append((error - 1e-7) / max(float(c.norm()), 1e-30))
    return found


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("spread", [1.0, 0.0])
@pytest.mark.parametrize(("name", "ratio"), list(itertools.product(NORMS, RATIOS)))
def test_never_worse_than_twice_torch(name: str, ratio: float, spread: float, last: bool) -> None:
    x = block(ratio, spread)
    x = x.contiguous(memory_format=CHANNELS_LAST[5]) if last else x
    assert max(excesses(name, x, {})) < 1e-6


@pytest.mark.parametrize("name", NORMS)
def test_a_constant_channel_on_two_ranks(name: str) -> None:
    x = block(1234567.9, 0.0)
    for found in run_ranks(2, excesses, name, x, {"depth": 2}):
        assert max(found) < 1e-6
