"""Power-average pooling: an average pooling between powers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.ops.common.arguments import per_dim
from hyperslab.ops.common.placement import check_input
from hyperslab.ops.pooling.pool import avg_pool, max_pool
from hyperslab.tensor import Sharded, register

LOCAL = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}


def lp_pool(n: int, x: Sharded, p: float, kernel: Any, stride: Any, ceil: bool) -> Sharded:
    """The ``p``-norm of every window, as torch composes it of other operators.

    Distribution scheme: 1. the power, block by block, 2. average pooling, 3. its root, block by
    block. An infinite ``p`` is the maximum of the absolute values (or the minimum).
    """
    check_input(x, n, f"lp_pool{n}d")
    if math.isinf(p):
        sign = math.copysign(1, p)
        y = max_pool(n, x.like(x.local.abs() * sign), kernel, stride, 0, 1, ceil)
        return y.like(y.local * sign)
    y = avg_pool(n, x.like(x.local.pow(p)), kernel, stride, 0, ceil, True, None)
    average = torch.sign(y.local) * F.relu(y.local.abs())
    return y.like((average * math.prod(per_dim(kernel, n))).pow(1.0 / p))


def _register(n: int) -> None:
    def rule(
        input: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> Sharded:
        """Any window, any power, infinity included."""
        return lp_pool(n, input, norm_type, kernel_size, stride, ceil_mode)

    register(LOCAL[n], family="pooling")(rule)


for _n in LOCAL:
    _register(_n)
