"""Floating-point operations of a call, by torch's own formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

from hyperslab.trace.records import Call, Pass, Stage, TensorSpec

_aten = torch.ops.aten

BACKWARD: tuple[Pass, Pass] = ("backward-data", "backward-filter")


def flops_of(
    operator: torch._ops.OpOverload, call: Call, result: object, stage: Stage
) -> tuple[tuple[Pass, int], ...]:
    """Of each pass that a call does; none for operators that only move or scale elements.

    ``result`` is the form of what it returns.
    """
    packet = operator.overloadpacket
    arguments = [_shape(value) for value in call.arguments]
    if packet is _aten.convolution_backward:
        return _of_convolution_backward(arguments, _shape(result))
    formula = FORMULAS.get(packet)
    if formula is None:
        return ()
    options = {name: _shape(value) for name, value in call.options}
    count = int(formula(*arguments, **options, out_val=_shape(result)))
    return (("forward" if stage == "forward" else "backward-data", count),)


def _of_convolution_backward(arguments: list[Any], result: Any) -> tuple[tuple[Pass, int], ...]:
    formula = flop_registry[_aten.convolution_backward]
    counts: list[tuple[Pass, int]] = []
    for which, name in enumerate(BACKWARD):
        if arguments[10][which]:
            mask = [which == 0, which == 1, False]
            counts.append((name, int(formula(*arguments[:10], mask, out_val=result))))
    return tuple(counts)


def _of_mkldnn_convolution(x: Any, weight: Any, *_: Any, out_val: Any) -> int:
    return conv_flop_count(x, weight, out_val)


def _of_transposed(x: Any, weight: Any, *_: Any, out_val: Any) -> int:
    return conv_flop_count(x, weight, out_val, transposed=True)


def _of_fft(whole: Any, dims: Sequence[int], each: float) -> int:
    """5 n log2 n of a complex row of n, half of that of a real one: the usual count for FFTs."""
    length = math.prod(whole[dim] for dim in dims)
    return round(each * math.prod(whole) * math.log2(max(1, length)))


def _of_fft_c2c(x: Any, dims: Any, *_: Any, out_val: Any) -> int:
    return _of_fft(x, dims, 5)


def _of_fft_r2c(x: Any, dims: Any, *_: Any, out_val: Any) -> int:
    return _of_fft(x, dims, 2.5)


def _of_fft_c2r(x: Any, dims: Any, *_: Any, out_val: Any) -> int:
    return _of_fft(out_val, dims, 2.5)


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._fft_c2c: _of_fft_c2c,
    _aten._fft_r2c: _of_fft_r2c,
    _aten._fft_c2r: _of_fft_c2r,
    _aten.mkldnn_convolution: _of_mkldnn_convolution,
    torch.ops.mkldnn._convolution_transpose_pointwise: _of_transposed,
}


def _shape(value: object) -> Any:
    """The shapes of tensors, as the formulas take them."""
    if isinstance(value, TensorSpec):
        return torch.Size(value.shape)
    if isinstance(value, tuple) and any(isinstance(v, TensorSpec | tuple) for v in value):
        return tuple(_shape(v) for v in value)
    return value
