"""The operators whose overhead is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

CHANNELS = 8
DEPTH = 4
WIDTH = 8
CLASSES = 3

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operator, the shapes of what it takes besides its input, and how that input lies."""

    run: Operator
    weights: tuple[tuple[int, ...], ...] = ()
    whole: bool = False
    channels: int = CHANNELS
    labels: bool = False  # of every voxel


def cases() -> dict[str, Case]:
    """The operators that networks for volumes are made of."""
    c = CHANNELS
    kernel = (c, c, 3, 3, 3)
    affine = ((c,), (c,))
    conv = partial(_weighted, F.conv3d, stride=1, padding=1)
    return {
        "conv3d": Case(conv, (kernel, (c,))),
        "conv3d, no padding": Case(partial(_weighted, F.conv3d), (kernel, (c,))),
        "conv3d, uncut": Case(conv, (kernel, (c,)), whole=True),
        "conv_transpose3d": Case(
            partial(_weighted, F.conv_transpose3d, stride=2), ((c, c, 2, 2, 2), (c,))
        ),
        "batch_norm": Case(_batch_norm, affine),
        "instance_norm": Case(_instance_norm, affine),
        "group_norm": Case(_group_norm, affine),
        "relu": Case(F.relu),
        "leaky_relu": Case(F.leaky_relu),
        "max_pool3d": Case(partial(F.max_pool3d, kernel_size=2)),
        "avg_pool3d": Case(partial(F.avg_pool3d, kernel_size=2)),
        "conv, norm, relu, pool": Case(_layer, (kernel, (c,), *affine)),
        "add": Case(lambda x: x + x),
        "cat": Case(lambda x: torch.cat((x, x), 1)),
        "interpolate": Case(partial(F.interpolate, scale_factor=2, mode="trilinear")),
        "dropout": Case(partial(F.dropout, p=0.5)),
        "flatten, linear": Case(_linear, ((16, c * DEPTH * WIDTH * WIDTH), (16,)), whole=True),
        "cross_entropy": Case(F.cross_entropy, channels=CLASSES, labels=True),
    }


def _weighted(op: Operator, x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    return op(x, weight, bias, **options)


def _batch_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _instance_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.instance_norm(x, weight=weight, bias=bias)


def _group_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 2, weight, bias)


def _layer(x: Any, kernel: Any, shift: Any, weight: Any, bias: Any) -> Any:
    y = F.conv3d(x, kernel, shift, padding=1)
    return F.avg_pool3d(F.leaky_relu(_batch_norm(y, weight, bias)), 2)


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    return F.linear(x.flatten(1), weight, bias)
