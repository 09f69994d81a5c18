"""How long an operator takes: measured, interpolated between measured shapes, or modelled.

Legend: the *roofline* of an operator is the time that it needs at the machine's peak speed or at
its memory's bandwidth, whichever is longer; its *slowness* is how many times that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hyperslab.trace.records import Call, LocalOperator, Pass, TensorSpec

How = Literal["measured", "interpolated", "modelled"]
"""Of the very shapes; from other shapes of the same operator; from the roofline alone."""

BOTH_GRADIENTS = "aten.convolution_backward.default"
"""Computes backward-data and backward-filter, as its last argument says."""

_NEAREST = 4  # measured calls that one is interpolated between
_FLOOR = 1e-2  # a distance in logarithms: nearer ones do not outweigh all others


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one call [s], and where it comes from."""

    seconds: float
    how: How


@dataclass(frozen=True, slots=True)
class Known:
    """A measured call: how long it took [s], and its roofline [s]."""

    call: Call
    seconds: float
    roofline: float


def roofline(flops: float, nbytes: float, peak: float, bandwidth: float) -> float:
    """The least time [s], from peak [flop/s] and memory bandwidth [B/s]."""
    return max(flops / peak, nbytes / bandwidth)


def kind(call: Call) -> tuple[object, ...]:
    """Calls of one kind can be interpolated between: the operator, dtypes, and its words.

    Words are arguments that choose what is computed: flags, and None for a missing tensor.
    """
    words = [value for value in call.arguments if value is None or isinstance(value, (bool, str))]
    if call.name == BOTH_GRADIENTS:
        words.append(str(call.arguments[-1]))
    return call.name, tuple(spec.dtype for spec in call.tensors()), tuple(map(str, words))


def slowed_as_near(call: Call, least: float, known: Sequence[Known]) -> float:
    """The time [s] of a call with this roofline [s] from measured ones of its `kind`.

    The slowness is averaged geometrically over the nearest, weighted by the inverse square of
    their distance in the logarithms of time and of extents.
    """
    here = _features(call, least)
    near = sorted((_distance(here, _features(k.call, k.roofline)), i) for i, k in enumerate(known))
    total = 0.0
    weights = 0.0
    for distance, i in near[:_NEAREST]:
        weight = 1 / max(distance, _FLOOR) ** 2
        total += weight * math.log(known[i].seconds / known[i].roofline)
        weights += weight
    return least * math.exp(total / weights)


def only_pass(operator: LocalOperator, name: Pass) -> LocalOperator:
    """The same with one of its passes alone; a convolution's backward may do two.

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
    gradient, x, weight = (_nbytes(value) for value in rest[:3])
    call = replace(operator.call, arguments=(*rest, alone))
    read = gradient + (weight if name == "backward-data" else x)
    written = x if name == "backward-data" else weight
    return replace(operator, call=call, flops=flops, read=read, written=written)


def measurable_passes(operator: LocalOperator) -> list[LocalOperator]:
    """The operator as it is called, and each of its passes alone where it does several."""
    if operator.call.name != BOTH_GRADIENTS or len(operator.flops) < 2:
        return [operator]
    return [operator, *(only_pass(operator, name) for name, _ in operator.flops)]


def _nbytes(value: object) -> int:
    return value.nbytes if isinstance(value, TensorSpec) else 0


def _features(call: Call, least: float) -> list[float]:
    """The roofline twice, so that it counts most; then extents and strides' order."""
    features = [2 * math.log(max(least, 1e-12))]
    for spec in call.tensors():
        features += [math.log(max(extent, 1)) / 2 for extent in spec.shape]
        features.append(float(_channels_last(spec)))
    return features


def _channels_last(spec: TensorSpec) -> bool:
    return len(spec.shape) > 3 and spec.shape[1] > 1 and spec.strides[1] == 1


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Of calls with tensors of other numbers of dims, a large one."""
    if len(a) != len(b):
        return 10 + abs(a[0] - b[0])
    return math.dist(a, b)
