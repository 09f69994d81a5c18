"""Writes calls of operators as text, and compares them, so that one's time tells another's.

A call is written as text into a machine file and read back, equal after the round trip:

>>> import torch
>>> spec = TensorSpec((2, 3), (3, 1), torch.float32)
>>> text = write_call(Call("aten.sum.dim_IntList", (spec, (1,), True)))
>>> text
'aten.sum.dim_IntList(f32[2,3], (1,), True)'
>>> read_call(text).arguments[0] == spec
True

A tensor that is not contiguous has its strides behind its shape: ``f32[2,3](1,2)``. The text is
a Python expression; nothing of it is evaluated. `parse_call` takes it apart without torch, so that
a bad file is known before torch is imported.

Times are interpolated between calls of one `call_kind`, by the distance of their features. A
convolution's backward computes two gradients in one call, which can be timed apart.
"""

from __future__ import annotations

import ast
import heapq
import itertools
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hyperslab.planner.records import Call, LocalOperator, Pass, TensorSpec

DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
    "complex128": "c128",
}
"""Names torch's dtypes in the text of a call."""

_DTYPE_NAMES = {short: name for name, short in DTYPES.items()}
_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_CONSTANTS = {f"torch.{name}" for name in (*DTYPES, *_FORMATS, "strided")}
_DEVICE = re.compile(r"(cpu|cuda|meta)(:(\d|[1-9]\d))?")
DOTTED_NAME = re.compile(r"\w+(\.\w+)+")
"""Matches a dotted name, even with keywords of Python in it: ``aten.random_.from``."""

_NUMBERS = {"inf": float("inf"), "nan": float("nan")}


def write_call(call: Call) -> str:
    """Writes a call on one line.

    Raises:
        ValueError: an argument is of a type, or a tensor of a dtype, that has no text.
    """
    options = [f"{name}={_write_argument(value)}" for name, value in call.options]
    return f"{call.name}({', '.join([*map(_write_argument, call.arguments), *options])})"


def read_call(text: str) -> Call:
    """Reads a call that `write_call` wrote; raises as `parse_call`."""
    import torch

    return parse_call(text, torch)


def parse_call(text: str, torch: Any = None) -> Call:
    """Parses a call; without ``torch`` each argument that only torch can make is None.

    Raises:
        ValueError: it is not the text of a call.
    """
    name, opening, rest = text.partition("(")
    with suppress(SyntaxError, RecursionError, MemoryError):  # the last two if it is very deep
        node = ast.parse(f"call{opening}{rest}", mode="eval").body
        if isinstance(node, ast.Call) and DOTTED_NAME.fullmatch(name):
            arguments = tuple(_parse_argument(one, torch) for one in node.args)
            words = ((str(word.arg), _parse_argument(word.value, torch)) for word in node.keywords)
            return Call(name, arguments, tuple(words))
    raise ValueError(f"{text!r} is not a call")


