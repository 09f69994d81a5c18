"""The convolutions of a block that a cut one asks for (tier: no process)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.kernels.conv import conv_backward, conv_forward, differentiable_conv
from hyperslab.kernels.conv_problem import ConvOptions
from tests.kernels.conv.reference import conv_reference


def by_torch(x: torch.Tensor, weight: torch.Tensor, stride: int, padding: int):
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
    options = ConvOptions((stride,) * 3, (kernel // 2,) * 3, (1, 1, 1), 1)
    expected = by_torch(x, weight, stride, kernel // 2)
    limit = LIMITS[dtype]
    for value in (float("nan"), 1e30):
        fill_freed_memory(value)
        y = conv_forward(x, weight, None, options)
        needs = [True, True, False]
        dx, dw, _ = conv_backward(torch.ones_like(y), x, weight, options, needs)
        for got, want in zip((y, dx, dw), expected, strict=True):
            assert got.dtype == dtype
            assert got.layout == torch.strided
            assert (got.double() - want).norm() <= limit * want.norm()


def gradients_of_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape, run = (2, 16, 6, 7, 8), torch.ops.hyperslab
    x, g = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last_3d)
        for _ in range(2)
    )
    return [
        *run.direct_convolution_gradient(x, g, (3, 3, 3), (1, 1, 1), True),
        *run.winograd_gradient(x, g, (1, 1, 1), True),
        run.depthwise_gradient(x, g, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_default_type_changes_no_gradient(dtype: torch.dtype) -> None:
    expected = gradients_of_weights(dtype)
    torch.set_default_dtype(torch.float64)
    try:
        found = gradients_of_weights(dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_an_uncut_convolution_ignores_it_too() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 16, 2, 2, 2).bfloat16(), torch.randn(32, 16, 3, 3, 3).bfloat16()
    expected = by_torch(x, weight, 1, 1)
    for value in (float("nan"), 1e30):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        fill_freed_memory(value)
        y = F.conv3d(hs.shard(leaves[0], hs.Grid()), leaves[1], padding=1).full()
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        for got, want in zip((y, *grads), expected, strict=True):
            assert got.dtype == torch.bfloat16
            assert (got.double() - want).norm() <= LIMITS[torch.bfloat16] * want.norm()


CASES = [
    # shape of x, kernel, stride, dilation, groups, padding
    ((2, 4, 9), (3,), (2,), (1,), 2, (1,)),
    ((1, 4, 7, 6), (3, 2), (1, 2), (2, 1), 1, (2, 0)),
    ((1, 16, 6, 5, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), 1, (1, 1, 1)),
    ((2, 6, 5, 6, 4), (3, 1, 2), (2, 1, 1), (1, 1, 2), 3, (1, 0, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_version_equals_the_reference(
    case: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    shape, kernel, stride, dilation, groups, padding = case
    torch.manual_seed(0)
    options = ConvOptions(stride, padding, dilation, groups)
    x = torch.randn(shape, dtype=dtype)
    weight = torch.randn(6, shape[1] // groups, *kernel, dtype=dtype)
    bias = torch.randn(6, dtype=dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = conv_reference(*leaves, options)
    gradient = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, gradient)
    with torch.no_grad():
        y = conv_forward(x, weight, bias, options)
        found = conv_backward(gradient.to(dtype), x, weight, options, [True] * 3)
    own = [t.clone().requires_grad_() for t in (x, weight, bias)]
    other = differentiable_conv(*own, options)
    graphs = torch.autograd.grad(other, own, gradient.to(dtype))
    for got, expected in zip(
        (y, *found, other, *graphs), (want, *wanted, want, *wanted), strict=True
    ):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_uneven_padding() -> None:
    x, weight = torch.randn(1, 2, 6, 5), torch.randn(3, 2, 2, 4)
    options = ConvOptions((1, 1), (0, 1), (1, 1), 1)
    got = differentiable_conv(x, weight, None, options, (0, 1, 0, 1))
    padded = F.pad(x, [1, 2, 0, 1])
    torch.testing.assert_close(got, conv_reference(padded, weight, None, options.without_padding))
