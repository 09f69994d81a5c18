"""Power-average pooling: an average pooling between powers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hyperslab.ops.common.arguments import PerDim
from hyperslab.ops.common.forms import Operator, register_each, spatial_dims
from hyperslab.ops.common.placement import check_input
from hyperslab.ops.common.unbatched import with_batch
from hyperslab.ops.pooling.pool import avg_pool, max_pool, pool_windows
from hyperslab.tensor import Sharded


@register_each(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, family="pooling")
@with_batch
def lp_pool(
    operator: Operator,
    input: Sharded,
    norm_type: float,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    ceil_mode: bool = False,
) -> Sharded:
    """Any window, any power, infinity included: the norm of every window.

    Distribution scheme: 1. the power, block by block, 2. average pooling, 3. its root, block by
    block, as torch composes it. An infinite power is the maximum of the absolute values (or the
    minimum).
    """
    n = spatial_dims(operator)
    check_input(input, n, f"lp_pool{n}d")
    windows = pool_windows(n, kernel_size, stride)
    block = input.block
    if math.isinf(norm_type):
        sign = math.copysign(1, norm_type)
        y = max_pool(input.like(block.abs() * sign), windows, ceil_mode)
        return y.like(y.block * sign)
    y = avg_pool(input.like(block.pow(norm_type)), windows, ceil_mode)
    average = torch.sign(y.block) * F.relu(y.block.abs())
    elements = math.prod(window.kernel for window in windows)
    return y.like((average * elements).pow(1.0 / norm_type))
