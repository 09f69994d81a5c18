"""The kernels that a cut convolution asks for. No process is started."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.comm import Plan
from hyperslab.geometry import Box, Window
from hyperslab.ops.convolution.spec import ConvSpec, conv_backward, conv_forward


def spec_of(x: torch.Tensor, weight: torch.Tensor, stride: int, padding: int) -> ConvSpec:
    windows = tuple(Window(k, stride, padding, padding, 1) for k in weight.shape[2:])
    box = Box.whole(x.shape)
    return ConvSpec("", windows, (False,) * 3, 1, Plan(box, box, (), ()), box)


def reference(x: torch.Tensor, weight: torch.Tensor, stride: int, padding: int):
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    y = F.conv3d(x, weight, None, stride, padding)
    return y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))


LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def fill_freed_memory(value: float) -> None:
    """What is allocated next is likely to hold ``value`` and not zeros."""
    blocks = [torch.full((1 << n,), value) for n in range(6, 22, 2) for _ in range(6)]
    del blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("extents", "kernel", "stride"),
    [
        ((2, 4, 4), 3, 1),
        ((2, 2, 2), 3, 1),
        ((1, 5, 3), 3, 2),
        ((4, 6, 5), 5, 1),
        ((8, 1, 8), 5, 1),
        ((7, 9, 8), 3, 2),
    ],
)
def test_kernels_ignore_what_memory_held(
    extents: tuple[int, int, int], kernel: int, stride: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 16, *extents).to(dtype)
    weight = torch.randn(32, 16, kernel, kernel, kernel).to(dtype)
    spec = spec_of(x, weight, stride, kernel // 2)
    padding = [kernel // 2] * 3
    expected = reference(x, weight, stride, kernel // 2)
    limit = LIMITS[dtype]
    for value in (float("nan"), 1e30):
        fill_freed_memory(value)
        y = conv_forward(x, weight, None, spec, padding)
        needs = [True, True, False]
        dx, dw, _ = conv_backward(torch.ones_like(y), x, weight, spec, padding, needs)
        for got, want in zip((y, dx, dw), expected, strict=True):
            assert got.dtype == dtype
            assert got.layout == torch.strided
            assert (got.double() - want).norm() <= limit * want.norm()


def test_an_uncut_convolution_ignores_it_too() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 16, 2, 2, 2).bfloat16(), torch.randn(32, 16, 3, 3, 3).bfloat16()
    expected = reference(x, weight, 1, 1)
    for value in (float("nan"), 1e30):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        fill_freed_memory(value)
        y = F.conv3d(hs.shard(leaves[0], hs.Grid()), leaves[1], padding=1).full()
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        for got, want in zip((y, *grads), expected, strict=True):
            assert got.dtype == torch.bfloat16
            assert (got.double() - want).norm() <= LIMITS[torch.bfloat16] * want.norm()
