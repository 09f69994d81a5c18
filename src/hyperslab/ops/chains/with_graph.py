"""A chain's gradient out of operators that can be differentiated again: for ``create_graph``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.ops.common.half_precision import wide

AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def chain_with_graph(ctx: Any, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Gradients of block, weight and bias of a `ChainFunction`.

    Without a normalisation the result depends on the block by what was marked alone: the gradient
    is linear in ``gradient``, with factors that are the gradient of ones.
    """
    links = ctx.links
    x, marks = ctx.saved_tensors
    if links.statistics is not None:
        weight, bias = _parameters_then(links.statistics)
        inputs = [x, weight, bias]
        wanted = [i for i, t in enumerate(inputs) if t is not None and ctx.needs_input_grad[i]]
        y = composite(x, weight, bias, links)
        found = torch.autograd.grad(y, [inputs[i] for i in wanted], gradient, create_graph=True)
        return [found[wanted.index(i)] if i in wanted else None for i in range(3)]
    ones = torch.empty(gradient.shape, device=gradient.device, memory_format=ctx.format).fill_(1)
    marks = ones.new_empty(0, dtype=torch.uint8) if marks is None else marks
    options = (links.slope, links.pool, links.maximum, ctx.shape, torch.float32)
    factors = torch.ops.hyperslab.chain_backward(ones, marks, None, None, None, *options)
    spread = wide(gradient)
    for dim, k in enumerate(links.pool, start=2):
        spread = spread.repeat_interleave(k, dim)
    return (spread * factors).to(ctx.dtype), None, None


def _parameters_then(statistics: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias as they were at the call, whatever became of them since.

    The weight with its graph; no gradient of a gradient depends on the bias.
    """
    mean, _, invstd, scale = statistics.moments[:, 0].unbind()
    rounded, _, shift = statistics.norm[:, 0].unbind()
    weight = statistics.affine.weight
    bias = statistics.affine.bias
    if weight is not None and statistics.affine.changed:
        weight = weight + ((scale / invstd).to(weight.dtype) - weight).detach()
    if bias is not None:
        bias = (shift + (mean - rounded) * scale).to(bias.dtype).requires_grad_()
    return weight, bias


def composite(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, links: Any
) -> torch.Tensor:
    """The chain by torch's own operators, statistics included."""
    s = links.statistics
    y = wide(x)
    groups = y.unflatten(1, (-1, s.pool))
    dims = list(range(2, groups.dim()))
    if s.norm.shape[1] == 1 and s.pool == 1:  # over the batch, too
        dims = [0, *dims]
    var, mean = torch.var_mean(groups, dims, correction=0, keepdim=True)
    y = ((groups - mean) * (var + s.eps).rsqrt()).flatten(1, 2)
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    if links.slope != 1:
        y = F.relu(y) if links.slope == 0 else F.leaky_relu(y, links.slope)
    if links.pool:
        pools = MAXIMUM if links.maximum else AVERAGE
        y = pools[len(links.pool)](y, links.pool)
    return y.to(links.dtype)
