"""The input's gradient, and transposed convolution: variants of (g, weight, bias, problem) -> x."""

from __future__ import annotations

import torch

from hyperslab.ops.kernels.convolution.layout import in_channels_last, in_rows
from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.convolution.variants import matrix, registers
from hyperslab.ops.kernels.convolution.variants.variant import (
    ConvVariant,
    ConvVariants,
    torch_takes_little,
)


def input_by_torch(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Torch chooses: im2col for small blocks in float32."""
    options = problem.options
    x = torch.ops.aten.convolution(
        g,
        weight,
        bias,
        options.stride,
        problem.padding,
        options.dilation,
        True,
        problem.left_over,
        options.groups,
    )
    return in_channels_last(x)


def input_by_name(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """OneDNN, whatever torch would choose."""
    options = problem.options
    x = torch.ops.mkldnn._convolution_transpose_pointwise(
        g,
        weight,
        bias,
        problem.padding,
        problem.left_over,
        options.stride,
        options.dilation,
        options.groups,
        "none",
        [],
        "",
    )
    return in_channels_last(x)


def input_contiguous(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """OneDNN in contiguous memory."""
    return input_by_name(in_rows(g), weight.contiguous(), bias, problem)


def has_name(problem: Problem) -> bool:
    """OneDNN has it without groups and dilation, and without rows that no window reaches."""
    options = problem.options
    reached = all(r < s for r, s in zip(problem.left_over, options.stride, strict=True))
    return options.groups == 1 and set(options.dilation) == {1} and reached


def input_by_flipped_kernel(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """A convolution of ``g`` with the kernel turned round: the forward pass is the faster one."""
    options = problem.options
    dims = tuple(range(2, g.dim()))
    groups = weight.unflatten(0, (options.groups, -1))
    turned = groups.transpose(1, 2).flatten(0, 1).flip(dims)
    x = torch.ops.aten.mkldnn_convolution(
        g,
        turned,
        bias,
        _reach(problem),
        options.stride,
        options.dilation,
        options.groups,
    )
    return in_channels_last(x)


def can_flip(problem: Problem) -> bool:
    """Without stride, and with no more padding than the kernel reaches."""
    smaller = all(k <= e for k, e in zip(problem.kernel, problem.y[2:], strict=True))
    safe = problem.dtype != torch.bfloat16 or smaller  # see `outreaches`
    return safe and set(problem.options.stride) == {1} and min(_reach(problem)) >= 0


def _reach(problem: Problem) -> list[int]:
    steps = zip(problem.kernel, problem.padding, problem.options.dilation, strict=True)
    return [d * (k - 1) - p for k, p, d in steps]


INPUT_VARIANTS: ConvVariants = {
    "flipped": ConvVariant(input_by_flipped_kernel, can_flip),
    "onednn": ConvVariant(input_by_name, has_name),
    "contiguous": ConvVariant(input_contiguous, has_name, copies=True),
    "torch": ConvVariant(input_by_torch, torch_takes_little),
    "matrix": ConvVariant(matrix.input_by_matrix, matrix.windows_tile, copies=True),
    "registers": ConvVariant(registers.input_in_registers, registers.fits_registers),
}