def _write_argument(value: object) -> str:
    import torch

    from hyperslab.kernels.memory_format import strides_in

    if isinstance(value, TensorSpec):
        dtype = DTYPES.get(str(value.dtype).removeprefix("torch."))
        if dtype is None:
            raise ValueError(f"a tensor of {value.dtype} has no text in a machine file")
        strides = ""
        if value.strides != strides_in(value.shape):
            strides = f"({','.join(map(str, value.strides))})"
        return f"{dtype}[{','.join(map(str, value.shape)) or '()'}]{strides}"
    if isinstance(value, tuple):
        inside = ", ".join(map(_write_argument, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if str(value) in _CONSTANTS:
        return str(value)
    raise ValueError(f"a {type(value).__name__} has no text in a machine file")


def _parse_argument(node: ast.expr, torch: Any = None) -> object:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(_parse_argument(one, torch) for one in node.elts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _parse_argument(operand)
            if isinstance(number, int | float | complex):
                return -number
        case ast.Name(id=name) if name in _NUMBERS:
            return _NUMBERS[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if f"torch.{name}" in _CONSTANTS:
            return torch and getattr(torch, name)
        case ast.Subscript(value=ast.Name(id=name)) if name in _DTYPE_NAMES:
            return _tensor(name, _parse_numbers(node.slice), None, torch)
        case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=str(name))]):
            if _DEVICE.fullmatch(name):
                return torch and torch.device(name)
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name in _DTYPE_NAMES:
            assert isinstance(node.func, ast.Subscript)
            shape = _parse_numbers(node.func.slice)
            strides = tuple(number for part in node.args for number in _parse_numbers(part))
            if len(strides) == len(shape):
                return _tensor(name, shape, strides, torch)
        case ast.BinOp(op=ast.Add() | ast.Sub()):  # a complex number
            return ast.literal_eval(node)
    raise ValueError(f"{ast.unparse(node)!r} is not an argument of a call")


def _parse_numbers(node: ast.expr) -> tuple[int, ...]:
    value = _parse_argument(node)
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{ast.unparse(node)!r} is not a list of whole numbers")
    return numbers


def _tensor(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, torch: Any
) -> TensorSpec | None:
    if torch is None:
        return None
    from hyperslab.kernels.memory_format import strides_in

    if strides is None:
        strides = strides_in(shape)
    return TensorSpec(shape, strides, getattr(torch, _DTYPE_NAMES[dtype]))


BOTH_GRADIENTS = "aten.convolution_backward.default"
"""Names the operator that computes backward-data and backward-filter, or one of them."""

_NEIGHBOURS = 4  # measured calls that one is interpolated between
_LEAST_DISTANCE = 1e-2  # a distance in logarithms: nearer ones do not outweigh all others
_NEIGHBOURHOOD = 3.0
"""Is the distance to twice the width of a volume, and a little more; nothing farther counts."""

TimedCall = tuple[list[float], float, float]
"""Holds the features of a measured call, its time [s] and its roofline [s]."""


def call_kind(call: Call) -> tuple[object, ...]:
    """Classifies calls: the times of one kind can be interpolated between.

    Words are arguments that choose what is computed: flags, and None for a missing tensor.
    """
    words = [value for value in call.arguments if value is None or isinstance(value, (bool, str))]
    if call.name == BOTH_GRADIENTS:
        words.append(str(call.arguments[-1:]))
    return call.name, tuple(spec.dtype for spec in call.tensors()), tuple(map(str, words))


def interpolated_seconds(call: Call, least: float, known: Iterable[TimedCall]) -> float | None:
    """Interpolates the time [s] of a call, whose roofline is ``least``, between those of its kind.

    The slowness is averaged geometrically over the nearest, weighted by the inverse square of
    their distance in the logarithms of time and of extents; None if all are too far away.
    """
    here = call_features(call, least)
    apart = [
        # Of other numbers of dims the rooflines count.
        (math.dist(here, there) if len(here) == len(there) else 1 + abs(here[0] - there[0]), *times)
        for there, *times in known
    ]
    nearest = heapq.nsmallest(_NEIGHBOURS, apart, key=lambda one: one[0])
    if not nearest or nearest[0][0] > _NEIGHBOURHOOD:
        return None
    weights = [1 / max(distance, _LEAST_DISTANCE) ** 2 for distance, _, _ in nearest]
    logarithms = [math.log(seconds / roofline) for _, seconds, roofline in nearest]
    mean = sum(w * log for w, log in zip(weights, logarithms, strict=True)) / sum(weights)
    return least * math.exp(mean)


def only_pass(operator: LocalOperator, name: Pass) -> LocalOperator:
    """Returns the operator with one of its passes alone; a convolution's backward may do two.

    Raises:
        ValueError: it does not do that pass.
    """
    flops = tuple(pair for pair in operator.flops if pair[0] == name)
    if not flops:
        raise ValueError(f"{operator.call.name} does no {name}")
    if operator.call.name != BOTH_GRADIENTS or len(operator.flops) == 1:
        return operator
    *rest, mask = operator.call.arguments
    assert isinstance(mask, tuple)
    wanted = (name == "backward-data", name == "backward-filter", False)
    alone = tuple(bool(asked) and one for asked, one in zip(mask, wanted, strict=True))
    gradient, x, weight = (spec.nbytes for spec in itertools.islice(operator.call.tensors(), 3))
    call = replace(operator.call, arguments=(*rest, alone))
    read = gradient + (weight if name == "backward-data" else x)
    written = x if name == "backward-data" else weight
    return replace(operator, call=call, flops=flops, read=read, written=written)


def measurable_passes(operator: LocalOperator) -> list[LocalOperator]:
    """Lists the operator as called, and each of its passes alone where it does several."""
    if operator.call.name != BOTH_GRADIENTS or len(operator.flops) < 2:
        return [operator]
    return [operator, *(only_pass(operator, name) for name, _ in operator.flops)]


def call_features(call: Call, least: float) -> list[float]:
    """Lists a call's features: the roofline, and of each tensor the extents.

    Channels count as much as the roofline, for they decide how fast a convolution is; the other
    extents half.
    """
    features = [math.log(max(least, 1e-12))]
    for spec in call.tensors():
        features += [
            math.log(max(extent, 1)) / (1 if dim == 1 else 2)
            for dim, extent in enumerate(spec.shape)
        ]
        features.append(float(spec.channels_last))
    return features


CONVOLUTION_INPUT = {
    "aten.convolution.default": 0,
    "aten.mkldnn_convolution.default": 0,
    "aten.convolution_backward.default": 1,
}
"""Gives the index of the input among the arguments of convolutions and their gradients."""
