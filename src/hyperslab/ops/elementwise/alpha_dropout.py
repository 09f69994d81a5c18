"""Dropout that keeps mean and variance, for networks of SELUs (Klambauer et al. 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.ops.elementwise.draws import write_block, zeros_and_ones
from hyperslab.ops.elementwise.dropout import check_probability, check_random_state
from hyperslab.tensor import Sharded, register

SELU_LIMIT = 1.7580993408473766
"""Dropped values become minus this, what SELU tends to, before all are scaled (section 2)."""


@register(F.alpha_dropout, torch.alpha_dropout, family="elementwise")
def alpha_dropout(
    input: Sharded,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """The same on every grid; without spatial extents equal to torch's own."""
    _check(input, p, 0)
    if not (training if train is None else train) or p == 0.0:
        return input
    return _drop(input, zeros_and_ones(input, 1 - p), p, inplace)


@register(F.feature_alpha_dropout, torch.feature_alpha_dropout, family="elementwise")
def feature_alpha_dropout(
    input: Sharded,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """Whole channels: torch's own mask, the same on every grid."""
    _check(input, p, 2)
    if not (training if train is None else train) or p == 0.0:
        return input
    check_random_state(input)
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    kept = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p)
    for dim in (0, 1):
        lo, hi = input.box.interval(dim)
        kept = kept.narrow(dim, lo, hi - lo)
    return _drop(input, kept, p, inplace)


def _check(x: Sharded, p: float, least: int) -> None:
    check_probability(p)
    if not x.is_floating_point():
        raise ValueError(f"alpha dropout of {x.dtype}: takes floating-point numbers")
    if x.dim() < least:
        raise ValueError(f"alpha dropout of whole channels has no channels in {x.partition}")


def _drop(x: Sharded, kept: torch.Tensor, p: float, inplace: bool) -> Sharded:
    """``kept``: this rank's ones and zeros."""
    scale = ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
    shift = (kept - (1 - p)) * (SELU_LIMIT * scale)
    y = x.block * (kept * scale) + shift
    return write_block(x, y) if inplace else x.like(y, fresh=True)
