"""Speeds of convolutions that somebody published, where none were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import PositiveFloat, PositiveInt

from hyperslab.machine.part import Part
from hyperslab.trace.records import Call, TensorSpec

INPUT = {
    "aten.convolution.default": 0,
    "aten.mkldnn_convolution.default": 0,
    "aten.convolution_backward.default": 1,
}
"""Convolutions and their gradients: which argument is the input."""


class Rate(Part):
    """Of a rank's convolutions from so many channels on so many voxels, of all its samples.

    Oyama et al. 2020, section V-B: less work on a GPU leaves memory for faster algorithms.
    """

    channels: PositiveInt
    voxels: PositiveInt
    rate: PositiveFloat  # [flop/s]


def published_rate(call: Call, rates: Sequence[Rate]) -> float | None:
    """[flop/s] of a call; None if it is no convolution or nothing was published.

    Of the nearest number of channels, interpolated in the logarithms of voxels; outside of the
    published blocks that of the nearest.
    """
    at = INPUT.get(call.name)
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
