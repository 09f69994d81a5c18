"""The weight's gradient: variants of (x, g, weight, with_bias, problem) -> (dw, db or None)."""

from __future__ import annotations

import torch

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels import choose
from hyperslab.ops.kernels.convolution.layout import in_rows
from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.convolution.variants import columns, matrix, registers, winograd
from hyperslab.ops.kernels.convolution.variants.variant import (
    ConvVariant,
    ConvVariants,
    torch_takes_little,
)

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
"""Gradients of weight and bias."""


def weight_by_torch(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """Torch chooses: im2col for small blocks in float32."""
    return _by_aten(x, g, weight, problem, with_bias, problem.padding)


def weight_contiguous(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """OneDNN in contiguous memory."""
    x = in_rows(x)
    if x.dtype == torch.float32:
        x = x.to_mkldnn()  # chooses the kernel; the gradients are ordinary tensors
    return _by_aten(x, in_rows(g), weight.contiguous(), problem, with_bias, problem.padding)


def weight_in_halves(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """The two halves of the volume, with what windows share, as a batch: torch takes oneDNN.

    It is the one way to oneDNN's kernel for channels last: what ``to_mkldnn`` makes is contiguous.
    """
    span, starts = _halves(problem)
    shape = (2, x.shape[1], span, *x.shape[3:])
    parts = torch.empty(shape, dtype=x.dtype, memory_format=CHANNELS_LAST[x.dim()])
    for part, lo in zip(parts, starts, strict=True):
        first = max(lo, 0)
        end = min(lo + span, x.shape[2])
        part[:, : first - lo].zero_()
        part[:, first - lo : end - lo] = x[0, :, first:end]
        part[:, end - lo :].zero_()
    batch = g[0].unflatten(1, (2, -1)).transpose(0, 1)
    return _by_aten(parts, batch, weight, problem, with_bias, (0, *problem.padding[1:]))


def has_halves(problem: Problem) -> bool:
    """One sample and an even number of outputs, each half of which reads something."""
    if problem.x[0] != 1 or problem.y[2] % 2:
        return False
    span, starts = _halves(problem)
    return all(lo + span > 0 and lo < problem.x[2] for lo in starts)


def _halves(problem: Problem) -> tuple[int, tuple[int, int]]:
    """How many planes each half of the outputs reads, and from which on."""
    stride = problem.options.stride[0]
    half = problem.y[2] // 2
    span = (half - 1) * stride + problem.options.dilation[0] * (problem.kernel[0] - 1) + 1
    return span, (-problem.padding[0], half * stride - problem.padding[0])


def takes_im2col(problem: Problem) -> bool:
    """Whether torch computes by im2col what oneDNN would do in a tenth of the time."""
    return (
        problem.dtype == torch.float32
        and problem.options.groups == 1
        and problem.x[0] == 1
        and torch.Size(problem.x[:4]).numel() <= choose.IM2COL
    )


def weight_by_columns(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """Torch chooses, the taps of the last dim as channels."""
    whole = columns.columns_of(x, problem)
    turned = columns.weight_in_columns(weight)
    dw, db = weight_by_torch(whole, g, turned, with_bias, columns.in_columns(problem))
    return columns.weight_of_columns(dw), db


def _by_aten(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    problem: Problem,
    with_bias: bool,
    padding: tuple[int, ...],
) -> WeightAndBias:
    options = problem.options
    _, dw, db = torch.ops.aten.convolution_backward(
        g,
        x,
        weight,
        [problem.weight[0]],
        options.stride,
        padding,
        options.dilation,
        False,
        [0] * len(padding),
        options.groups,
        [False, True, with_bias],
    )
    return dw, db


WEIGHT_VARIANTS: ConvVariants = {
    "torch": ConvVariant(weight_by_torch, torch_takes_little),
    "columns": ConvVariant(weight_by_columns, columns.has_columns, copies=True),
    "halves": ConvVariant(weight_in_halves, has_halves, copies=True),
    "contiguous": ConvVariant(weight_contiguous, copies=True),
    "matrix": ConvVariant(matrix.weight_by_matrix, matrix.windows_tile, copies=True),
    "im2col": ConvVariant(matrix.weight_by_samples, matrix.windows_are_small),
    "registers": ConvVariant(registers.weight_in_registers, registers.fits_registers),
    "winograd": ConvVariant(winograd.weight_by_winograd, winograd.fits_winograd),
}
