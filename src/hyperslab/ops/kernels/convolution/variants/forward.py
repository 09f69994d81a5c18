"""The forward pass: variants of (x, weight, bias, problem) -> y, all channels last."""

from __future__ import annotations

import torch

from hyperslab.ops.kernels.convolution.layout import in_channels_last, in_rows
from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.convolution.variants import columns, matrix, registers
from hyperslab.ops.kernels.convolution.variants.variant import (
    ConvVariant,
    ConvVariants,
    torch_takes_little,
)


def forward_by_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Torch chooses: im2col for small blocks in float32."""
    options = problem.options
    y = torch.ops.aten.convolution(
        x,
        weight,
        bias,
        options.stride,
        problem.padding,
        options.dilation,
        False,
        [0] * len(problem.padding),
        options.groups,
    )
    return in_channels_last(y)


def forward_by_name(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """OneDNN, whatever torch would choose."""
    options = problem.options
    y = torch.ops.aten.mkldnn_convolution(
        x, weight, bias, problem.padding, options.stride, options.dilation, options.groups
    )
    return in_channels_last(y)


def forward_contiguous(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """OneDNN in contiguous memory."""
    return forward_by_name(in_rows(x), weight.contiguous(), bias, problem)


def forward_in_columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """OneDNN, the taps of the last dim as channels."""
    whole = columns.columns_of(x, problem)
    turned = columns.weight_in_columns(weight)
    return forward_by_name(whole, turned, bias, columns.in_columns(problem))


FORWARD_VARIANTS: ConvVariants = {
    "onednn": ConvVariant(forward_by_name),
    "contiguous": ConvVariant(forward_contiguous, copies=True),
    "columns": ConvVariant(forward_in_columns, columns.has_columns, copies=True),
    "torch": ConvVariant(forward_by_torch, torch_takes_little),
    "matrix": ConvVariant(matrix.forward_by_matrix, matrix.windows_tile, copies=True),
    "registers": ConvVariant(registers.forward_in_registers, registers.fits_registers),
}
