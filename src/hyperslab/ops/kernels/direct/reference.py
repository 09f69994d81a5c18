"""Convolution and the weight's gradient by torch's own operators in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST


def direct_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    adjoint: bool,
) -> torch.Tensor:
    """See the schema."""
    check_volumes(x, weight, bias, adjoint)
    wide = torch.promote_types(x.dtype, torch.float32)
    if adjoint:
        weight = weight.transpose(0, 1).flip(tuple(range(2, weight.dim())))
    ones = [1] * len(padding)
    y = torch.ops.aten.convolution(
        x.to(wide),
        weight.to(wide),
        None if bias is None else bias.to(wide),
        ones,
        padding,
        ones,
        False,
        [0] * len(padding),
        1,
    )
    return y.to(x.dtype).contiguous(memory_format=CHANNELS_LAST[x.dim()])


def direct_convolution_gradient(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    check_gradient(x, g, kernel, padding)
    wide = torch.promote_types(x.dtype, torch.float32)
    ones = [1] * len(padding)
    _, dw, _ = torch.ops.aten.convolution_backward(
        g.to(wide),
        x.to(wide),
        x.new_empty((g.shape[1], x.shape[1], *kernel), dtype=wide),
        None,
        ones,
        padding,
        ones,
        False,
        [0] * len(padding),
        1,
        [False, True, False],
    )
    dims = [0, *range(2, g.dim())]
    db = g.to(wide).sum(dims) if with_bias else g.new_empty(0, dtype=wide)
    return dw.to(x.dtype), db.to(x.dtype)


def check_volumes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, adjoint: bool
) -> None:
    """They fit each other.

    Raises:
        ValueError: they do not.
    """
    out, channels = weight.shape[:2][::-1] if adjoint else weight.shape[:2]
    fits = x.dim() in CHANNELS_LAST and x.dim() == weight.dim() and channels == x.shape[1]
    if not fits or weight.dtype != x.dtype:
        raise ValueError(f"a weight {tuple(weight.shape)} for a volume {tuple(x.shape)}")
    if bias is not None and (bias.shape != (out,) or bias.dtype != x.dtype):
        raise ValueError(f"a bias {tuple(bias.shape)} for {out} channels")


def check_gradient(
    x: torch.Tensor, g: torch.Tensor, kernel: Sequence[int], padding: Sequence[int]
) -> None:
    """The gradient is one of what the convolution makes.

    Raises:
        ValueError: it is not.
    """
    steps = zip(x.shape[2:], kernel, padding, strict=True)
    extents = tuple(e + 2 * p - k + 1 for e, k, p in steps)
    if x.dim() not in CHANNELS_LAST or (g.shape[0], *g.shape[2:]) != (x.shape[0], *extents):
        raise ValueError(f"a gradient {tuple(g.shape)} for results of {extents}")
    if g.dtype != x.dtype:
        raise ValueError(f"a gradient in {g.dtype} for a volume in {x.dtype}")
