"""The operators as torch knows them: schemas, references, forms on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.fused.layout import format_of
from hyperslab.ops.kernels.fused.operators import FusedOperator, registered
from hyperslab.ops.kernels.windows import compiled, reference


def _maximum_form(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    extents: Sequence[int],
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:2], *extents)
    y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=format_of(x))
    return y, torch.empty_like(y, dtype=torch.uint8) if mark else y.new_empty(0, dtype=torch.uint8)


def _backward_form(
    g: torch.Tensor,
    winners: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    shape: Sequence[int],
    channels_last: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    memory_format = CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format
    return torch.empty(list(shape), dtype=dtype, device=g.device, memory_format=memory_format)


WINDOW_OPERATORS = (
    FusedOperator(
        # y (N, C, *extents) in `dtype` and in x's memory format, and its winners (uint8, as y;
        # empty without `mark`). Window o begins at o * stride - padding; what lies beyond the
        # block is left out. Every window meets the block.
        "window_maximum(Tensor x, int[] kernel, int[] stride, int[] padding, int[] extents, "
        "bool mark, ScalarType dtype) -> (Tensor, Tensor)",
        reference.window_maximum,
        _maximum_form,
        compiled.compiled_window_maximum,
    ),
    FusedOperator(
        # dx of x's `shape`, in `dtype` and in the memory format that is told; summed in float32,
        # of float64 in float64. g: gradient of y.
        "window_maximum_backward(Tensor g, Tensor winners, int[] kernel, int[] stride, "
        "int[] padding, int[] shape, bool channels_last, ScalarType dtype) -> Tensor",
        reference.window_maximum_backward,
        _backward_form,
        compiled.compiled_window_maximum_backward,
    ),
)


WINDOW_LIBRARY = registered(WINDOW_OPERATORS)
"""Keeps the registration alive."""
