"""Estimates how long an operator takes on a rank when so many of them run at once on a node.

A call is written as text into a machine file and read back, equal after the round trip:

>>> spec = TensorSpec((2, 3), (3, 1), torch.float32)
>>> text = write_call(Call("aten.sum.dim_IntList", (spec, (1,), True)))
>>> text
'aten.sum.dim_IntList(f32[2,3], (1,), True)'
>>> read_call(text).arguments[0] == spec
True

A tensor that is not contiguous has its strides behind its shape: ``f32[2,3](1,2)``. The text is
a Python expression; nothing of it is evaluated.

`Setting` holds the measured calls of one number of ranks per node. Its estimate is the measured
time of an equal call, else interpolated between calls of one `call_kind`, else a published rate
of convolutions, else the roofline.
"""

from __future__ import annotations

import ast
import heapq
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat, PositiveInt

from hyperslab.planner.machine.links import FitResidual, MachineSection
from hyperslab.planner.trace.records import (
    Call,
    LocalOperator,
    Pass,
    TensorSpec,
    contiguous_strides,
)

_DTYPE_NAMES = {
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
_DTYPES = {short: dtype for dtype, short in _DTYPE_NAMES.items()}
DOTTED_NAME = re.compile(r"\w+(\.\w+)+")
"""Matches a dotted name, even with keywords of Python in it: ``aten.random_.from``."""

_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_TORCH_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def write_call(call: Call) -> str:
    """Writes a call on one line.

    Raises:
        ValueError: an argument is of a type that has no text.
    """
    options = [f"{name}={_write_argument(value)}" for name, value in call.options]
    return f"{call.name}({', '.join([*map(_write_argument, call.arguments), *options])})"


def read_call(text: str) -> Call:
    """Reads a call that `write_call` wrote.

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
    options = tuple((str(keyword.arg), _read_argument(keyword.value)) for keyword in node.keywords)
    return Call(name, tuple(map(_read_argument, node.args)), options)


def _write_argument(value: object) -> str:
    if isinstance(value, TensorSpec):
        strides = ""
        if value.strides != contiguous_strides(value.shape):
            strides = f"({','.join(map(str, value.strides))})"
        return f"{_DTYPE_NAMES[value.dtype]}[{','.join(map(str, value.shape)) or '()'}]{strides}"
    if isinstance(value, tuple):
        inside = ", ".join(map(_write_argument, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, complex, str, *_TORCH_CONSTANTS)):
        return repr(value) if not isinstance(value, _TORCH_CONSTANTS) else str(value)
    raise ValueError(f"a {type(value).__name__} has no text in a machine file")


def _read_argument(node: ast.expr) -> object:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(map(_read_argument, node.elts))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _read_argument(operand)
            if isinstance(number, int | float | complex):
                return -number
        case ast.Name(id=name) if name in _NUMBERS:
            return _NUMBERS[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _torch_constant(name)
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
    value = _read_argument(node)
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{ast.unparse(node)!r} is no list of whole numbers")
    return numbers


def _torch_constant(name: str) -> object:
    value = getattr(torch, name, None)
    if not isinstance(value, _TORCH_CONSTANTS):
        raise ValueError(f"torch.{name} is no argument of a call")
    return value


How = Literal["measured", "interpolated", "modelled"]
"""Says where a time is from: the same call, other shapes of it, or the roofline alone."""

BOTH_GRADIENTS = "aten.convolution_backward.default"
"""Names the operator that computes backward-data and backward-filter, or one of them."""

_NEIGHBOURS = 4  # measured calls that one is interpolated between
_LEAST_DISTANCE = 1e-2  # a distance in logarithms: nearer ones do not outweigh all others


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds the estimated time of one call, and where it comes from."""

    seconds: float
    how: How


class TimedCall(NamedTuple):
    """Holds a measured call as `interpolated_seconds` compares it with others of its kind."""

    features: list[float]
    seconds: float
    roofline: float


def call_kind(call: Call) -> tuple[object, ...]:
    """Classifies calls: the times of one kind can be interpolated between.

    Words are arguments that choose what is computed: flags, and None for a missing tensor.
    """
    words = [value for value in call.arguments if value is None or isinstance(value, (bool, str))]
    if call.name == BOTH_GRADIENTS:
        words.append(str(call.arguments[-1]))
    return call.name, tuple(spec.dtype for spec in call.tensors()), tuple(map(str, words))


def interpolated_seconds(call: Call, least: float, known: Sequence[TimedCall]) -> float:
    """Interpolates the time [s] of a call between measured ones of its kind.

    The slowness is averaged geometrically over the nearest, weighted by the inverse square of
    their distance in the logarithms of time and of extents.
    """
    here = _call_features(call, least)
    distances = [_feature_distance(here, one.features) for one in known]
    total = 0.0
    weights = 0.0
    for at in heapq.nsmallest(_NEIGHBOURS, range(len(known)), key=distances.__getitem__):
        weight = 1 / max(distances[at], _LEAST_DISTANCE) ** 2
        total += weight * math.log(known[at].seconds / known[at].roofline)
        weights += weight
    return least * math.exp(total / weights)


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


def _call_features(call: Call, least: float) -> list[float]:
    """Lists a call's features; the roofline is doubled, so that it counts most."""
    features = [2 * math.log(max(least, 1e-12))]
    for spec in call.tensors():
        features += [math.log(max(extent, 1)) / 2 for extent in spec.shape]
        features.append(float(spec.channels_last))
    return features


def _feature_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Computes the distance between two calls; it is large if their numbers of dims differ."""
    if len(a) != len(b):
        return 10 + abs(a[0] - b[0])
    return math.dist(a, b)


CONVOLUTION_INPUT = {
    "aten.convolution.default": 0,
    "aten.mkldnn_convolution.default": 0,
    "aten.convolution_backward.default": 1,
}
"""Gives the index of the input among the arguments of convolutions and their gradients."""


class PublishedRate(MachineSection):
    """Holds a published rate of a rank's convolutions, by input channels and voxels.

    Oyama et al. 2020, section V-B: less work on a GPU leaves memory for faster algorithms.
    """

    channels: PositiveInt
    voxels: PositiveInt
    rate: PositiveFloat  # [flop/s]


def published_rate(call: Call, rates: Sequence[PublishedRate]) -> float | None:
    """Looks up the rate [flop/s] of a call; None if it is no convolution, or none is known.

    Of the nearest number of channels, interpolated in the logarithms of voxels; outside of the
    published blocks that of the nearest.
    """
    at = CONVOLUTION_INPUT.get(call.name)
    if at is None or not rates:
        return None
    x = call.arguments[at]
    assert isinstance(x, TensorSpec)
    channels = min((rate.channels for rate in rates), key=lambda n: abs(math.log(n / x.shape[1])))
    voxels = math.log(max(x.shape[0] * math.prod(x.shape[2:]), 1))
    same = [(math.log(r.voxels), math.log(r.rate)) for r in rates if r.channels == channels]
    below = max((p for p in same if p[0] <= voxels), default=min(same))
    above = min((p for p in same if p[0] >= voxels), default=max(same))
    if below[0] == above[0]:
        return math.exp(below[1])
    part = (voxels - below[0]) / (above[0] - below[0])
    return math.exp(below[1] + part * (above[1] - below[1]))


def _valid_call(text: str) -> str:
    read_call(text)
    return text


def _known_dtypes(names: dict[str, float]) -> dict[str, float]:
    for name in names:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r} is no dtype of torch: write float32, bfloat16 ...")
    if "float32" not in names:
        raise ValueError("the peak of float32 is missing")
    return names


class Measured(MachineSection):
    """Holds a call that was timed; ``bytes`` are those that it reads and writes."""

    call: Annotated[str, AfterValidator(_valid_call)]
    seconds: PositiveFloat
    flops: NonNegativeFloat = 0
    bytes: NonNegativeFloat = 0

    @cached_property
    def parsed(self) -> Call:
        return read_call(self.call)


class Overhead(MachineSection):
    """Holds the time of Python and launch, beside the operators' own."""

    operator: NonNegativeFloat = 0  # [s] for each operator of a step
    step: NonNegativeFloat = 0  # [s] for each step
    residual: FitResidual | None = None


class Setting(MachineSection):
    """Holds the speeds of one rank while ``ranks`` ranks of ``threads`` threads share a node."""

    ranks: PositiveInt
    threads: PositiveInt = 1
    flops: Annotated[dict[str, PositiveFloat], AfterValidator(_known_dtypes)]  # [flop/s] at most
    bandwidth: PositiveFloat  # [B/s] of memory
    launch: NonNegativeFloat = 0  # [s] that the smallest operator takes
    overhead: Overhead = Overhead()
    rates: tuple[PublishedRate, ...] = ()  # published, of convolutions that were not measured
    operators: tuple[Measured, ...] = ()

    def estimate(self, operator: LocalOperator) -> Estimate:
        """Estimates how long the operator takes, without Python's overhead beside it."""
        if operator.call not in self._estimates:
            self._estimates[operator.call] = self._estimate(operator)
        return self._estimates[operator.call]

    def estimate_pass(self, operator: LocalOperator, name: Pass) -> Estimate:
        """Estimates one of the operator's passes alone; see `only_pass`."""
        return self.estimate(only_pass(operator, name))

    def roofline_of(self, operator: LocalOperator) -> float:
        """Computes the least time [s] at this setting, a launch included."""
        return self._least(operator.call, operator.total_flops, operator.read + operator.written)

    @cached_property
    def measured(self) -> dict[Call, Measured]:
        """Indexes the measured operators by call."""
        return {entry.parsed: entry for entry in self.operators}

    @cached_property
    def _estimates(self) -> dict[Call, Estimate]:
        return {}

    @cached_property
    def _kinds(self) -> dict[tuple[object, ...], list[TimedCall]]:
        kinds: dict[tuple[object, ...], list[TimedCall]] = {}
        for call, entry in self.measured.items():
            least = self._least(call, entry.flops, entry.bytes)
            timed = TimedCall(_call_features(call, least), entry.seconds, least)
            kinds.setdefault(call_kind(call), []).append(timed)
        return kinds

    def _estimate(self, operator: LocalOperator) -> Estimate:
        entry = self.measured.get(operator.call)
        if entry is not None:
            return Estimate(entry.seconds, "measured")
        least = self.roofline_of(operator)
        known = self._kinds.get(call_kind(operator.call))
        if known:
            return Estimate(interpolated_seconds(operator.call, least, known), "interpolated")
        rate = published_rate(operator.call, self.rates)
        if rate is not None:
            least = max(least, self.launch + operator.total_flops / rate)
        return Estimate(least, "modelled")

    def _least(self, call: Call, flops: float, nbytes: float) -> float:
        dtype = next((spec.dtype for spec in call.tensors()), torch.float32)
        # A file need not have the peak of each dtype; it has that of float32.
        peak = self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])
        return self.launch + max(flops / peak, nbytes / self.bandwidth)


def entry_of(operator: LocalOperator, seconds: float) -> Measured:
    """Makes the entry of a measured operator in a machine file."""
    return Measured(
        call=write_call(operator.call),
        seconds=float(f"{seconds:.5g}"),  # as many digits as a measurement has
        flops=operator.total_flops,
        bytes=operator.read + operator.written,
    )
