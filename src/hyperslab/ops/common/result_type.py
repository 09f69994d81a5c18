"""The type of an operator's result: autocast may choose another than the operand's."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from hyperslab.ops.common.forms import Operator

_ON_ONE_VALUE: dict[str, Operator] = {
    "instance_norm": lambda x: F.instance_norm(x.expand(1, 1, 2)),
    "group_norm": lambda x: F.group_norm(x.expand(1, 1, 2), 1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x[None], 1),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None, None], 1),
    "max_pool1d": lambda x: F.max_pool1d(x, 1),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 1),
    "max_pool3d": lambda x: F.max_pool3d(x[None, None], 1),
}


def result_type(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What torch's own operator returns for an operand of ``dtype``."""
    if not torch.is_autocast_enabled(device.type):
        return dtype
    return _under_autocast(name, dtype, device, torch.get_autocast_dtype(device.type))


@functools.cache
def _under_autocast(
    name: str, dtype: torch.dtype, device: torch.device, _autocast: torch.dtype
) -> torch.dtype:
    x = torch.zeros((1, 1, 1), dtype=dtype, device=device)
    return _ON_ONE_VALUE[name](x).dtype
