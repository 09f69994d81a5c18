"""Forms of what operators return where torch has none on its meta device, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyperslab.memory_format import CHANNELS_LAST, memory_format_of

_aten = torch.ops.aten


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Torch's form is contiguous whatever the operands are (2.13)."""
    y = _aten.convolution(x, weight, bias, stride, padding, dilation, transposed, extra, groups)
    formats = {memory_format_of(x), memory_format_of(weight)}
    if formats == {torch.contiguous_format}:
        return y
    return torch.empty_like(y, memory_format=CHANNELS_LAST[x.dim()])


def _mkldnn_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    zero = [0] * len(padding)
    return _convolution(x, weight, bias, stride, padding, dilation, False, zero, groups)


def _convolution_transpose_pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    extra: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *_: object,
) -> torch.Tensor:
    return _convolution(x, weight, bias, stride, padding, dilation, True, extra, groups)


META_FORMS: dict[Any, Callable[..., Any]] = {
    _aten.convolution: _convolution,
    _aten.mkldnn_convolution: _mkldnn_convolution,
    torch.ops.mkldnn._convolution_transpose_pointwise: _convolution_transpose_pointwise,
    _aten.to_mkldnn: lambda x, *_: torch.empty_like(x),
}
