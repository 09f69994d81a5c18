"""A call as text and back: readable in a machine file, and equal after the round trip.

>>> spec = TensorSpec((2, 3), (3, 1), torch.float32)
>>> text = write_call(Call("aten.sum.dim_IntList", (spec, (1,), True)))
>>> text
'aten.sum.dim_IntList(f32[2,3], (1,), True)'
>>> read_call(text).arguments[0] == spec
True

A tensor that is not contiguous has its strides behind its shape: ``f32[2,3](1,2)``. The text is a
Python expression; nothing of it is evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import torch

from hyperslab.trace.records import Call, TensorSpec

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_DTYPES = {short: dtype for dtype, short in _SHORT.items()}
DOTTED_NAME = re.compile(r"\w+(\.\w+)+")
"""A dotted name, which may have words of Python in it: ``aten.random_.from``."""

_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_OF_TORCH = (torch.dtype, torch.memory_format, torch.layout)


def write_call(call: Call) -> str:
    """One line.

    Raises:
        ValueError: an argument is of a type that has no text.
    """
    options = [f"{name}={_write(value)}" for name, value in call.options]
    return f"{call.name}({', '.join([*map(_write, call.arguments), *options])})"


def read_call(text: str) -> Call:
    """The inverse of `write_call`.

    Raises:
        ValueError: it is not the text of a call.
    """
    name, opening, rest = text.partition("(")
    try:
        node: ast.expr | None = ast.parse(f"call{opening}{rest}", mode="eval").body
    except (SyntaxError, ValueError):
        node = None
    if not isinstance(node, ast.Call) or not DOTTED_NAME.fullmatch(name):
        raise ValueError(f"{text!r} is no call")
    options = tuple((str(keyword.arg), _read(keyword.value)) for keyword in node.keywords)
    return Call(name, tuple(map(_read, node.args)), options)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """[elements] that torch gives to a new tensor of this shape."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _write(value: object) -> str:
    if isinstance(value, TensorSpec):
        strides = ""
        if value.strides != contiguous_strides(value.shape):
            strides = f"({','.join(map(str, value.strides))})"
        return f"{_SHORT[value.dtype]}[{','.join(map(str, value.shape)) or '()'}]{strides}"
    if isinstance(value, tuple):
        inside = ", ".join(map(_write, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, complex, str, *_OF_TORCH)):
        return repr(value) if not isinstance(value, _OF_TORCH) else str(value)
    raise ValueError(f"a {type(value).__name__} has no text in a machine file")


def _read(node: ast.expr) -> object:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(map(_read, node.elts))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _read(operand)
            if isinstance(number, int | float | complex):
                return -number
        case ast.Name(id=name) if name in _NUMBERS:
            return _NUMBERS[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _of_torch(name)
        case ast.Subscript(value=ast.Name(id=name)) if name in _DTYPES:
            shape = _read_numbers(node.slice)
            return TensorSpec(shape, contiguous_strides(shape), _DTYPES[name])
        case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=str(name))]):
            return torch.device(name)
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name in _DTYPES:
            assert isinstance(node.func, ast.Subscript)
            strides = tuple(number for part in node.args for number in _read_numbers(part))
            return TensorSpec(_read_numbers(node.func.slice), strides, _DTYPES[name])
        case ast.BinOp(op=ast.Add() | ast.Sub()):  # a complex number
            return ast.literal_eval(node)
    raise ValueError(f"{ast.unparse(node)!r} is no argument of a call")


def _read_numbers(node: ast.expr) -> tuple[int, ...]:
    value = _read(node)
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{ast.unparse(node)!r} is no list of whole numbers")
    return numbers


def _of_torch(name: str) -> object:
    value = getattr(torch, name, None)
    if not isinstance(value, _OF_TORCH):
        raise ValueError(f"torch.{name} is no argument of a call")
    return value
