"""Dropout that keeps mean and variance, for networks of SELUs (Klambauer et al. 2017)."""

from __future__ import annotations

import torch

from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.elementwise.draws import bernoulli_block, write_block
from hyperslab.ops.elementwise.dropout import check_random_state, drops, own_part
from hyperslab.tensor import Sharded

SELU_LIMIT = 1.7580993408473766
"""Dropped values become minus this, what SELU tends to, before all are scaled (section 2)."""


@register_each("alpha_dropout", "feature_alpha_dropout", family="elementwise")
def alpha_dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """The same on every grid; whole channels, and matrices that are contiguous, as torch's own."""
    whole_channels = operator.__name__ == "feature_alpha_dropout"
    active = drops(p, training if train is None else train)
    if not input.is_floating_point():
        raise ValueError(f"alpha dropout of {input.dtype}: takes floating-point numbers")
    if whole_channels and input.dim() < 2:
        raise ValueError(f"alpha dropout of whole channels has no channels in {input.partition}")
    if not active:
        return input
    kept = _kept_channels(input, p) if whole_channels else bernoulli_block(input, 1 - p)
    scale = ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
    shift = (kept - (1 - p)) * (SELU_LIMIT * scale)
    y = input.block * (kept * scale) + shift
    return write_block(input, y) if inplace else input.like(y, fresh=True)


def _kept_channels(x: Sharded, p: float) -> torch.Tensor:
    """Ones and zeros for this rank's part of the batch and the channels, drawn as torch does."""
    check_random_state(x)
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    return own_part(torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p), x)
