"""Memory that torch's convolutions take on the CPU while they run, beside operands and results.

oneDNN computes in an order of its own, channels in groups of 16, and copies what is contiguous into
it: forward the result, and the input where its channels fill such groups; backward the gradient of
the result with that of the input (whose channels are filled up), or with the input. For small
volumes torch takes im2col instead, a column for each output. Measured with torch 2.13 by the
highest memory of a process that calls one convolution.
"""

from __future__ import annotations

import math

import torch

from hyperslab.ops.kernels.choose import IM2COL
from hyperslab.trace.records import Call, TensorSpec

_GROUP = 16  # channels
_BACKWARD = "aten.convolution_backward.default"
_FORWARD = ("aten.convolution.default", "aten.mkldnn_convolution.default")


def scratch_of(call: Call, *, to_onednn: bool) -> int:
    """Of one call [B]; ``to_onednn``: oneDNN is asked for by name."""
    if call.name == _BACKWARD:
        gradient, x, weight = call.arguments[:3]
        mask = call.arguments[10]
        assert isinstance(mask, tuple)
        return _backward(_spec(gradient), _spec(x), _spec(weight), mask, to_onednn)
    if call.name in _FORWARD:
        x, weight = map(_spec, call.arguments[:2])
        out = math.prod(_extents(call, x, weight))
        if not (to_onednn or call.name == _FORWARD[1]) and _by_columns(x):
            return _columns(x, weight, out)
        result = x.shape[0] * _channels(call, weight) * out * x.dtype.itemsize
        return 0 if _channels_last(x) else result + _copied(x)
    return 0


def _backward(
    gradient: TensorSpec,
    x: TensorSpec,
    weight: TensorSpec,
    mask: tuple[object, ...],
    to_onednn: bool,
) -> int:
    if not to_onednn and _by_columns(x):
        return sum(map(bool, mask[:2])) * _columns(x, weight, math.prod(gradient.shape[2:]))
    if _channels_last(x):
        return 0
    padded = x.nbytes * _filled(x.shape[1]) // x.shape[1]
    of_data = gradient.nbytes + padded - x.nbytes if mask[0] else 0
    of_weight = gradient.nbytes + x.nbytes if mask[1] and _copied(x) else 0
    return max(of_data, of_weight)


def _channels(call: Call, weight: TensorSpec) -> int:
    """Of the result."""
    transposed = call.name == _FORWARD[0] and call.arguments[6]
    groups = call.arguments[8] if transposed else 1
    assert isinstance(groups, int)
    return weight.shape[1] * groups if transposed else weight.shape[0]


def _by_columns(x: TensorSpec) -> bool:
    small = len(x.shape) == 5 and math.prod(x.shape[:4]) <= IM2COL
    return small and x.dtype == torch.float32 and not _channels_last(x)


def _columns(x: TensorSpec, weight: TensorSpec, out: int) -> int:
    taps = math.prod(weight.shape[2:])
    return 0 if taps == 1 else x.shape[0] * x.shape[1] * taps * out * x.dtype.itemsize


def _copied(x: TensorSpec) -> int:
    return x.nbytes if x.shape[1] % _GROUP == 0 else 0


def _filled(channels: int) -> int:
    return -(-channels // _GROUP) * _GROUP


def _channels_last(x: TensorSpec) -> bool:
    return x.shape[1] > 1 and x.strides[1] == 1


def _extents(call: Call, x: TensorSpec, weight: TensorSpec) -> list[int]:
    """Of the result's space."""
    if call.name == _FORWARD[1]:
        padding, stride, dilation = call.arguments[3:6]
        transposed: object = False
    else:
        stride, padding, dilation, transposed = call.arguments[3:7]
    assert isinstance(stride, tuple)
    assert isinstance(padding, tuple)
    assert isinstance(dilation, tuple)
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    if transposed:
        return [(e - 1) * s - 2 * p + d * (k - 1) + 1 for e, k, s, p, d in sizes]
    return [(e + 2 * p - d * (k - 1) - 1) // s + 1 for e, k, s, p, d in sizes]


def _spec(value: object) -> TensorSpec:
    assert isinstance(value, TensorSpec)
    return value
